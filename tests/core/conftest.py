"""Where the actors under test live: here, or behind a connection that every message has to pass as bytes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from areal_actors.core import ActorSystem, Ref
from areal_actors.core.remote import Limits
from areal_actors.core.remote.calls import Channel
from areal_actors.core.remote.ref import RemoteRef
from areal_actors.testing.remote import pretend_remote

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


class PretendedRef(RemoteRef[Any]):
    """A ref through the wire. Only its figures are the actor's own, so that tests can see what it is busy with."""

    __slots__ = ("_near",)

    def __init__(self, channel: Channel, near: Ref[Any]) -> None:
        super().__init__(channel)
        self._near = near
        channel.ref = self

    def statistics(self):
        return self._near.statistics()


@pytest.fixture(params=["local", "pretend"])
def placement(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test twice: with actors of this process, and with the same ones behind a connection in memory.

    Tests of what only a local ref has are skipped the second time; ``LOCAL_ONLY`` says why.
    """
    if request.param == "pretend":
        reason = LOCAL_ONLY.get(request.node.originalname)
        if reason is not None:
            pytest.skip(reason)
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
        return PretendedRef(peer._channels[near.name], near)

    monkeypatch.setattr(ActorSystem, "open", open_with_connection)
    monkeypatch.setattr(ActorSystem, "spawn", spawn_behind_connection)
