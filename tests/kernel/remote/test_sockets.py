"""Real sockets, which take and give bytes in portions of their own. ``test_faults`` has what may happen to streams."""

from __future__ import annotations

import errno
import socket
from typing import Any

import anyio
import numpy as np
import pytest
from anyio import wait_all_tasks_blocked
from attrs import frozen
from tests.kernel.remote.test_faults import Bookkeeper, Enter, Ledger

from areal_actors.errors import Unreachable
from areal_actors.kernel import Actor, ActorSystem, Message
from areal_actors.kernel.remote import connect, connect_stream, listen
from areal_actors.kernel.remote.sockets import UnixStream

pytestmark = pytest.mark.anyio

SECRET = b"a secret that sockets keep"
SECONDS = 60.0


def pair(num_bytes: int) -> tuple[UnixStream, UnixStream]:
    """Two ends that hold no more than about ``num_bytes`` between them."""
    ends = socket.socketpair()
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, num_bytes)
    return UnixStream(ends[0]), UnixStream(ends[1])


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
    with anyio.fail_after(SECONDS):
        async with ActorSystem.open() as system:
            exposed = {"depot": await system.spawn(Keeper()), "ledger": await system.spawn(Bookkeeper())}
            async with (
                listen(None, secret=SECRET, expose=exposed) as listener,
                anyio.create_task_group() as tasks,
            ):
                tasks.start_soon(listener.serve, far)
                async with connect_stream(near, secret=SECRET) as peer:
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
    with anyio.fail_after(SECONDS):
        async with (
            ActorSystem.open() as system,
            listen(None, secret=SECRET, expose={"depot": await system.spawn(Keeper())}) as listener,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(listener.serve, far)
            async with connect_stream(near, secret=SECRET) as peer:
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


async def test_receive_cancelled_when_data_arrives_leaves_the_data():
    """Neither is the event loop told of an error, nor is anything lost."""
    for _ in range(20):
        near, far = pair(1 << 16)
        async with near, far:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(near.receive)
                await wait_all_tasks_blocked()
                await far.send(b"late")
                tasks.cancel_scope.cancel()

            assert b"late" == await near.receive()


async def test_connect_without_listener_is_unreachable():
    """The error names the address and the reason."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(Unreachable, match=rf"no answer at tcp://127.0.0.1:{port}: \[Errno {errno.ECONNREFUSED}\]"):
        async with connect(f"tcp://127.0.0.1:{port}", secret=SECRET):
            pass
