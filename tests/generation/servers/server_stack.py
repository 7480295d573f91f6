"""An engine over servers that are fakes over echoes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
from attrs import asdict, define
from tests.generation.servers.fake_process import script

from areal_actors.domain import (
    Chunk,
    EngineInfo,
    EngineRequest,
    EngineStatistics,
    PauseMode,
    SampleKey,
    Sampling,
    Snapshot,
)
from areal_actors.generation.servers.config import ServerConfig
from areal_actors.generation.servers.engine import ServerEngine, open_server_engines
from areal_actors.generation.servers.sglang import SGLangDialect
from areal_actors.kernel import ActorSystem, Ref
from areal_actors.messages import (
    DescribeEngine,
    Generate,
    Generation,
    PauseGeneration,
    PublishWeights,
    Replicas,
    ResumeGeneration,
)
from areal_actors.run.inference import spawn_generation
from areal_actors.testing.engines import EchoEngine
from areal_actors_testing.sglang_server import FakeSGLang, open_sglang_server

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
    decode=None,
    **options,
) -> AsyncIterator[tuple[ReplicatedServers, list[FakeSGLang]]]:
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
        engine = await stack.enter_async_context(open_engine(servers, model, tmp_path, config=config, decode=decode))
        yield engine, servers


@define(eq=False)
class ReplicatedServers:
    """The engines of servers and the replica set above them, with the interface of one engine."""

    ref: Ref[Generation | Replicas]
    engines: tuple[ServerEngine, ...]

    @property
    def info(self) -> EngineInfo:
        return self.engines[0].info

    @property
    def version(self) -> int:
        """The newest version."""
        return max(engine.version for engine in self.engines)

    @asynccontextmanager
    async def generate(self, request: EngineRequest) -> AsyncIterator[AsyncIterator[Chunk]]:
        async with self.ref.stream(Generate(request=request)) as chunks:
            yield chunks

    async def abort(self, request_id: str) -> None:
        for engine in self.engines:
            await engine.abort(request_id)

    async def pause(self, mode: PauseMode = PauseMode.KEEP) -> None:
        await self.ref.ask(PauseGeneration(mode=mode))

    async def resume(self) -> None:
        await self.ref.ask(ResumeGeneration())

    async def load(self, snapshot: Snapshot) -> None:
        await self.ref.ask(PublishWeights(snapshot=snapshot))

    def statistics(self) -> EngineStatistics:
        counted = [asdict(engine.statistics()) for engine in self.engines]
        return EngineStatistics(**{name: sum(each[name] for each in counted) for name in counted[0]})

    async def wait_until_all_serve(self) -> None:
        while (await self.ref.ask(DescribeEngine())).num_engines < len(self.engines):  # noqa: ASYNC110 - no message tells
            await anyio.sleep(0.01)


@asynccontextmanager
async def open_replicated(*args: Any, **options: Any) -> AsyncIterator[ReplicatedServers]:
    """Open engines of servers, with the options of ``open_server_engines``, below a replica set as in a run."""
    async with open_server_engines(*args, **options) as opened, ActorSystem.open(name="servers") as system:
        ref = await spawn_generation(system, opened)
        servers = ReplicatedServers(ref, tuple(opened.engines.values()))
        await servers.wait_until_all_serve()
        yield servers


def open_engine(servers, model: Path, tmp_path: Path, *, config: ServerConfig = CONFIG, **options):
    return open_replicated(
        SGLangDialect(stream_interval=8),
        config,
        urls=[server.url for server in servers],
        model=model,
        snapshot=Snapshot(version=0, path=model),
        publish_directory=tmp_path / "published",
        **options,
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
