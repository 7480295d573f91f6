"""Peers that know the secret and break the rules lose their connection; other connections are not affected."""

from __future__ import annotations

import contextlib
import math
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec
import pytest
from anyio import wait_all_tasks_blocked
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.kernel.remote.echo_actor import SECRET, Echo, EchoActor, Echoing

from areal_actors.errors import ProtocolError, Unreachable
from areal_actors.kernel import ActorSystem, Ref
from areal_actors.kernel.remote import Limits, Listener, connect_stream, listen
from areal_actors.kernel.remote.codec import Codec
from areal_actors.kernel.remote.frames import Kind
from areal_actors.kernel.remote.hello import Hello, greet, receive_hello, send_hello, send_packet
from areal_actors_testing.remote import MemoryStream, memory_pair

pytestmark = pytest.mark.anyio

NAN = math.nan
ASK = ["desk", "Echoing", "Echo", {"value": 1}, 0]


def own_hello() -> Hello:
    return greet(node="wrong", incarnation=1, limits=Limits())


def message(kind: Kind, words: Any, *, id: int = 1, seconds: float = math.inf, lengths: tuple[int, ...] = ()) -> bytes:  # noqa: A002 - its name
    """The payload of a frame."""
    return msgspec.msgpack.encode((kind, id, seconds, lengths, msgspec.msgpack.encode(words)))


class WrongPeer:
    """A stream that has been introduced to a listener."""

    def __init__(self, stream: MemoryStream, listener: Listener) -> None:
        self._stream, self._listener = stream, listener
        self._number = 0

    async def send(self, *payloads: bytes) -> None:
        """Send frames in one write, with correct numbers."""
        data = b""
        for payload in payloads:
            data += struct.pack("<II", self._number, len(payload)) + payload
            self._number += 1
        await self._stream.send(data)

    async def wait_cut(self) -> None:
        while any(peer.node == "wrong" for peer in self._listener.peers):
            await anyio.lowlevel.checkpoint()


@asynccontextmanager
async def open_wrong_peer(limits: Limits | None = None) -> AsyncIterator[tuple[WrongPeer, Ref[Echoing], EchoActor]]:
    """A peer that breaks the rules, another connection's ref to the same actor, and the actor."""
    actor = EchoActor()
    (near, far), (good, served) = memory_pair(), memory_pair()
    with anyio.fail_after(20):
        async with (
            near,
            far,
            good,
            served,
            ActorSystem.open() as system,
            listen(
                None, secret=SECRET, expose={"desk": await system.spawn(actor, mailbox_size=1)}, limits=limits
            ) as listener,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(listener.serve, far)
            tasks.start_soon(listener.serve, served)
            await send_hello(near, own_hello(), SECRET)
            async with connect_stream(good, secret=SECRET) as peer:
                yield WrongPeer(near, listener), peer.ref(Echoing, "desk"), actor
            actor.go.set()
            near.cut()


@pytest.mark.parametrize(
    "wrong",
    [
        [message(Kind.ASK, ["desk", ["Echoing"], "Echo", {"value": 1}, 0])],
        [message(Kind.ASK, ASK, seconds=NAN)],
        [message(Kind.ASK, ASK, id=-1)],
        [message(Kind.ASK, ASK), message(Kind.ASK, ASK)],
        [message(Kind.EXPOSED, [["hall"], 1, []])],
        [message(Kind.EXPOSED, ["hall", 1, [1]])],
        [message(Kind.EXPOSED, ["hall", 1, []]), message(Kind.DOWN, ["hall", 1, "lost", None, False])],
        [message(Kind.TAKEN, [1.5])],
        [message(Kind.EXPOSED, 7)],
        [b"\x93garbage"],
    ],
)
async def test_wrong_peer_malformed_message_cuts_only_its_connection(wrong):
    """Other peers of the listener are served."""
    async with open_wrong_peer() as (peer, desk, _):
        await peer.send(*wrong)
        await peer.wait_cut()

        assert await desk.ask(Echo(value=5)) == 5


def words() -> st.SearchStrategy[Any]:
    plain = (
        st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | st.sampled_from(["desk", "Echoing", "Echo", ""])
    )
    return st.recursive(plain, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner))


@given(messages=st.lists(st.tuples(st.sampled_from([*Kind]), words(), st.integers(0, 9), st.floats()), max_size=5))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=25)
async def test_wrong_peer_random_messages_leave_others_served(messages):
    """Messages of every kind with words of every shape."""
    async with open_wrong_peer() as (peer, desk, _):
        with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            for kind, said, number, seconds in messages:
                await peer.send(message(kind, said, id=number, seconds=seconds))
        await wait_all_tasks_blocked()

        assert await desk.ask(Echo(value=5)) == 5


@pytest.mark.parametrize("welcome", [7, [7], [["hall", 1]], [["hall", 1, [["Echoing", "Echo"]]]], [[[], 1, []]]])
async def test_wrong_peer_malformed_welcome_is_unreachable(welcome):
    """The connecting side says so and closes the stream."""

    async def greet_wrongly(stream: MemoryStream) -> None:
        await receive_hello(stream, own_hello(), SECRET)
        await send_packet(stream, {"welcome": welcome})
        with pytest.raises(anyio.EndOfStream):
            await stream.receive()

    near, far = memory_pair()
    with anyio.fail_after(10):
        async with near, far, anyio.create_task_group() as tasks:
            tasks.start_soon(greet_wrongly, far)
            with pytest.raises(Unreachable, match="the introduction failed"):
                async with connect_stream(near, secret=SECRET):
                    pass


@pytest.mark.parametrize(("dtype", "shape"), [("float32", [1 << 45]), ("float32", [3]), ("float32", [-1, 0])])
async def test_wrong_peer_tensor_without_bytes_allocates_nothing(dtype, shape):
    """Whatever shape is claimed for it."""
    torch = pytest.importorskip("torch")
    codec = Codec()
    inner = msgspec.msgpack.encode([dtype, shape, b""])

    with pytest.raises(ProtocolError):
        codec.decode([msgspec.msgpack.encode([msgspec.msgpack.Ext(2, inner)])])
    assert torch.Size([3, 0]) == codec.decode(codec.encode([torch.empty(3, 0)]))[0].shape


async def test_wrong_peer_other_version_is_named_to_both():
    """The connecting side learns which versions there are, and not only that the connection was closed."""
    near, far = memory_pair()
    async with listen(None, secret=SECRET, node="old") as listener, near, far, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, far)
        with anyio.fail_after(10), pytest.raises(Unreachable, match=r"speaks version 9 .* node 'old' .* version 3"):
            await send_hello(near, evolve(own_hello(), wire=9), SECRET)
