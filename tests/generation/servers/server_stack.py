"""An engine over servers that are fakes over echoes, and a trainer's side from which they are sent weights."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from attrs import define
from tests.generation.servers.fake_process import script

from areal_actors.domain import SampleKey, Sampling
from areal_actors.errors import CheckpointError
from areal_actors.generation.base import EngineRequest, Snapshot
from areal_actors.generation.servers.config import ServerConfig
from areal_actors.generation.servers.engine import ServerEngine
from areal_actors.generation.servers.sglang import SGLangDialect
from areal_actors.kernel import ActorSystem, Ref
from areal_actors.messages import Weights
from areal_actors.models import load_policy
from areal_actors.testing.engines import EchoEngine
from areal_actors.testing.sglang_server import FakeSGLang, open_sglang_server
from areal_actors.training.weight_store import StorePublisher, WeightStore, WeightStoreActor

CONFIG = ServerConfig(health_interval_seconds=0.05, start_timeout_seconds=20, health_timeout_seconds=2)


WHOLE = script([5, 6, 7])[:40]


@asynccontextmanager
async def open_server_stack(
    model: Path,
    tmp_path: Path,
    *,
    num_servers: int = 1,
    config: ServerConfig = CONFIG,
    is_gated: bool = False,
    create_engine=EchoEngine,
    **options,
) -> AsyncIterator[tuple[ServerEngine, list[FakeSGLang]]]:
    """An engine over fakes over echoes."""
    async with AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(
                open_sglang_server(
                    create_engine(script, vocab_size=384, context_length=256, is_gated=is_gated), model=model, **options
                )
            )
            for _ in range(num_servers)
        ]
        engine = await stack.enter_async_context(open_engine(servers, model, tmp_path, config=config))
        yield engine, servers


def open_engine(servers, model: Path, tmp_path: Path, *, config: ServerConfig = CONFIG, find_weights=None):
    return ServerEngine.open(
        SGLangDialect(stream_interval=8),
        config,
        urls=[server.url for server in servers],
        model=model,
        snapshot=Snapshot(version=0, path=model),
        publish_directory=tmp_path / "published",
        find_weights=find_weights,
    )


@define
class Policy:
    """A model with versions, as a trainer has it; each version has other weights than the one before."""

    model: Any
    version: int = 0
    num_lost: int = 0
    """Tensors that it does not tell of."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(list(self.model.state_dict().items())[self.num_lost :])

    @torch.no_grad()
    def step(self) -> None:
        self.version += 1
        for parameter in self.model.parameters():
            parameter.add_(0.01)


@define(eq=False, kw_only=True)
class FullStore(WeightStore):
    """One whose disk is full, while it is told to be."""

    is_full: bool = False

    def write(self, version: int) -> Path:
        if self.is_full:
            raise CheckpointError("no room")
        return super().write(version)


@define
class Trainer:
    """Publishes a policy by keeping it; ``keeper`` gives it to servers, in buckets of a few tensors."""

    policy: Policy
    store: FullStore
    keeper: Ref[Weights]

    async def find(self) -> Ref[Weights]:
        return self.keeper

    def publish(self) -> Snapshot:
        return StorePublisher(store=self.store).publish(self.policy)

    def step(self) -> Snapshot:
        self.policy.step()
        return self.publish()


@asynccontextmanager
async def open_trainer(model: Path, tmp_path: Path) -> AsyncIterator[Trainer]:
    policy = Policy(load_policy(model).float().eval())
    store = FullStore(root=tmp_path / "kept", bucket_bytes=64 * 1024)
    async with ActorSystem.open(name="weights") as system:
        yield Trainer(policy, store, await system.spawn(WeightStoreActor(store), name="weights"))


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
