"""What a connection owes its own side when the process, the network or the other side stops for a while."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from typing import Any

import anyio
import numpy as np
import pytest
import trio
import trio.testing
from anyio import wait_all_tasks_blocked
from tests.kernel.remote.echo_actor import SECRET, Echo, EchoActor, Echoing, Note

from areal_actors.errors import ConfigError, ProtocolError, RemoteError, Unreachable
from areal_actors.kernel import ActorSystem, Ref
from areal_actors.kernel.remote import Limits, connect, connect_stream, listen
from areal_actors.kernel.remote.frames import Kind, Outgoing
from areal_actors.kernel.remote.hello import greet, receive_hello, send_packet
from areal_actors.kernel.remote.sockets import UnixStream
from areal_actors_testing.remote import memory_pair

pytestmark = pytest.mark.anyio

TABLE = [["desk", 1, [["Echoing", "Note", False], ["Echoing", "Echo", False]]]]


async def welcome(stream: Any) -> None:
    """Introduce a node that exposes a desk, and send nothing more."""
    own = greet(node="far", incarnation=1, limits=Limits())
    await receive_hello(stream, own, SECRET)
    await send_packet(stream, {"welcome": TABLE})


async def test_connection_close_does_not_wait_for_a_lost_peer():
    """Queued messages are written only while the other side reads."""
    near, far = memory_pair()
    with anyio.fail_after(10):
        async with near, far, anyio.create_task_group() as tasks:

            async def tell(desk: Ref[Echoing]) -> None:
                with pytest.raises(Unreachable):
                    await desk.tell(Note(text="x" * 100_000))

            async def leave() -> None:
                async with connect_stream(near, secret=SECRET, limits=Limits(cleanup_seconds=1000)) as peer:
                    for _ in range(100):
                        tasks.start_soon(tell, peer.ref(Echoing, "desk"))
                    await anyio.lowlevel.checkpoint()

            tasks.start_soon(leave)
            await welcome(far)
            await wait_all_tasks_blocked()
            far.cut()


async def test_listener_survives_exhausted_descriptors(tmp_path, caplog):
    """A client that connects meanwhile is accepted when descriptors are free again."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    path = f"unix:{tmp_path}/own/x.sock"
    with anyio.fail_after(20):
        async with ActorSystem.open() as system:
            desk = await system.spawn(EchoActor())
            with socket.socket(socket.AF_UNIX) as raw:
                async with listen(path, secret=SECRET, expose={"desk": desk}):
                    lowest = os.dup(raw.fileno())
                    os.close(lowest)
                    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
                    try:
                        raw.connect(path.removeprefix("unix:"))
                        while "connections_wait reason=Too many open files" not in caplog.text:
                            await anyio.lowlevel.checkpoint()
                    finally:
                        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
                    async with connect(path, secret=SECRET) as peer:
                        assert await peer.ref(Echoing, "desk").ask(Echo(value=3)) == 3


async def test_listen_refuses_a_path_too_long_for_a_socket(tmp_path):
    """By its length, and with what to do about it: the directory of a run, or TMPDIR, may lie deep."""
    deep = tmp_path / ("x" * 120) / "own.sock"
    with pytest.raises(ConfigError, match=r"too long for a socket .* at most 10\d.*TMPDIR"):
        async with listen(f"unix:{deep}", secret=SECRET):
            pass


async def test_listener_forgets_nodes_that_left():
    """Only a node that has had several lives is remembered after it has left."""
    async with listen(None, secret=SECRET) as listener, anyio.create_task_group() as tasks:
        for _ in range(20):
            near, far = memory_pair()
            tasks.start_soon(listener.serve, far)
            async with near, far, connect_stream(near, secret=SECRET):
                pass

        assert {} == vars(listener)["_newest"]


@pytest.mark.parametrize("side", ["request", "reply"])
async def test_ask_larger_than_the_limit_fails_alone(side):
    """The error names the size and the limit; other asks on the connection continue."""
    large, small = Limits(), Limits(max_message_bytes=300_000)
    near, far = memory_pair()
    there, here = (small, large) if side == "request" else (large, small)
    value = np.zeros(400_000, np.uint8)
    async with ActorSystem.open() as system, anyio.create_task_group() as tasks:
        desk = await system.spawn(EchoActor())
        async with listen(None, secret=SECRET, expose={"desk": desk}, limits=there) as listener, near, far:
            tasks.start_soon(listener.serve, far)
            async with connect_stream(near, secret=SECRET, limits=here) as peer:
                remote = peer.ref(Echoing, "desk")
                with pytest.raises((ProtocolError, RemoteError), match=r"has 400\d\d\d bytes; .* takes at most 300000"):
                    await remote.ask(Echo(value=value))

                assert await remote.ask(Echo(value=3)) == 3


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

    async def test_connection_survives_a_suspended_process(self):
        """Data that arrived during the suspension is read before the silence is judged."""
        sockets = socket.socketpair()
        ends = [UnixStream(end) for end in sockets]
        async with ends[0], ends[1], anyio.create_task_group() as tasks:
            tasks.start_soon(welcome, ends[1])
            async with connect_stream(ends[0], secret=SECRET, limits=Limits(cleanup_seconds=0.1)) as peer:
                for number in range(20):
                    await wait_all_tasks_blocked()
                    sockets[1].send(*Outgoing(Kind.PING).frame(number))
                    jump(20.0)
                    await wait_all_tasks_blocked()

                    assert peer.is_connected, await peer.wait_closed()
                await ends[1].aclose()
