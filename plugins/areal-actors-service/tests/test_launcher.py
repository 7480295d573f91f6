"""The launcher by a script: who is started when, by whom it is waited for, and who makes room for whom."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st
from scripted_provider import ScriptedProvider

from areal_actors.cache.session import create_token_factory, shard_of
from areal_actors.errors import SessionEnded, Unavailable
from areal_actors.kernel import ActorSystem, Ref
from areal_actors.testing import virtual_backend
from areal_actors_service.launcher import Launcher, LauncherConfig
from areal_actors_service.messages import (
    Hosting,
    ListServices,
    ServiceInUse,
    ServiceState,
    ServiceView,
    StopServices,
    TrialId,
    UseService,
    UseServiceOfSession,
)

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend(anyio_backend: str) -> tuple[str, dict[str, Any]]:
    """Virtual time: nothing here opens a socket."""
    return virtual_backend(anyio_backend)


ADA, BOB, CAT = (TrialId(name, "one") for name in ("ada", "bob", "cat"))
KEY = f"sk-{ADA.home}.0123456789abcdefghijkl"


@frozen(kw_only=True)
class Host:
    """What is open."""

    provider: ScriptedProvider
    launcher: Ref[Hosting]

    async def use(self, trial: TrialId, seconds: float = 0.0) -> str:
        """One request that takes so long."""
        async with self.launcher.stream(UseService(trial=trial)) as items:
            found = await anext(items)
            await anyio.sleep(seconds)
            return found.url

    async def visit(self, home: str, name: str) -> ServiceInUse | None:
        """A request of a session."""
        async with self.launcher.stream(UseServiceOfSession(home=home, name=name)) as items:
            return await anext(items, None)

    async def view(self, trial: TrialId) -> ServiceView:
        """A service from outside."""
        return next(view for view in await self.launcher.ask(ListServices()) if view.trial == trial)

    async def until(self, trial: TrialId, state: ServiceState) -> None:
        """Wait for a state."""
        with anyio.fail_after(3600):
            while (await self.view(trial)).state is not state:  # noqa: ASYNC110 - of virtual time
                await anyio.sleep(0.05)


@asynccontextmanager
async def open_host(provider: ScriptedProvider | None = None, **settings: Any) -> AsyncIterator[Host]:
    provider = provider or ScriptedProvider()
    async with ActorSystem.open() as system:
        launcher = await system.spawn(Launcher(provider, config=LauncherConfig(**settings)))
        yield Host(provider=provider, launcher=launcher)
        await launcher.ask(StopServices())


async def test_launcher_starts_a_service_once_for_concurrent_requests():
    """However many come at once, and they all wait for it; the host's end is a checkpoint."""
    provider = ScriptedProvider(start_seconds=5)
    async with open_host(provider) as host, anyio.create_task_group() as tasks:
        for _ in range(20):
            tasks.start_soon(host.use, ADA)

    assert (1, 1) == (provider.num_starts[ADA], provider.num_checkpoints[ADA])
    assert {} == provider.open_services


async def test_launcher_continues_a_slow_start_after_requests_gave_up():
    """They are told when to ask again, and it is there by then."""
    async with open_host(ScriptedProvider(start_seconds=150), start_timeout_seconds=100) as host:
        with pytest.raises(Unavailable, match="still being started") as refused:
            await host.use(ADA)
        await host.use(ADA)

    assert refused.value.retry_after_seconds >= 1
    assert 1 == host.provider.num_starts[ADA]


async def test_launcher_continues_a_start_whose_request_was_cancelled():
    """A client that hangs up while a service starts: others get it."""
    async with open_host(ScriptedProvider(start_seconds=5)) as host:
        with anyio.move_on_after(1):
            await host.use(ADA)
        await host.use(ADA)

        assert (1, 0) == (host.provider.num_starts[ADA], (await host.view(ADA)).num_requests)


async def test_launcher_restarts_a_service_that_died():
    """At once the first time, later and later after that; its neighbour does not notice."""
    async with open_host(first_wait_seconds=1, max_wait_seconds=4) as host:
        await host.use(BOB)
        waits = []
        for _ in range(4):
            await host.use(ADA)
            began = anyio.current_time()
            host.provider.open_services[ADA].end("killed")
            await host.until(ADA, ServiceState.BACKING_OFF)
            await host.until(ADA, ServiceState.RUNNING)
            waits.append(round(anyio.current_time() - began))

        assert [1, 2, 4, 4] == waits
        assert ("killed", 5) == ((view := await host.view(ADA)).failure, view.num_starts)
        assert 1 == host.provider.num_starts[BOB]


async def test_launcher_resets_the_delay_after_a_healthy_service():
    """Failures count in a row only."""
    async with open_host(first_wait_seconds=1, idle_seconds=math.inf) as host:
        for _ in range(5):
            await host.use(ADA)
            await anyio.sleep(100)
            host.provider.open_services[ADA].end("killed")
            began = anyio.current_time()
            await host.until(ADA, ServiceState.BACKING_OFF)
            await host.use(ADA)

            assert 1 == round(anyio.current_time() - began)


