"""Servers as an engine, over real sockets, in front of a server that dies in every way that real ones do."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio
import numpy as np
import pytest
import torch
from attrs import evolve

from areal_actors.domain import FinishReason, SampleKey, Sampling, as_floats
from areal_actors.engines.base import EngineRequest, PauseMode, Snapshot
from areal_actors.engines.servers.config import ServerConfig
from areal_actors.engines.servers.engine import ServerEngine
from areal_actors.engines.servers.sglang import SGLangDialect
from areal_actors.engines.torch import TorchEngine, TorchEngineConfig
from areal_actors.errors import EngineError, InvalidRequest, ModelError
from areal_actors.models import load_policy
from areal_actors.models.tiny import create_tiny
from areal_actors.testing.engine_contract import ENGINE_CHECKS, Check, Subject, collect
from areal_actors.testing.engines import EchoEngine
from areal_actors.testing.sglang_server import FakeSGLang, Fault, open_sglang_server

pytestmark = pytest.mark.anyio

CONFIG = ServerConfig(health_interval_seconds=0.05, start_timeout_seconds=20, health_timeout_seconds=2)
PROMPT = np.random.default_rng(3).integers(3, 384, 40)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model on disk."""
    return create_tiny(tmp_path_factory.mktemp("models"))


def script(prompt) -> list[int]:
    """Sixty tokens that count on from the last of the prompt, so that a gap or a repetition shows."""
    return [3 + (int(prompt[-1]) + i + 1) % 300 for i in range(60)]


@asynccontextmanager
async def open_house(
    model: Path, tmp_path: Path, *, num_servers: int = 1, config: ServerConfig = CONFIG, permits: int | None = None, **options
) -> AsyncIterator[tuple[ServerEngine, list[FakeSGLang]]]:
    """An engine over fakes over echoes."""
    async with AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(
                open_sglang_server(
                    EchoEngine(script, vocab_size=384, context_length=256, permits=permits), model=model, **options
                )
            )
            for _ in range(num_servers)
        ]
        engine = await stack.enter_async_context(open_engine(servers, model, tmp_path, config=config))
        yield engine, servers


def open_engine(servers, model: Path, tmp_path: Path, *, config: ServerConfig = CONFIG):
    return ServerEngine.open(
        SGLangDialect(),
        config,
        urls=[server.url for server in servers],
        model=model,
        snapshot=Snapshot(version=0, path=model),
        publish_directory=tmp_path / "published",
    )


def ask(number: int = 0, *, routing_key: str = "", **sampling) -> EngineRequest:
    settings = {"max_new_tokens": 40} | sampling
    return EngineRequest(
        id=f"r{number}",
        prompt=[5, 6, 7],
        sampling=Sampling(**settings),
        key=SampleKey(seed=0),
        routing_key=routing_key,
    )


def ids_of(chunks) -> list[int]:
    return [int(token_id) for chunk in chunks for token_id in chunk.token_ids]


WHOLE = script([5, 6, 7])[:40]


# ---------------------------------------------------------------------------------------------------- the contract


@pytest.mark.parametrize("check", ENGINE_CHECKS, ids=lambda check: check.__name__)
async def test_servers_keep_the_engine_contract(model: Path, tmp_path: Path, check: Check) -> None:
    """A real model behind the fake: everything that holds for an engine holds through HTTP."""
    policy = load_policy(model).float().eval()

    def recompute(prompt, output):
        ids = torch.tensor(np.concatenate([prompt, output]), dtype=torch.long)
        with torch.no_grad():
            logprobs = torch.log_softmax(policy(ids[None]).logits[0, len(prompt) - 1 : -1], -1)
        return as_floats(logprobs.gather(1, ids[len(prompt) :, None])[:, 0])

    settings = TorchEngineConfig(dtype="float32", max_concurrent=8, max_length=512)
    async with (
        TorchEngine.open(settings, model=model) as torch_engine,
        open_sglang_server(torch_engine, model=model) as server,
        open_engine([server], model, tmp_path) as engine,
    ):
        await check(
            Subject(
                engine=engine,
                create_snapshot=lambda version: Snapshot(version=version, state=policy.state_dict()),
                prompt=PROMPT,
                recompute=recompute,
                num_tokens=150,
            )
        )
