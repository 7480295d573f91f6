"""The host of trained models: loads once, lends to many, keeps the last used, and never closes what is in use."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
from attrs import define, field

from areal_actors.domain import TrainedModel
from areal_actors.errors import ModelError, Unavailable, Unprocessable
from areal_actors.generation.model_host import ModelHost, ModelsConfig, ModelStack
from areal_actors.kernel import ActorSystem, Ref
from areal_actors.messages import ListModels, ModelInUse, Models, UseModel
from areal_actors.models import Catalogue
from areal_actors_testing.serving import ScriptedSessions

pytestmark = pytest.mark.anyio


@define
class Opener:
    """Opens models without an engine, and tells what it did. ``gate`` holds loading up."""

    log: list[str] = field(factory=list)
    failures: dict[str, Exception] = field(factory=dict)
    gate: anyio.Event = field(factory=anyio.Event)

    @asynccontextmanager
    async def __call__(self, model: TrainedModel) -> AsyncIterator[ModelStack]:
        self.log.append(f"open {model.name}")
        await self.gate.wait()
        if model.name in self.failures:
            raise self.failures[model.name]
        try:
            async with ActorSystem.open(name=model.name) as system:
                yield ModelStack(sessions=await system.spawn(ScriptedSessions()), token_bytes=list)
        finally:
            self.log.append(f"close {model.name}")


def save(root: Path, *names: str) -> None:
    for name in names:
        directory = root / name / "weights"
        directory.mkdir(parents=True)
        (directory / "config.json").write_text("{}")


@asynccontextmanager
async def open_host(
    root: Path, *, is_gated: bool = False, **settings: float
) -> AsyncIterator[tuple[Ref[Models], Opener]]:
    opener = Opener()
    if not is_gated:
        opener.gate.set()
    async with ActorSystem.open() as system:
        config = ModelsConfig(**settings)
        yield await system.spawn(ModelHost(Catalogue(root=root), opener, config=config)), opener


@asynccontextmanager
async def borrow(host: Ref[Models], name: str) -> AsyncIterator[ModelInUse | None]:
    async with host.stream(UseModel(name=name)) as items:
        yield await anext(items, None)


async def hold(host: Ref[Models], name: str, until: anyio.Event, started: Callable[[], None] = lambda: None) -> None:
    async with borrow(host, name):
        started()
        await until.wait()


async def test_model_host_loads_once_for_concurrent_requests(tmp_path: Path):
    """They wait for the same loading, and each has a session of its own."""
    save(tmp_path, "a/1")
    sessions: list[object] = []

    async def ask(host: Ref[Models]) -> None:
        async with borrow(host, "a/1") as chosen:
            assert chosen is not None
            sessions.append(chosen.credential.session)

    async with open_host(tmp_path, is_gated=True) as (host, opener), anyio.create_task_group() as tasks:
        for _ in range(10):
            tasks.start_soon(ask, host)
        while not opener.log:
            await anyio.lowlevel.checkpoint()
        opener.gate.set()

    assert ["open a/1", "close a/1"] == opener.log
    assert 10 == len(set(sessions))


async def test_model_host_ignores_unknown_names(tmp_path: Path):
    """No item, and nothing is opened; also for names that try to leave."""
    save(tmp_path, "a/1")
    async with open_host(tmp_path) as (host, opener):
        for name in ("a/2", "b/1", "a", "../a/1", "a/../a/1", "/etc/passwd", "a/1/", ""):
            async with borrow(host, name) as chosen:
                assert chosen is None
        listed = await host.ask(ListModels())

    assert ([], ["a/1"]) == (opener.log, [model.name for model in listed])


async def test_model_host_evicts_least_recently_used(tmp_path: Path):
    """Of two that are idle, the one that was used last stays."""
    save(tmp_path, "a/1", "b/1", "c/1")
    async with open_host(tmp_path, max_loaded=2) as (host, opener):
        for name in ("a/1", "b/1", "a/1", "c/1", "a/1"):
            async with borrow(host, name):
                pass
        before_end = list(opener.log)

    assert ["open a/1", "open b/1", "close b/1", "open c/1"] == before_end


async def test_model_host_keeps_models_in_use(tmp_path: Path):
    """Who wants its place waits until it is given back."""
    save(tmp_path, "a/1", "b/1")
    release = anyio.Event()
    async with open_host(tmp_path) as (host, opener), anyio.create_task_group() as tasks:
        in_use = anyio.Event()
        tasks.start_soon(hold, host, "a/1", release, in_use.set)
        await in_use.wait()
        tasks.start_soon(hold, host, "b/1", release)
        await anyio.wait_all_tasks_blocked()
        while_in_use = list(opener.log)
        release.set()

    assert ["open a/1"] == while_in_use
    assert ["open a/1", "close a/1", "open b/1", "close b/1"] == opener.log


async def test_model_host_limits_waiting(tmp_path: Path):
    """A place that does not become free, or a loading that takes too long, is a 503 that may be tried again."""
    save(tmp_path, "a/1", "b/1")
    async with open_host(tmp_path, open_timeout_seconds=0.05) as (host, opener):
        async with borrow(host, "a/1"):
            with pytest.raises(Unavailable, match="b/1 was not open within"):
                async with borrow(host, "b/1"):
                    pass
        opener.gate = anyio.Event()
        with pytest.raises(Unavailable, match="b/1 was not open within"):
            async with borrow(host, "b/1"):
                pass
        opener.gate.set()

    assert ["open a/1", "close a/1", "open b/1", "close b/1"] == opener.log


async def test_model_host_isolates_failing_model(tmp_path: Path):
    """422 for files that cannot be read, 503 for anything else; others are served, and a mended one is, too."""
    save(tmp_path, "a/1", "b/1", "c/1")
    async with open_host(tmp_path, max_loaded=3) as (host, opener):
        opener.failures = {"b/1": ModelError("no tensors"), "c/1": ZeroDivisionError("odd")}
        async with borrow(host, "a/1"):
            with pytest.raises(Unprocessable, match="b/1 cannot be loaded: no tensors"):
                async with borrow(host, "b/1"):
                    pass
            with pytest.raises(Unavailable, match="c/1 is not available"):
                async with borrow(host, "c/1"):
                    pass
        opener.failures.clear()
        async with borrow(host, "b/1") as mended:
            assert mended is not None


async def test_model_host_opens_new_weights(tmp_path: Path):
    """A model that was exported again is another one; who uses the former may finish."""
    save(tmp_path, "a/1")
    async with open_host(tmp_path, max_loaded=2) as (host, opener), borrow(host, "a/1") as former:
        (tmp_path / "a/1/weights").rename(tmp_path / "a/1/former")
        save(tmp_path, "a/1")
        async with borrow(host, "a/1") as successor:
            assert former is not None
            assert successor is not None
            assert former.sessions.address != successor.sessions.address or former.sessions is not successor.sessions

    assert ["open a/1", "open a/1"] == opener.log[:2]


async def test_model_host_forgets_cancelled_requests(tmp_path: Path):
    """Cancelled while it loads, or while it is used: the place can be had by others."""
    save(tmp_path, "a/1", "b/1")
    async with open_host(tmp_path, is_gated=True) as (host, opener):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(hold, host, "a/1", anyio.Event())
            while not opener.log:
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
        opener.gate.set()
        async with borrow(host, "b/1") as chosen:
            assert chosen is not None
            in_use = list(opener.log)

    assert ["open a/1", "close a/1", "open b/1"] == in_use
