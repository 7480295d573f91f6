"""The embedded engine on a GPU computes what the model computes, draws from it, and forgets old weights."""

from __future__ import annotations

from typing import Any

import anyio
import numpy as np
import pytest
import torch
from benchmarks.gpu.engine import generate_all
from tests.device.models import FAMILIES, VOCAB_SIZE, create_model

from areal_actors.engines.base import Snapshot
from areal_actors.engines.torch import TorchEngine, TorchEngineConfig

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
def test_log_probabilities_are_those_of_the_model(device: str, family: str, dtype: str):
    """Prompts of many lengths in one batch, more of them than slots, against a plain forward pass in float32."""
    model = create_model(device, family=family)

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
    assert np.concatenate(gaps).mean() < TOLERANCES[dtype] / 5
    assert np.concatenate(gaps).max() < TOLERANCES[dtype]


def test_samples_follow_the_probabilities(device: str):
    """Frequencies of 4,096 draws after one prompt, by total variation; an honest sampler is within a third of this."""
    model, prompt = create_model(device), prompts(1)[0]

    async def draw() -> np.ndarray:
        found: dict[int, Any] = {}
        async with TorchEngine.open(config(device, "float32", max_concurrent=256), model=model) as engine:
            await generate_all(engine, [prompt] * 4096, num_new=1, found=found)
        return np.array([ids[0] for ids, _, _ in found.values()])

    frequencies = np.bincount(anyio.run(draw), minlength=VOCAB_SIZE) / 4096
    with torch.no_grad():
        ids = torch.tensor(prompt, dtype=torch.long, device=device)[None]
        probabilities = model(input_ids=ids, use_cache=False).logits[0, -1].softmax(-1).cpu().numpy()
    assert np.abs(frequencies - probabilities).sum() / 2 < 0.15


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
