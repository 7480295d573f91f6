"""Where the actors under test live: here, behind a connection that messages pass as bytes, or in another process."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import anyio
import pytest
from tests.kernel.processes import Elsewhere, elsewhere, start

from areal_actors.kernel import ActorSystem, Ref
from areal_actors.kernel.remote import Limits, Peer
from areal_actors.kernel.remote.peer import RemoteRef
from areal_actors.lib.loops import is_trio
from areal_actors_testing.remote import pretend_remote

LOCAL_ONLY = {
    "test_a_full_mailbox_makes_senders_wait_in_order": "it counts the senders at the mailbox",
    "test_a_sender_that_stops_waiting_for_room_sends_nothing": "within the credit, telling does not wait",
    "test_a_queued_ask_whose_time_is_up_is_never_handled": "an asker elsewhere does not know that its ask was queued",
    "test_a_concurrent_handler_may_be_asked_back": "refs do not travel inside messages",
    "test_whoever_waits_for_an_actor_learns_of_its_end": "within the credit, telling does not wait for the mailbox",
    "test_a_watcher_hears_of_each_end_ahead_of_its_queue": "refs do not travel inside messages",
    "test_watching_the_dead_is_answered_at_once": "refs do not travel inside messages",
    "test_watching_needs_a_handler_for_the_news": "refs do not travel inside messages",
    "test_a_watcher_that_gives_up_is_forgotten": "it looks into a cell of this process",
    "test_names_are_unique_among_the_living": "it resolves addresses of this process",
    "test_too_many_restarts_go_to_the_next_policy": "it counts on being told of the crash before it goes on",
    "test_refs_are_values": "it resolves addresses of this process",
    "test_an_ask_to_oneself_is_refused": "circles through a wire are not seen; deadlines are the remedy",
    "test_a_circle_of_asks_is_refused_and_shown": "circles through a wire are not seen",
    "test_independent_asks_that_cross_are_refused": "circles through a wire are not seen",
    "test_a_stream_that_asks_its_consumer_is_refused": "circles through a wire are not seen",
    "test_actors_that_fill_each_others_mailboxes_are_refused": "circles through a wire are not seen",
}
"""Tests of what only a local ref has, and why."""

ONE_PROCESS_ONLY = {
    "test_messages_of_one_sender_arrive_in_order": "it fills a mailbox before any of it is handled",
    "test_a_crash_in_a_task_keeps_what_was_parked_for_the_next_incarnation": "its actor is made by a closure",
}
"""Tests that have to be in one process with their actors, and why."""

ONE_PROCESS_MODULES = {
    **dict.fromkeys(
        ("test_ending", "test_supervision", "test_watching"),
        "spawning, supervising and burying are done in the actor's own process, with closures of it",
    ),
    "test_programs": "hundreds of programs, whose seconds would be real ones",
}
"""Modules of such tests."""


class PretendedRef(RemoteRef[Any]):
    """A ref through the wire. Only its figures are the actor's own, so that tests can see what it is busy with."""

    def __init__(self, peer: Peer, near: Ref[Any]) -> None:
        super().__init__(peer, near.name)
        self._near = near
        self.go_up(near.address.incarnation, peer._refs[near.name].messages)
        peer._refs[near.name] = self

    def statistics(self):
        return self._near.statistics()


@pytest.fixture(params=["local", "pretend", "processes"])
def placement(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test three times: with actors of this process, with the same ones behind a wire, and with others'.

    The second time, a connection in memory is between the test and its actors; tests of what only a local ref has are
    skipped (``LOCAL_ONLY`` says why). The third time, a process of their own hosts the actors (see ``processes``);
    tests that do more with them than a ref can are skipped as well (``ONE_PROCESS_ONLY``, ``ONE_PROCESS_MODULES``).
    """
    name = request.node.originalname
    if request.param != "local" and name in LOCAL_ONLY:
        pytest.skip(LOCAL_ONLY[name])
    if request.param == "pretend":
        _pretend(monkeypatch)
    if request.param == "processes":
        module = request.module.__name__.rpartition(".")[2]
        reason = ONE_PROCESS_MODULES.get(module, ONE_PROCESS_ONLY.get(name))
        if reason is not None:
            pytest.skip(reason)
        _move_elsewhere(monkeypatch, request.module, request.getfixturevalue("host_processes"))
    return str(request.param)


@pytest.fixture(scope="session")
def host_processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Path]]:
    """Where the process that hosts the actors of tests on a loop listens; it is started when it is first needed."""
    children: dict[str, tuple[Path, subprocess.Popen[bytes]]] = {}

    def find(backend: str) -> Path:
        if backend not in children:
            path = tmp_path_factory.mktemp(backend) / "host.sock"
            children[backend] = path, start(path, backend)
        return children[backend][0]

    yield find
    for _, child in children.values():
        with child:
            child.communicate()


def _move_elsewhere(monkeypatch: pytest.MonkeyPatch, module: ModuleType, find: Callable[[str], Path]) -> None:
    open_system = ActorSystem.open
    homes: dict[ActorSystem, Elsewhere] = {}

    @asynccontextmanager
    async def open_elsewhere(**options: Any) -> AsyncIterator[ActorSystem]:
        path = find("trio" if is_trio() else "asyncio")
        async with open_system(**options) as system, elsewhere(path, options) as homes[system]:
            yield system

    async def spawn_elsewhere(self: ActorSystem, actor: Any, **options: Any) -> Ref[Any]:
        return await homes[self].spawn(actor, **options)

    async def wait_until_quiet() -> None:
        for home in homes.values():
            await home.wait_until_quiet()

    monkeypatch.setattr(module, "wait_all_tasks_blocked", wait_until_quiet, raising=False)
    monkeypatch.setattr(ActorSystem, "open", open_elsewhere)
    monkeypatch.setattr(ActorSystem, "spawn", spawn_elsewhere)


def _pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    open_system, spawn = ActorSystem.open, ActorSystem.spawn
    connections: dict[ActorSystem, Any] = {}

    @asynccontextmanager
    async def open_with_connection(**options: Any) -> AsyncIterator[ActorSystem]:
        limits = Limits(cleanup_seconds=options.get("cleanup_seconds", 5.0))
        async with open_system(**options) as system, pretend_remote(limits=limits) as connections[system]:
            yield system
            await system.stop()

    async def spawn_behind_connection(self: ActorSystem, *arguments: Any, **options: Any) -> Ref[Any]:
        near = await spawn(self, *arguments, **options)
        peer, listener = connections[self]
        listener.expose(near.name, near)
        while near.name not in peer.exposed:
            await anyio.lowlevel.checkpoint()
        return PretendedRef(peer, near)

    monkeypatch.setattr(ActorSystem, "open", open_with_connection)
    monkeypatch.setattr(ActorSystem, "spawn", spawn_behind_connection)
