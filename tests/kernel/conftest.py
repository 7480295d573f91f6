"""The kernel's tests run twice: with local refs, and with refs over a connection in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from areal_actors.kernel import ActorSystem, Ref
from areal_actors.kernel.remote import Limits, Peer
from areal_actors.kernel.remote.peer import RemoteRef
from areal_actors_testing.remote import pretend_remote

LOCAL_ONLY = {
    "test_tell_to_a_full_mailbox_waits_in_order": "it counts the senders at the mailbox",
    "test_ask_that_times_out_in_the_queue_is_never_handled": "an asker elsewhere does not know that its ask was queued",
    "test_actor_may_stop_itself": "the actor has stopped before the second message arrives",
    "test_tell_cancelled_while_waiting_for_room_sends_nothing": "what has been sent is not taken back",
    "test_concurrent_handler_may_be_asked_back": "refs do not travel inside messages",
    "test_watch_that_is_cancelled_is_forgotten": "it looks into a cell of this process",
    "test_spawn_refuses_the_name_of_a_running_actor": "it spawns in this process",
    "test_restart_beyond_the_limit_applies_the_next_policy": "it waits for the crash before it continues",
    "test_refs_compare_by_address": "it spawns in this process",
    "test_deadlock_of_an_ask_to_itself_is_refused": "cycles across a connection are not detected",
    "test_deadlock_of_a_cycle_of_asks_is_refused": "cycles across a connection are not detected",
    "test_deadlock_of_a_stream_that_asks_its_consumer_is_refused": "cycles across a connection are not detected",
}
"""Tests of what only a local ref has, and why."""


class PretendedRef(RemoteRef[Any]):
    """A ref through the wire. Its ``stop`` and statistics are those of the local ref."""

    def __init__(self, peer: Peer, near: Ref[Any]) -> None:
        super().__init__(near.name, peer.node, peer.limits)
        self._near = near
        peer.adopt(self)

    async def stop(self, *, grace: float | None = None) -> None:
        await self._near.stop(grace=grace)
        while self.final_down is None:
            await anyio.lowlevel.checkpoint()

    def statistics(self):
        return self._near.statistics()


@pytest.fixture(params=["local", "pretend"])
def placement(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test twice: with actors of this process, and with the same ones behind a connection in memory.

    The second time, tests of what only a local ref has are skipped (``LOCAL_ONLY`` says why).
    """
    if request.param == "pretend":
        name = request.node.originalname
        if name in LOCAL_ONLY:
            pytest.skip(LOCAL_ONLY[name])
        _pretend(monkeypatch)
    return str(request.param)


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
