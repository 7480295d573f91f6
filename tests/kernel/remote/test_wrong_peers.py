"""Peers that know the secret and do not keep the rules: what they send costs them their connection, and nobody else."""

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

from areal_actors.errors import NotFound, ProtocolError, Unreachable
from areal_actors.kernel import ActorSystem, Ref
from areal_actors.kernel.failure import leaves
from areal_actors.kernel.remote import Limits, Listener, connect_stream, listen
from areal_actors.kernel.remote.codec import Codec
from areal_actors.kernel.remote.frames import Kind
from areal_actors.kernel.remote.hello import Hello, greet, receive_hello, send_hello, send_packet
from areal_actors.lib.task_groups import open_tasks
from areal_actors_testing.remote import MemoryStream, memory_pair

pytestmark = pytest.mark.anyio

NAN = math.nan
ASK = ["desk", "Echoing", "Echo", {"value": 1}, 0]


def own_hello() -> Hello:
    return greet(node="wrong", incarnation=1, limits=Limits())


def frame(kind: Kind, words: Any, *, id: int = 1, seconds: float = math.inf) -> bytes:  # noqa: A002 - its name
    payload = msgspec.msgpack.encode(words)
    return struct.pack("<BBHIQd", kind, 0, 0, len(payload), id, seconds) + payload


@asynccontextmanager
async def wrong_peer(
    limits: Limits | None = None,
) -> AsyncIterator[tuple[MemoryStream, Listener, Ref[Echoing], EchoActor]]:
    """A stream that has been introduced; who listens; and another connection's view of the same desk."""
    actor = EchoActor()
    (near, far), (good, served) = memory_pair(), memory_pair()
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
            yield near, listener, peer.ref(Echoing, "desk"), actor
        actor.go.set()
        near.cut()


@pytest.mark.parametrize(
    "wrong",
    [
        frame(Kind.ASK, ["desk", ["Echoing"], "Echo", {"value": 1}, 0]),
        frame(Kind.ASK, ASK, seconds=NAN),
        frame(Kind.STREAM, ["desk", "Echoing", "Numbers", {"n": 3}, 1], seconds=NAN),
        frame(Kind.STOP, ["desk", "hall"]),
        frame(Kind.STOP, [["desk"]]),
        frame(Kind.STOP, ["desk"], seconds=NAN),
        frame(Kind.CREDIT, [["desk"], 1, 1]),
        frame(Kind.CREDIT, ["hall", 1, 1]) + frame(Kind.EXPOSED, ["hall", 1, [1]]),
        frame(Kind.EXPOSED, [["hall"], 1, []]),
        frame(Kind.EXPOSED, ["hall", 1, []]) + frame(Kind.DOWN, ["hall", 1, "lost", None, False]),
        frame(Kind.EXPOSED, ["hall", 1, []]) + frame(Kind.CREDIT, ["hall", "a", 1]),
        frame(Kind.TAKEN, [], seconds=NAN),
        frame(Kind.TAKEN, [], seconds=math.inf),
        frame(Kind.EXPOSED, 7),
    ],
)
async def test_what_is_malformed_cuts_its_own_connection(wrong):
    """Others of the same listener go on; nothing else hears of it."""
    with anyio.fail_after(10):
        async with wrong_peer() as (stream, listener, desk, _):
            await stream.send(wrong)
            while any(peer.node == "wrong" for peer in listener.peers):
                await anyio.lowlevel.checkpoint()

            assert await desk.ask(Echo(value=5)) == 5


def words() -> st.SearchStrategy[Any]:
    plain = (
        st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | st.sampled_from(["desk", "Echoing", "Echo", ""])
    )
    return st.recursive(plain, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner))


def frames() -> st.SearchStrategy[tuple[Kind, Any, int, float]]:
    drawn = st.tuples(st.sampled_from([*Kind]), words(), st.integers(0, 9), st.floats())
    # That frame is well-formed, and a peer that knows the secret may stop the actor.
    return drawn.filter(lambda one: one[:2] != (Kind.STOP, ["desk"]))


@given(frames=st.lists(frames(), min_size=1, max_size=5))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=25)
async def test_whatever_a_peer_says_others_are_served(frames):
    """Frames of every kind with words of every shape."""
    with anyio.fail_after(20):
        async with wrong_peer() as (stream, _, desk, __):
            for kind, said, number, seconds in frames:
                try:
                    await stream.send(frame(kind, said, id=number, seconds=seconds))
                except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                    break
            await wait_all_tasks_blocked()

            assert not isinstance(await desk.ask(Echo(value=5)), Exception)


