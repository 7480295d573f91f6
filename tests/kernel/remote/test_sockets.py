"""Real sockets that go wrong, and that take and give bytes in portions of their own."""

from __future__ import annotations

import asyncio
import selectors
import socket
from typing import Any

import anyio
import numpy as np
import pytest
from anyio import wait_all_tasks_blocked
from attrs import frozen
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.kernel.remote.test_faults import Bookkeeper, Enter, Fault, Ledger, play, steps

from areal_actors.errors import Unreachable
from areal_actors.kernel import Actor, ActorSystem, Message
from areal_actors.kernel.remote import Limits, connect, connect_stream, listen
from areal_actors.kernel.remote.sockets import UnixStream

pytestmark = pytest.mark.anyio

SECRET = b"a secret that sockets keep"
SPEED = 20
"""Seconds of the loop's clock in one second."""

PATIENT = Limits(heartbeat_seconds=5.0 * SPEED, silence_seconds=15.0 * SPEED, hello_seconds=10.0 * SPEED)


class FastLoop(asyncio.SelectorEventLoop):
    """Its clock is fast."""

    def __init__(self) -> None:
        super().__init__(FastSelector())

    def time(self) -> float:
        return super().time() * SPEED


class FastSelector(selectors.DefaultSelector):
    """It waits for less time than it is told."""

    def select(self, timeout: float | None = None) -> Any:
        return super().select(timeout if timeout is None or timeout <= 0 else timeout / SPEED)


def fast_backend(name: str) -> tuple[str, dict[str, Any]]:
    """An event loop in whose time ``SPEED`` seconds pass in one."""
    if name == "asyncio":
        return name, {"loop_factory": FastLoop}
    from trio.testing import MockClock

    return name, {"clock": MockClock(rate=SPEED)}


LIMITS = Limits(hello_seconds=40, heartbeat_seconds=15, silence_seconds=60)


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest):
    """Both loops, in a time that is fast but real."""
    return fast_backend(request.param)


def pair(num_bytes: int = 1 << 16) -> tuple[UnixStream, UnixStream]:
    """Two ends that hold no more than about ``num_bytes`` between them."""
    ends = socket.socketpair()
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, num_bytes)
    return UnixStream(ends[0]), UnixStream(ends[1])


async def forward(source: UnixStream, target: UnixStream, fault: Fault, portion: int) -> None:
    """What comes from one to the other, in portions, with a fault in it; afterwards both are cut."""
    try:
        while True:
            data = fault(await source.receive(portion))
            await target.send(data if isinstance(data, bytes) else await data)
            if fault.kind == "cut" and not fault.left:
                break  # a half was let through
    except (anyio.BrokenResourceError, anyio.EndOfStream, anyio.ClosedResourceError, OSError):
        pass
    finally:
        for end in (source, target):
            await anyio.aclose_forcefully(end)


faults = st.builds(
    Fault,
    st.sampled_from(["none", "cut", "half", "garbage", "oversized", "repeated", "replayed", "delayed"]),
    st.integers(min_value=0, max_value=4_000),
)


@given(
    program=st.lists(steps, max_size=6),
    there=faults,
    back=faults,
    portion=st.sampled_from([1 << 9, 1 << 12, 1 << 18]),
    room=st.sampled_from([1 << 11, 1 << 16]),
)
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
async def test_socket_with_faults_ends_each_call_once(program, there, back, portion, room):
    """As in memory: each step ends once, and nothing is handled twice."""
    bookkeeper = Bookkeeper()
    outcomes: dict[int, list[str]] = {number: [] for number in range(len(program))}
    (near, here), (yonder, far) = pair(room), pair(room)
    with anyio.fail_after(2_000):
        async with ActorSystem.open() as system:
            ref = await system.spawn(bookkeeper, mailbox_size=2)
            async with (
                listen(None, secret=SECRET, expose={"ledger": ref}, limits=LIMITS) as listener,
                anyio.create_task_group() as tasks,
            ):
                tasks.start_soon(listener.serve, far)
                tasks.start_soon(forward, here, yonder, there, portion)
                tasks.start_soon(forward, yonder, here, back, portion)
                try:
                    async with connect_stream(near, secret=SECRET, limits=LIMITS) as peer:
                        desk = peer.ref(Ledger, "ledger")
                        async with anyio.create_task_group() as players:
                            for number, step in enumerate(program):
                                players.start_soon(play, desk, number, step, outcomes)
                except Unreachable:
                    outcomes = {number: ["unsent"] for number in outcomes}
        assert bookkeeper.open == 0

    assert all(len(ends) == 1 for ends in outcomes.values())
    assert all(count == 1 for count in bookkeeper.handled.values())
    for number, (end,) in outcomes.items():
        assert end not in ("answered", "read") or bookkeeper.handled[number] == 1
        assert end != "unsent" or bookkeeper.handled[number] == 0
    if {there.kind, back.kind} <= {"none", "delayed"}:
        assert not [number for number, (end,) in outcomes.items() if end in ("sent", "unsent", "failed")]


