"""Rotary embeddings: a row's log-probabilities do not depend on its neighbours in a pass, or the model is refused."""

from __future__ import annotations

from functools import cache

import anyio
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.training.conftest import _make_row
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

from areal_actors.domain import EngineRequest, SampleKey, Sampling
from areal_actors.errors import ConfigError
from areal_actors.generation.torch import TorchEngine, TorchEngineConfig
from areal_actors.models import require_fixed_rotation
from areal_actors.training.config import CaptureConfig, ComputeDtype, Layout, TrainerConfig
from areal_actors.training.trainer import PolicyTrainer

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LONG = {"original_max_position_embeddings": 64, "factor": 4.0}
KINDS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", **LONG},
    "llama3": {"rope_type": "llama3", **LONG, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": {"rope_type": "longrope", **LONG, "short_factor": [1.0] * 4, "long_factor": [4.0, 6.0, 8.0, 10.0]},
    "partial": {"rope_type": "default", "partial_rotary_factor": 0.5},
    "by layer": {},
}
VARYING = {"dynamic": 160, "longrope": 64}
"""The lengths up to which frequencies are constant."""
PLAIN = TrainerConfig(dtype=ComputeDtype.FLOAT32, capture=CaptureConfig(enabled=False))


def create(kind: str):
    """A model of 160 positions with this kind of rotation."""
    torch.manual_seed(0)
    rope = KINDS[kind] | {"rope_theta": 1e4}
    if kind == "by layer":
        return Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=16, max_position_embeddings=160))
    if kind in ("longrope", "partial"):
        extra = {"original_max_position_embeddings": 64} if kind == "longrope" else {}
        return Phi3ForCausalLM(Phi3Config(**SIZES, max_position_embeddings=160, rope_parameters=rope, **extra))
    return LlamaForCausalLM(LlamaConfig(**SIZES, max_position_embeddings=160, rope_parameters=rope))


@cache
def create_trainer(kind: str, layout: Layout) -> PolicyTrainer:
    config = TrainerConfig(layout=layout, dtype=PLAIN.dtype, capture=PLAIN.capture)
    return PolicyTrainer(create(kind), config, max_length=VARYING.get(kind, 160))


def row_of(seed: int, length: int):
    ids = np.random.default_rng(seed).integers(3, 61, length)
    return _make_row(ids, (np.arange(length) > 0).astype(int), session=f"s{seed}")


@settings(max_examples=8, deadline=None)
@given(
    kind=st.sampled_from(list(KINDS)),
    layout=st.sampled_from([Layout.FLAT, Layout.TREE]),
    lengths=st.lists(st.integers(2, 150), min_size=1, max_size=4),
)
def test_row_has_the_logprobs_of_transformers_whatever_shares_its_pass(kind, layout, lengths):
    """Alone, next to longer rows, and in a tree."""
    trainer = create_trainer(kind, layout)
    rows = [row_of(seed, min(length, VARYING.get(kind, 160))) for seed, length in enumerate(lengths)]
    # A long neighbour begins as the first row does, so that a tree has both on one path.
    model = create(kind).eval()
    together = trainer.logprobs(rows)

    for row, found in zip(rows, together, strict=True):
        assert found == pytest.approx(trainer.logprobs([row])[0], abs=1e-4)
        ids = torch.tensor(row.input_ids).long()[None]
        with torch.no_grad():
            expected = torch.log_softmax(model(ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None])[:, 0]
        assert found[1:] == pytest.approx(expected.numpy(), abs=2e-4)


@pytest.mark.parametrize("kind", list(KINDS))
def test_limit_is_the_length_up_to_which_frequencies_are_constant(kind):
    """The frequencies of a row of that length are those of a short one."""
    model = create(kind).eval()
    limit = require_fixed_rotation(model.config, max_length=2)
    longest = torch.arange(limit or 400)[None]
    with torch.no_grad():
        expected, found = (model(torch.full_like(ids, 5)).logits[0, :20] for ids in (longest[:, :20], longest))

    assert limit == VARYING.get(kind)
    assert torch.allclose(expected, found, atol=1e-4)


@pytest.mark.anyio
@pytest.mark.parametrize("kind", list(VARYING))
async def test_longer_rows_are_refused_by_name(kind):
    """At the start of a trainer and of an engine, and when a workflow makes longer rows."""
    limit = VARYING[kind]
    for layout in (Layout.FLAT, Layout.TREE):
        with pytest.raises(ConfigError, match=rf"beyond {limit} tokens .* set engine.max_length to {limit} or less"):
            PolicyTrainer(create(kind), TrainerConfig(layout=layout, dtype=PLAIN.dtype))
    trainer = create_trainer(kind, Layout.TREE)
    with pytest.raises(ConfigError, match=f"A row has {limit + 1} tokens, and beyond {limit}"):
        trainer.logprobs([row_of(0, limit + 1)])
    if kind == "longrope":  # the engine's context ends at the model's positions
        with pytest.raises(ConfigError, match=f"beyond {limit} tokens"):
            async with TorchEngine.open(TorchEngineConfig(max_length=limit + 1), model=create(kind)):
                pass
    assert require_fixed_rotation(create(kind).config, max_length=limit) == limit


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["trio"])  # the engine computes in a thread
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "by layer"])
async def test_engine_samples_requests_together_as_the_trainer_scores_them_alone(kind):
    """Short and long prompts in one batch; Gemma's windows are refused by the engine."""
    rows = []
    limit = VARYING.get(kind, 100)
    config = TorchEngineConfig(dtype="float32", max_length=limit, max_concurrent=4)
    async with TorchEngine.open(config, model=create(kind)) as engine:

        async def sample(number: int, length: int) -> None:
            prompt = np.random.default_rng(number).integers(3, 61, length)
            sampling = Sampling(max_new_tokens=6)
            request = EngineRequest(
                id=str(number), prompt=prompt, sampling=sampling, key=SampleKey(seed=1, path=(number,))
            )
            async with engine.generate(request) as chunks:
                found = [chunk async for chunk in chunks]
            ids = np.concatenate([prompt, *(chunk.token_ids for chunk in found)])
            mask = (np.arange(len(ids)) >= length).astype(int)
            logprobs = np.concatenate([np.zeros(length), *(chunk.logprobs for chunk in found)])
            rows.append(_make_row(ids, mask, logprobs=logprobs, session=f"s{number}"))

        async with anyio.create_task_group() as tasks:
            for number, length in enumerate((4, 12, limit - 8)):
                tasks.start_soon(sample, number, length)
    trainer = create_trainer(kind, Layout.FLAT)
    for row in rows:
        assert trainer.logprobs([row])[0] == pytest.approx(row.logprobs, abs=1e-4)