@pytest.mark.parametrize("welcome", [7, [7], [["hall", 1]], [["hall", 1, [["Echoing", "Echo"]]]], [[[], 1, []]]])
async def test_a_malformed_welcome_is_no_introduction(welcome):
    """Whoever connects is told so, and the stream is closed."""

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


async def test_what_a_task_raises_is_not_lost_behind_the_cancelled_block():
    """The block itself has only been cancelled, which alone would not show the reason."""

    async def fail() -> None:
        raise NotFound("the reason")

    with pytest.raises(ExceptionGroup) as caught:
        async with open_tasks() as tasks:
            tasks.start_soon(fail)
            await anyio.sleep_forever()

    assert ["the reason"] == [str(leaf) for leaf in leaves(caught.value)]


async def test_a_block_raises_its_own_error_without_a_group():
    """The tasks behind it are cancelled, and add nothing."""
    cause = ValueError("the cause")
    with pytest.raises(NotFound, match="the reason") as caught:
        async with open_tasks() as tasks:
            tasks.start_soon(anyio.sleep_forever)
            raise NotFound("the reason") from cause

    assert cause is caught.value.__cause__


@pytest.mark.parametrize(("dtype", "shape"), [("float32", [1 << 45]), ("float32", [3]), ("float32", [-1, 0])])
async def test_a_tensor_without_bytes_takes_no_memory(dtype, shape):
    """Whatever shape is claimed for it."""
    torch = pytest.importorskip("torch")
    codec = Codec()
    inner = msgspec.msgpack.encode([dtype, shape, b""])

    with pytest.raises(ProtocolError):
        codec.decode([msgspec.msgpack.encode([msgspec.msgpack.Ext(2, inner)])])
    assert torch.Size([3, 0]) == codec.decode(codec.encode([torch.empty(3, 0)]))[0].shape


async def tell_many(stream: MemoryStream, text: str) -> None:
    with contextlib.suppress(anyio.BrokenResourceError):
        for number in range(1, 20):
            await stream.send(frame(Kind.TELL, ["desk", "Echoing", "Note", {"text": text}, 0], id=number))


async def test_who_sends_beyond_its_credit_is_cut():
    """What is under way to a mailbox that takes nothing stays within the window, whatever the other side thinks."""
    with anyio.fail_after(10):
        async with wrong_peer(Limits(window_messages=4)) as (stream, listener, desk, actor):
            await tell_many(stream, "x")
            while any(peer.node == "wrong" for peer in listener.peers):
                await anyio.lowlevel.checkpoint()
            actor.go.set()
            await wait_all_tasks_blocked()

            assert len(actor.seen) <= 6  # one handled, one queued, and the window
            assert await desk.ask(Echo(value=5)) == 5


async def test_who_sends_more_bytes_than_it_may_is_cut():
    """The message that crosses the line is the last one."""
    with anyio.fail_after(10):
        async with wrong_peer(Limits(window_bytes=1000)) as (stream, listener, _, __):
            await tell_many(stream, "x" * 900)
            while any(peer.node == "wrong" for peer in listener.peers):
                await anyio.lowlevel.checkpoint()


@pytest.mark.parametrize("is_together", [False, True])
async def test_what_is_cancelled_while_it_arrives_is_not_begun(is_together):
    """Also if the word of it and the end of the message are read at once."""
    body = msgspec.msgpack.encode(["desk", "Echoing", "Wait", {}, 0])
    parts = (body, b"0123456789")
    begin = struct.pack("<BBHIQd", Kind.ASK, 1, 0, 16, 1, math.inf) + struct.pack("<QQ", *map(len, parts))
    chunks = [struct.pack("<BBHIQd", Kind.CHUNK, 0, 0, len(part), 1, 0.0) + part for part in parts]
    cancel = struct.pack("<BBHIQd", Kind.CANCEL, 0, 0, 0, 1, 0.0)
    with anyio.fail_after(10):
        async with wrong_peer() as (stream, _, __, actor):
            await stream.send(begin + chunks[0])
            await wait_all_tasks_blocked()
            for data in (cancel + chunks[1],) if is_together else (cancel, chunks[1]):
                await stream.send(data)
                await wait_all_tasks_blocked()

            assert [] == actor.seen


async def test_another_version_is_named_to_both():
    """Who connects learns which versions there are, and not only that somebody hung up."""
    near, far = memory_pair()
    async with listen(None, secret=SECRET, node="old") as listener, near, far, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, far)
        with anyio.fail_after(10), pytest.raises(Unreachable, match=r"speaks versions 7 to 9 .* node 'old' .* 1 to 1"):
            await send_hello(near, evolve(own_hello(), oldest=7, newest=9), SECRET)
