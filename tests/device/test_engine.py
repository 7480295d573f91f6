"""The embedded engine on a GPU computes what the model computes, draws from it, and forgets old weights."""

from __future__ import annotations

from typing import Any

import anyio
import numpy as np
import pytest
import torch
from benchmarks.gpu.engine import generate_all
from tests.device.models import FAMILIES, VOCAB_SIZE, create_model

from areal_actors.domain import Sampling, Snapshot
from areal_actors.generation.torch import TorchEngine, TorchEngineConfig

SETTINGS = (
    Sampling(max_new_tokens=1),
    Sampling(max_new_tokens=1, temperature=0.6),
    Sampling(max_new_tokens=1, top_k=5),
    Sampling(max_new_tokens=1, top_p=0.7, temperature=1.3),
    Sampling(max_new_tokens=1, temperature=0.0),
)
TOLERANCES = {"float32": 2e-3, "bfloat16": 0.25}


def prompts(number: int, *, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB_SIZE, 3 + 7 * (row % 9)).astype(np.int32) for row in range(number)]


@torch.no_grad()
def expected_logprobs(model: Any, prompt: np.ndarray, ids: list[int]) -> np.ndarray:
    """The log-probabilities of ``ids`` behind ``prompt``, by the model itself in float32."""
    whole = torch.tensor(np.concatenate([prompt, ids]), dtype=torch.long, device=model.device)[None]
    logprobs = model(input_ids=whole, use_cache=False).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    return logprobs.gather(-1, whole[0, len(prompt) :, None]).squeeze(-1).cpu().numpy()


def config(device: str, dtype: str, **settings: Any) -> TorchEngineConfig:
    return TorchEngineConfig(device=device, dtype=dtype, max_length=512, **({"max_concurrent": 16} | settings))


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_are_those_of_the_model(device: str, family: str, dtype: str, caplog: Any):
    """Prompts of many lengths in one batch, more of them than slots, against a plain forward pass in float32.

    The engine must not warn that it takes a slower path.
    """
    model = create_model(device, family=family)
    caplog.set_level("WARNING", logger="areal_actors")

    async def sample() -> dict[int, Any]:
        found: dict[int, Any] = {}
        async with TorchEngine.open(config(device, dtype), model=model) as engine:
            await generate_all(engine, prompts(24), num_new=40, found=found)
        return found

    found = anyio.run(sample)
    gaps = [
        np.abs(expected_logprobs(model, prompt, found[row][0]) - found[row][2])
        for row, prompt in enumerate(prompts(24))
    ]
    assert all(len(gap) == 40 for gap in gaps)
    assert [] == [record.getMessage() for record in caplog.records]
    assert np.concatenate(gaps).mean() < TOLERANCES[dtype] / 5
    assert np.concatenate(gaps).max() < TOLERANCES[dtype]


def test_samples_follow_the_probabilities(device: str):
    """Frequencies of 4,096 draws after one prompt, by total variation; an honest sampler is within half of the bound.

    Log-probabilities are those of the distribution that was drawn from, after temperature and truncation, and the
    plain ones at temperature 0.
    """
    model, prompt = create_model(device), prompts(1)[0]

    async def draw() -> list[dict[int, Any]]:
        found: list[dict[int, Any]] = [{} for _ in SETTINGS]
        # One engine for all: its kernels are compiled once.
        async with TorchEngine.open(config(device, "float32", max_concurrent=256), model=model) as engine:
            for sampling, own in zip(SETTINGS, found, strict=True):
                await generate_all(engine, [prompt] * 4096, sampling=sampling, found=own)
        return found

    for sampling, found in zip(SETTINGS, anyio.run(draw), strict=True):
        ids, logprobs, raw = (np.array([each[part][0] for each in found.values()]) for part in range(3))
        plain, expected = next_probabilities(model, prompt, sampling)
        distance = np.abs(np.bincount(ids, minlength=VOCAB_SIZE) / 4096 - expected).sum() / 2
        assert distance < 0.15, sampling
        np.testing.assert_allclose(raw, np.log(plain[ids]), atol=2e-3, err_msg=str(sampling))
        drawn_from = plain if sampling.temperature == 0 else expected
        np.testing.assert_allclose(logprobs, np.log(drawn_from[ids]), atol=2e-3, err_msg=str(sampling))


@torch.no_grad()
def next_probabilities(model: Any, prompt: np.ndarray, sampling: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities [V] of the next token, of the plain softmax and after temperature, top-k and top-p."""
    ids = torch.tensor(prompt, dtype=torch.long, device=model.device)[None]
    logits = model(input_ids=ids, use_cache=False).logits[0, -1].double().cpu()
    plain = logits.softmax(-1).numpy()
    if sampling.temperature == 0:
        return plain, np.eye(len(plain))[int(plain.argmax())]
    probabilities = (logits / sampling.temperature).softmax(-1).numpy()
    order = np.argsort(-probabilities)
    kept = order[: sampling.top_k or len(order)]
    within = np.cumsum(probabilities[kept]) / probabilities[kept].sum()
    kept = kept[: int(np.searchsorted(within, sampling.top_p)) + 1] if sampling.top_p < 1 else kept
    cut = np.zeros_like(probabilities)
    cut[kept] = probabilities[kept]
    return plain, cut / cut.sum()


def test_a_generation_depends_on_no_other(device: str):
    """Log-probabilities of many short and long generations that begin and end at different steps, in float32."""
    model, chosen = create_model(device), prompts(40, seed=3)

    async def sample() -> dict[int, Any]:
        found: dict[int, Any] = {}
        settings = config(device, "float32", max_concurrent=8)
        async with TorchEngine.open(settings, model=model) as engine, anyio.create_task_group() as tasks:
            for row, prompt in enumerate(chosen):
                tasks.start_soon(one, engine, row, prompt, found)
        return found

    async def one(engine: TorchEngine, row: int, prompt: np.ndarray, found: dict[int, Any]) -> None:
        own: dict[int, Any] = {}
        await generate_all(engine, [prompt], num_new=1 + 11 * (row % 5), found=own, name=str(row))
        found[row] = own[0]

    found = anyio.run(sample)
    for row, prompt in enumerate(chosen):
        ids, _, raw = found[row]
        assert len(ids) == 1 + 11 * (row % 5)
        np.testing.assert_allclose(raw, expected_logprobs(model, prompt, ids), atol=2e-3)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_loaded_weights_are_used_at_once(device: str, dtype: str):
    """Whatever was captured or cached under the old weights is not replayed, also not for prompts seen before."""
    old, new = create_model(device), create_model(device, seed=1)

    async def sample() -> dict[int, Any]:
        found: dict[int, Any] = {}
        async with TorchEngine.open(config(device, dtype), model=old) as engine:
            await generate_all(engine, prompts(8), num_new=20)
            await engine.load(Snapshot(version=1, state=new.state_dict()))
            await generate_all(engine, prompts(8), num_new=20, found=found)
        return found

    found = anyio.run(sample)
    for row, prompt in enumerate(prompts(8)):
        gap = np.abs(expected_logprobs(new, prompt, found[row][0]) - found[row][2])
        assert gap.mean() < TOLERANCES[dtype] / 3
