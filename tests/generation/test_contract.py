"""Every engine of this library keeps the engine contract: the embedded one on each path, and the public fake."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import cycle, product

import numpy as np
import pytest
import torch
from tests.generation.tiny_models import create_llama, create_model
from tests.generation.torch_operations import create_graph_runner

from areal_actors.domain import Snapshot, as_floats
from areal_actors.generation.torch import TorchEngine, TorchEngineConfig
from areal_actors.generation.torch.graphs import create_runner
from areal_actors.models.built_in import create_tiny_tokenizer
from areal_actors.testing.engines import EchoEngine
from areal_actors_testing.engine_contract import ENGINE_CHECKS, Check, Subject

LOOPS = ("asyncio", "trio")
PROMPT = np.random.default_rng(3).integers(0, 96, 40)


@asynccontextmanager
async def open_echo() -> AsyncIterator[Subject]:
    """The public fake."""
    engine = EchoEngine(vocab_size=96, context_length=256)
    yield Subject(engine=engine, create_snapshot=lambda v: Snapshot(version=v, state={}), prompt=PROMPT)


@asynccontextmanager
async def open_torch(model, create_runner=create_runner, **settings) -> AsyncIterator[Subject]:
    """The embedded engine, with the model's own log-probabilities to compare with."""

    def recompute(prompt, output):
        ids = torch.tensor(np.concatenate([prompt, output]), dtype=torch.long)
        with torch.no_grad():
            logprobs = torch.log_softmax(model(ids[None]).logits[0, len(prompt) - 1 : -1], -1)
        return as_floats(logprobs.gather(1, ids[len(prompt) :, None])[:, 0])

    config = TorchEngineConfig(dtype="float32", max_concurrent=4, prefill_chunk=16, **settings)
    async with TorchEngine.open(config, model=model, create_runner=create_runner) as engine:
        yield Subject(
            engine=engine,
            create_snapshot=lambda version: Snapshot(version=version, state=model.state_dict()),
            prompt=PROMPT,
            recompute=recompute,
        )


@asynccontextmanager
async def open_with_grammars(create_runner=create_runner) -> AsyncIterator[Subject]:
    """The embedded engine with a tokenizer, which is smaller than the model's vocabulary."""
    model, tokenizer = create_llama(vocab_size=400), create_tiny_tokenizer()
    config = TorchEngineConfig(dtype="float32", max_concurrent=4, prefill_chunk=16)
    async with TorchEngine.open(
        config, model=model, tokenizer=tokenizer.backend_tokenizer, create_runner=create_runner
    ) as engine:
        yield Subject(
            engine=engine,
            create_snapshot=lambda version: Snapshot(version=version, state=model.state_dict()),
            prompt=PROMPT,
            decode=tokenizer.decode,
            stop_token_ids=(2,),
        )


ENGINES: dict[str, Callable[[], AbstractAsyncContextManager[Subject]]] = {
    "echo": open_echo,
    "llama": lambda: open_torch(create_llama()),
    "qwen2": lambda: open_torch(create_model("qwen2")),
    "gemma3": lambda: open_torch(create_model("gemma3_text")),
    "qwen3_5": lambda: open_torch(create_model("qwen3_5_text")),
    "deepseek_v4": lambda: open_torch(create_model("deepseek_v4")),
    "grammars": open_with_grammars,
    "deterministic": lambda: open_torch(create_llama(), deterministic=True),
    "deterministic-qwen3_5": lambda: open_torch(create_model("qwen3_5_text"), deterministic=True),
    "graphs": lambda: open_torch(create_llama(), create_graph_runner),
    "graphs-qwen2": lambda: open_torch(create_model("qwen2"), create_graph_runner),
    "graphs-grammars": lambda: open_with_grammars(create_graph_runner),
}


# The loop matters to the thread behind the engine, which all models share: other models run on one loop each.
PLAYS = [*product(("echo", "llama"), LOOPS), *zip(list(ENGINES)[2:], cycle(LOOPS))]


@pytest.mark.anyio
@pytest.mark.parametrize("check", ENGINE_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize(("name", "anyio_backend"), PLAYS)
async def test_engine_keeps_the_contract(name: str, check: Check) -> None:
    """What the check says holds for this engine, on this event loop."""
    async with ENGINES[name]() as subject:
        await check(subject)
