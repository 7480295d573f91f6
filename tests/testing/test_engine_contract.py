"""The contract check of loads waits for a generation that is running, however late an engine tells of it."""

from __future__ import annotations

from contextlib import asynccontextmanager

import numpy as np
import pytest
import torch
from attrs import evolve, frozen
from transformers import LlamaConfig, LlamaForCausalLM

from areal_actors.domain import Snapshot
from areal_actors.generation.base import Engine
from areal_actors.generation.torch import TorchEngine, TorchEngineConfig
from areal_actors.testing.engines import EchoEngine
from areal_actors_testing.engine_contract import Subject, check_load_stamps_versions, collect

PROMPT = np.arange(5, 45)


@frozen
class Wrapped:
    """An engine that passes on what another one does, but for its chunks."""

    engine: Engine

    def __getattr__(self, name):
        return getattr(self.engine, name)


class Late(Wrapped):
    """Tells nothing of a generation before it has ended, as a server does that is short of time."""

    @asynccontextmanager
    async def generate(self, request):
        yield self.tell(request)

    async def tell(self, request):
        for chunk in await collect(self.engine, request):
            yield chunk


class Backward(Wrapped):
    """Says of every token that the first weights have sampled it."""

    @asynccontextmanager
    async def generate(self, request):
        async with self.engine.generate(request) as chunks:
            yield (evolve(chunk, version=0) async for chunk in chunks)


@pytest.mark.anyio
async def test_loads_are_checked_on_an_engine_that_tells_late():
    """Those that it has not come to are met in their middle."""
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    async with TorchEngine.open(TorchEngineConfig(dtype="float32", max_concurrent=2), model=model) as engine:
        await check_load_stamps_versions(
            Subject(
                engine=Late(engine),
                create_snapshot=lambda version: Snapshot(version=version, state=model.state_dict()),
                prompt=PROMPT,
            )
        )

        assert 1 < engine.version  # one alone had ended before it was heard of


@pytest.mark.anyio
async def test_an_engine_that_goes_on_with_old_versions_is_found_out():
    """However many generations it is met in."""
    engine = EchoEngine(vocab_size=96, context_length=256)
    subject = Subject(
        engine=Backward(engine),
        create_snapshot=lambda version: Snapshot(version=version, state={}),
        prompt=PROMPT,
    )
    with pytest.raises((AssertionError, ExceptionGroup)):
        await check_load_stamps_versions(subject)
