"""A service with two processes, as actors on one event loop: connections, journals and ids are as in two processes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from attrs import evolve, frozen
from tests.proxy.stack import renderer, sampled

from areal_actors.client import OpenAIProxyClient
from areal_actors.journal import JournalConfig, SqliteJournal
from areal_actors.kernel import ActorSystem, Ref
from areal_actors.messages import ShardOpened
from areal_actors.proxy import ProxyConfig
from areal_actors.run.inference import (
    Inference,
    InferenceConfig,
    SessionActors,
    open_actors,
    spawn_proxy,
    spawn_shard,
)
from areal_actors.sessions.intake import IntakeConfig
from areal_actors.sessions.shards import open_shard_journals, shard_journal
from areal_actors.testing.engines import EchoEngine, script_answers

__all__ = ["CONFIG", "ShardedService", "open_first"]

CONFIG = InferenceConfig(
    proxy=ProxyConfig(num_processes=2, drain_seconds=0.0, admin_key="sk-admin-of-the-test"),
    intake=IntakeConfig(grace_seconds=0.0),
)


@frozen
class ShardedService:
    """The first process. ``second`` opens the other one."""

    inference: Inference
    journal: Path
    config: InferenceConfig = CONFIG

    @property
    def url(self) -> str:
        return self.inference.endpoint.url

    def client(self, task: str) -> OpenAIProxyClient:
        return OpenAIProxyClient(self.url, admin_key=self.inference.endpoint.admin_key, task_id=task)

    @asynccontextmanager
    async def second(self) -> AsyncIterator[None]:
        """Open the second process, which can be closed and opened again."""
        first = self.inference
        assert first.process is not None
        actors = SessionActors(
            sessions=first.sessions, exports=first.exports, capacity=first.capacity, intake=first.intake
        )
        config = evolve(self.config, intake=None)
        shared = {"renderer": renderer(), "generation": first.generation}
        async with (
            SqliteJournal.open(shard_journal(self.journal, 1)) as journal,
            ActorSystem.open(name="proxy-1") as system,
        ):
            actors = await spawn_shard(system, config, actors, journal=journal, process=1, **shared)
            await spawn_proxy(system, config, actors, process=evolve(first.process, number=1), **shared)
            router: Ref[Any] = first.sessions
            await router.ask(ShardOpened(process=1, sessions=actors.sessions))
            yield


@asynccontextmanager
async def open_first(directory: Path, config: InferenceConfig = CONFIG) -> AsyncIterator[ShardedService]:
    """Open the first process of a service, as after a restart if ``directory`` has its journals."""
    path = directory / "journal.sqlite"
    engine = EchoEngine(script_answers(sampled("Hi")), vocab_size=renderer().vocab_size)
    open_shards = partial(open_shard_journals, path, JournalConfig(), num_processes=2)
    async with (
        SqliteJournal.open(path) as journal,
        open_actors(config, engine=engine, renderer=renderer(), journal=journal, open_shards=open_shards) as inference,
    ):
        yield ShardedService(inference, path, config)