class Depot:
    """Address of the actor that keeps arrays."""


@frozen(kw_only=True)
class Turn(Message[Depot, Any]):
    arrays: Any


class Keeper(Actor[Depot]):
    @Turn.handler
    async def turn(self, message: Turn) -> Any:
        return [array[::-1] for array in message.arrays]


@pytest.mark.parametrize("room", [1 << 11, 1 << 20])
async def test_socket_transfers_arrays_in_any_portions(room):
    """Several at once, among small messages, larger than the kernel has room for."""
    arrays = [np.arange(size, dtype=np.int64) for size in (3, 70_000, 200_001)]
    near, far = pair(room)
    with anyio.fail_after(400):
        async with ActorSystem.open() as system:
            exposed = {"depot": await system.spawn(Keeper()), "ledger": await system.spawn(Bookkeeper())}
            async with (
                listen(None, secret=SECRET, expose=exposed, limits=PATIENT) as listener,
                anyio.create_task_group() as tasks,
            ):
                tasks.start_soon(listener.serve, far)
                async with connect_stream(near, secret=SECRET, limits=PATIENT) as peer:
                    depot, ledger = peer.ref(Depot, "depot"), peer.ref(Ledger, "ledger")

                    async def turn() -> None:
                        for array, turned in zip(arrays, await depot.ask(Turn(arrays=arrays)), strict=True):
                            assert np.array_equal(array[::-1], turned)

                    async def count() -> None:
                        for number in range(50):
                            assert number == await ledger.ask(Enter(id=number))

                    async with anyio.create_task_group() as askers:
                        for work in (turn, count, turn):
                            askers.start_soon(work)


async def test_connection_cut_while_it_writes_closes_the_socket():
    """The sender is told that its message may have arrived, and both sides close the socket."""
    near, far = pair(1 << 11)
    with anyio.fail_after(400):
        async with (
            ActorSystem.open() as system,
            listen(None, secret=SECRET, expose={"depot": await system.spawn(Keeper())}, limits=PATIENT) as listener,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(listener.serve, far)
            async with connect_stream(near, secret=SECRET, limits=PATIENT) as peer:
                outcomes: list[bool] = []

                async def turn() -> None:
                    with pytest.raises(Unreachable) as caught:
                        await peer.ref(Depot, "depot").ask(Turn(arrays=[np.zeros(8 << 20, dtype=np.uint8)]))
                    outcomes.append(caught.value.sent)

                async with anyio.create_task_group() as askers:
                    askers.start_soon(turn)
                    await anyio.lowlevel.checkpoint()
                    listener.peers[0].close("pulled out")
                    await peer.wait_closed()
                    await wait_all_tasks_blocked()

    assert [True] == outcomes
    for end in (near, far):
        with pytest.raises(anyio.ClosedResourceError):
            await end.receive()
        with pytest.raises(anyio.ClosedResourceError):
            await end.send(b"x")


async def test_connect_without_listener_is_unreachable():
    """The error names the address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(Unreachable, match=f"no answer at tcp://127.0.0.1:{port}"):
        async with connect(f"tcp://127.0.0.1:{port}", secret=SECRET):
            pass