async def test_launcher_refuses_soon_what_cannot_be_started():
    """Requests do not wait for a start that fails again and again; others are served, and so is it when mended."""
    provider = ScriptedProvider(failures={ADA: Unavailable("no such model")})
    async with open_host(provider, first_wait_seconds=10) as host:
        with pytest.raises(Unavailable, match="could not be started 3 times") as refused:
            await host.use(ADA)
        await host.use(BOB)
        del provider.failures[ADA]
        await anyio.sleep(refused.value.retry_after_seconds + 1)
        await host.use(ADA)

    assert "no such model" not in str(refused.value)
    assert 4 == provider.num_starts[ADA]


async def test_launcher_does_not_restart_a_finished_service():
    """Its users are told, in a way that no SDK repeats."""
    async with open_host() as host:
        await host.use(ADA)
        host.provider.open_services[ADA].end(None)
        await host.until(ADA, ServiceState.FINISHED)
        with pytest.raises(SessionEnded, match="finished"):
            await host.use(ADA)
    provider = ScriptedProvider(failures={ADA: SessionEnded("finished before")})
    async with open_host(provider) as host:
        with pytest.raises(SessionEnded, match="finished"):
            await host.use(ADA)

    assert 1 == provider.num_starts[ADA]


async def test_launcher_stops_an_idle_service_with_a_checkpoint():
    """Not while a request is in flight, however long; afterwards the next one starts it again."""
    async with open_host(idle_seconds=60) as host:
        await host.use(ADA, 1000)
        assert 1 == len(host.provider.open_services)
        await anyio.sleep(61)
        assert (0, 1) == (len(host.provider.open_services), host.provider.num_checkpoints[ADA])
        await host.use(ADA)

        assert 2 == host.provider.num_starts[ADA]


async def test_launcher_stops_the_least_recently_used_service_for_room():
    """And never are there more than there may be, not even while one is saving."""
    async with open_host(ScriptedProvider(stop_seconds=20), max_services=2, make_room_seconds=10) as host:
        await host.use(ADA)
        await anyio.sleep(1)
        await host.use(BOB)
        with pytest.raises(Unavailable, match="All 2 places"):
            await host.use(CAT)
        await anyio.sleep(10)
        await host.use(CAT)

        assert {BOB, CAT} == set(host.provider.open_services)
        assert 2 == host.provider.max_open


async def test_launcher_keeps_a_service_with_a_request():
    """Nobody makes room in the middle of an answer."""
    async with open_host(max_services=1, make_room_seconds=0) as host, anyio.create_task_group() as tasks:
        await host.use(ADA)
        tasks.start_soon(host.use, ADA, 100)
        await anyio.sleep(50)
        with pytest.raises(Unavailable, match="places"):
            await host.use(BOB)
        await anyio.sleep(60)
        await host.use(BOB)

    assert [1, 1] == [host.provider.num_checkpoints[trial] for trial in (ADA, BOB)]


async def test_launcher_starts_a_service_for_its_session_only():
    """After the host was started anew, too: what was served before is known by its directory."""
    async with open_host(ScriptedProvider(trials=(ADA,), sessions={KEY})) as host:
        assert None is await host.visit(ADA.home, "sk-of-somebody-else")
        assert None is await host.visit(BOB.home, KEY)
        assert 0 == host.provider.num_starts.total()
        found = await host.visit(ADA.home, KEY)

        assert found is not None
        assert (ADA, 1) == (found.trial, host.provider.num_starts[ADA])


async def test_launcher_starts_nothing_while_it_stops():
    """The host is leaving."""
    async with open_host() as host:
        await host.use(ADA)
        await host.launcher.ask(StopServices())
        with pytest.raises(Unavailable, match="stopping"):
            await host.use(BOB)

    assert (1, {}) == (host.provider.num_checkpoints[ADA], host.provider.open_services)


NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)


@given(NAMES, NAMES)
def test_trial_id_is_part_of_session_names(experiment: str, trial: str):
    """Always the same, and readable off any key."""
    home = TrialId(experiment, trial).home

    assert home == shard_of(f"sk-{create_token_factory(home)()}")


@pytest.mark.parametrize("names", [("..", "x"), ("a", ".."), ("a/b", "c"), ("", "c"), ("a", ""), ("a", "b/../../c")])
def test_trial_id_cannot_leave_its_directory(names: tuple[str, str]):
    """Whatever a key was issued for."""
    with pytest.raises(ValueError, match="names no trial"):
        TrialId(*names)


@given(st.integers(1, 10_000))
def test_launcher_delays_grow_to_a_bound(num_failures: int):
    """And never beyond it."""
    config = LauncherConfig()

    assert config.wait_seconds(num_failures) <= config.wait_seconds(num_failures + 1) <= config.max_wait_seconds
