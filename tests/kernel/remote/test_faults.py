"""Connections that go wrong at any byte: delays, cuts, garbage, halves, repetitions. What must hold nevertheless.

* Nothing hangs: every ask, tell and stream ends, and exactly once.
* Nothing is delivered twice, and a reply is the reply to that very ask.
* ``Unreachable(sent=False)`` is never said of a message that was handled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable
from typing import Any

import anyio
import pytest
from attrs import frozen
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from areal_actors.errors import ActorError, Unreachable
from areal_actors.kernel import Actor, ActorSystem, Message, StreamMessage
from areal_actors.kernel.remote import Limits, connect_stream, listen
from areal_actors.testing import virtual_backend
from areal_actors_testing.remote import memory_pair

pytestmark = pytest.mark.anyio

SECRET = b"a secret that survives faults"
LIMITS = Limits(hello_seconds=5, cleanup_seconds=5)


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest):
    """Both loops, in virtual time."""
    return virtual_backend(request.param)


class Ledger:
    """Address of the actor that counts what it is given."""


@frozen(kw_only=True)
class Enter(Message[Ledger, int]):
    id: int
    seconds: float = 0.0
    padding: bytes = b""


@frozen(kw_only=True)
class Tell(Message[Ledger, None]):
    id: int


@frozen(kw_only=True)
class Read(StreamMessage[Ledger, int]):
    id: int


class Bookkeeper(Actor[Ledger]):
    def __init__(self) -> None:
        self.handled: Counter[int] = Counter()
        self.told: list[int] = []
        self.open = 0

    @Enter.handler(concurrency=4)
    async def enter(self, message: Enter) -> int:
        self.handled[message.id] += 1
        self.open += 1
        try:
            await anyio.sleep(message.seconds)
        finally:
            self.open -= 1
        return message.id

    @Tell.handler
    async def tell(self, message: Tell) -> None:
        self.handled[message.id] += 1
        self.told.append(message.id)

    @Read.handler(concurrency=4)
    async def read(self, message: Read):
        self.handled[message.id] += 1
        for item in range(20):
            yield item


class Fault:
    """Does something to the bytes once ``after`` of them have passed."""

    def __init__(self, kind: str, after: int) -> None:
        self.kind, self.left, self.previous = kind, after, b""

    def __call__(self, data: bytes) -> bytes | Awaitable[bytes]:  # noqa: PLR0911 - a case each
        self.left -= len(data)
        if self.left > 0 or self.kind == "none":
            self.previous = data
            return data
        self.left = 1 << 60
        match self.kind:
            case "delayed":
                self.left = 300
                return self.delay(data)
            case "cut":
                raise anyio.BrokenResourceError
            case "half":
                self.left = 0
                self.kind = "cut"
                return data[: len(data) // 2]
            case "garbage":
                return b"\xff\x00garbage\x80" * 5 + data
            case "oversized":
                return b"\x00\x00\x00\x00\xff\xff\xff\xff" + b"\0" * 16 + data
            case "repeated":
                return data + data
            case "replayed":
                return data + self.previous
        raise AssertionError(self.kind)

    async def delay(self, data: bytes) -> bytes:
        """Every few hundred bytes, for longer than it takes to lose patience, and than a heartbeat."""
        await anyio.sleep(7)
        return data


faults = st.builds(
    Fault,
    st.sampled_from(["none", "cut", "half", "garbage", "oversized", "repeated", "replayed", "delayed"]),
    st.integers(min_value=0, max_value=4_000),
)
steps = st.tuples(
    st.sampled_from(["ask", "ask", "tell", "tell", "stream", "large"]),
    st.integers(min_value=0, max_value=3),
    st.none() | st.integers(min_value=0, max_value=3),
)


async def play(desk: Any, number: int, step: Any, outcomes: dict[int, list[str]]) -> None:
    kind, at, patience = step
    await anyio.sleep(at)
    with anyio.move_on_after(1_000 if patience is None else patience) as scope:
        try:
            if kind == "tell":
                await desk.tell(Tell(id=number))
                outcomes[number].append("told")
            elif kind == "stream":
                async with desk.stream(Read(id=number), buffer_size=2) as items:
                    assert list(range(20)) == [item async for item in items]
                outcomes[number].append("read")
            else:
                padding = bytes(600_000 if kind == "large" else 10)
                assert await desk.ask(Enter(id=number, seconds=at, padding=padding)) == number
                outcomes[number].append("answered")
        except Unreachable as error:
            outcomes[number].append("sent" if error.sent else "unsent")
        except ActorError:
            outcomes[number].append("failed")
    if scope.cancelled_caught:
        outcomes[number].append("left")


@example(  # items of two streams, said again
    program=[("ask", 0, None)] * 6 + [("stream", 0, None)] * 2,
    there=Fault("delayed", 280),
    back=Fault("replayed", 1051),
)
@given(program=st.lists(steps, max_size=10), there=faults, back=faults)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
async def test_connection_with_faults_ends_each_call_once(program, there, back):
    """Every program comes to its end, with one outcome for each step."""
    bookkeeper = Bookkeeper()
    outcomes: dict[int, list[str]] = {number: [] for number in range(len(program))}
    with anyio.fail_after(5_000):
        async with ActorSystem.open() as system:
            ref = await system.spawn(bookkeeper, mailbox_size=2)
            async with listen(None, secret=SECRET, expose={"ledger": ref}, limits=LIMITS) as listener:
                near, far = memory_pair(on_send=(there, back))
                async with near, far, anyio.create_task_group() as tasks:
                    tasks.start_soon(listener.serve, far)
                    try:
                        async with connect_stream(near, secret=SECRET, limits=LIMITS) as peer:
                            desk = peer.ref(Ledger, "ledger")
                            async with anyio.create_task_group() as players:
                                for number, step in enumerate(program):
                                    players.start_soon(play, desk, number, step, outcomes)
                    except Unreachable:
                        outcomes = {number: ["unsent"] for number in outcomes}
                    far.cut()
            assert bookkeeper.open == 0

    assert all(len(ends) == 1 for ends in outcomes.values())
    assert all(count == 1 for count in bookkeeper.handled.values())
    for number, (end,) in outcomes.items():
        assert end not in ("answered", "read") or bookkeeper.handled[number] == 1
        assert end != "unsent" or bookkeeper.handled[number] == 0
    if there.kind == back.kind == "none":
        assert not [number for number, (end,) in outcomes.items() if end in ("sent", "unsent", "failed")]
