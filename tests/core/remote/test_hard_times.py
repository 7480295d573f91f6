"""What a connection owes its own side when the process, the network or the other side stops for a while."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from typing import Any

import anyio
import pytest
import trio
import trio.testing
from anyio import wait_all_tasks_blocked
from tests.core.remote.clerks import SECRET, Clerk, Desk, Echo, Note

from areal_actors.core import ActorSystem
from areal_actors.core.remote import Limits, connect, connect_stream, listen
from areal_actors.core.remote.frames import Kind, Outgoing
from areal_actors.core.remote.hello import greet, receive_hello, send_packet
from areal_actors.core.remote.sockets import SocketStream
from areal_actors.testing.remote import memory_pair

pytestmark = pytest.mark.anyio

TABLE = [["desk", 1, [["Desk", "Note", False], ["Desk", "Echo", False]]]]


async def welcome(stream: Any) -> None:
    """Be somebody who exposes a desk, and says nothing more."""
    own = greet(node="far", incarnation=1, window_messages=1000, window_bytes=1 << 30)
    await receive_hello(stream, own, SECRET)
    await send_packet(stream, {"welcome": TABLE})


async def test_leaving_does_not_wait_for_somebody_who_is_gone():
    """What is queued is written while there is somebody to read it, and no longer."""
    near, far = memory_pair()
    with anyio.fail_after(10):
        async with near, far, anyio.create_task_group() as tasks:

            async def leave() -> None:
                async with connect_stream(near, secret=SECRET, limits=Limits(cleanup_seconds=1000)) as peer:
                    for _ in range(100):
                        await peer.ref(Desk, "desk").tell(Note(text="x" * 100_000))

            tasks.start_soon(leave)
            await welcome(far)
            await wait_all_tasks_blocked()
            far.cut()


async def test_a_listener_survives_a_process_without_descriptors(tmp_path, caplog):
    """Whoever connects meanwhile is taken in when there are some again."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    path = f"unix:{tmp_path}/own/x.sock"
    with anyio.fail_after(20):
        async with ActorSystem.open() as system:
            desk = await system.spawn(Clerk())
            with socket.socket(socket.AF_UNIX) as raw:
                async with listen(path, secret=SECRET, expose={"desk": desk}):
                    lowest = os.dup(raw.fileno())
                    os.close(lowest)
                    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
                    try:
                        raw.connect(path.removeprefix("unix:"))
                        while "connections wait: Too many open files" not in caplog.text:
                            await anyio.lowlevel.checkpoint()
                    finally:
                        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
                    async with connect(path, secret=SECRET) as peer:
                        assert await peer.ref(Desk, "desk").ask(Echo(value=3)) == 3


class JumpLoop(asyncio.SelectorEventLoop):
    """Its clock can be put forward, as if the process had been stopped."""

    jumped = 0.0

    def time(self) -> float:
        return super().time() + self.jumped


def jump(seconds: float) -> None:
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        clock = trio.lowlevel.current_clock()
        assert isinstance(clock, trio.testing.MockClock)
        clock.jump(seconds)
    else:
        assert isinstance(loop, JumpLoop)
        loop.jumped += seconds


class TestAStop:
    """Of this process, for longer than its peers may be silent."""

    @pytest.fixture(params=["asyncio", "trio"])
    def anyio_backend(self, request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
        if request.param == "asyncio":
            return "asyncio", {"loop_factory": JumpLoop}
        return "trio", {"clock": trio.testing.MockClock(rate=1.0)}

    async def test_what_was_said_meanwhile_is_heard_first(self):
        """Who was stopped has heard nothing; that is no word about the other side, which has spoken all the time."""
        ends = [SocketStream(end) for end in socket.socketpair()]
        ping = Outgoing(Kind.PING, 0, []).head()
        async with ends[0], ends[1], anyio.create_task_group() as tasks:
            tasks.start_soon(welcome, ends[1])
            async with connect_stream(ends[0], secret=SECRET, limits=Limits(cleanup_seconds=0.1)) as peer:
                for _ in range(20):
                    await wait_all_tasks_blocked()
                    ends[1].raw.send(ping)
                    jump(20.0)
                    await wait_all_tasks_blocked()

                    assert peer.is_connected, await peer.wait_closed()
                ends[1].raw.close()
