"""What a remote ref adds to a local one: connections that begin, are bounded, and end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from anyio import wait_all_tasks_blocked
from tests.kernel.remote.echo_actor import SECRET, Echo, EchoActor, Echoing, Foreign, Note, Numbers, Other, Wait

from areal_actors.errors import (
    ActorError,
    ActorStopped,
    ConfigError,
    ProtocolError,
    RemoteError,
    Unreachable,
)
from areal_actors.kernel import ActorSystem, Down, DownReason
from areal_actors.kernel.remote import Limits, connect, connect_stream, listen, transport
from areal_actors_testing.remote import memory_pair, pretend_remote

pytestmark = pytest.mark.anyio


async def test_connection_lets_both_sides_ask(tmp_path):
    """Once introduced, they are alike; also over TCP."""
    for address in (f"unix:{tmp_path / 'private' / 'desk.sock'}", "tcp://127.0.0.1:0"):
        async with ActorSystem.open() as system:
            near, far = await system.spawn(EchoActor()), await system.spawn(EchoActor())
            with anyio.fail_after(10):
                async with (
                    listen(address, secret=SECRET, expose={"far": far}, node="server") as listener,
                    connect(listener.address, secret=SECRET, expose={"near": near}, node="worker") as server,
                ):
                    worker = await listener.wait_for("worker")
                    array = np.arange(300_000, dtype=np.float32)

                    assert await server.ref(Echoing, "far").ask(Echo(value="there")) == "there"
                    assert np.array_equal(array, await server.ref(Echoing, "far").ask(Echo(value=array)))
                    while "near" not in worker.exposed:
                        await anyio.lowlevel.checkpoint()
                    assert await worker.ref(Echoing, "near").ask(Echo(value="back")) == "back"
    assert not (tmp_path / "private" / "desk.sock").exists()
    assert (tmp_path / "private").stat().st_mode & 0o777 == 0o700


async def test_connection_cut_ends_all_calls_and_handlers():
    """Asks, streams and waiting tells, each with the truth about whether it was sent; handlers there are cancelled."""
    actor = EchoActor()
    outcomes: dict[str, bool] = {}
    async with ActorSystem.open() as system:
        ref = await system.spawn(actor, mailbox_size=1)
        async with pretend_remote({"desk": ref}) as (peer, listener):
            desk = peer.ref(Echoing, "desk")

            async def attempt(name: str, message: Any) -> None:
                with pytest.raises(Unreachable) as caught:
                    await (desk.tell(message) if isinstance(message, Note) else desk.ask(message))
                outcomes[name] = caught.value.sent

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(attempt, "running", Wait())
                await wait_all_tasks_blocked()
                await desk.tell(Note(text="queued"))
                tasks.start_soon(attempt, "queued", Echo())
                await wait_all_tasks_blocked()  # it takes the only place in the mailbox
                tasks.start_soon(attempt, "told", Note(text="never"))
                await wait_all_tasks_blocked()
                listener.peers[0].close("pulled out")
                down = await system.watch(desk)

        assert {"running": True, "queued": True, "told": True} == outcomes
        assert (DownReason.UNREACHABLE, False) == (down.reason, down.is_restarting)
        assert actor.seen == ["waits", "cancelled"]
        with pytest.raises(Unreachable) as caught:
            await desk.ask(Echo())
        assert not caught.value.sent
        actor.go.set()


async def test_watcher_is_told_that_a_remote_actor_is_unreachable():
    """As of any end."""
    heard: list[Down] = []
    async with ActorSystem.open() as system:
        ref = await system.spawn(EchoActor())
        async with pretend_remote({"desk": ref}) as (peer, _):
            desk = peer.ref(Echoing, "desk")
            desk.watch(heard.append)
            await ref.stop()
            await wait_all_tasks_blocked()

            assert [DownReason.STOPPED] == [down.reason for down in heard]
            assert heard[0].ref == desk
            with pytest.raises(ActorStopped, match="takes no more messages"):
                await desk.ask(Echo())


async def test_ask_with_an_unsendable_value_fails_alone():
    """The connection goes on."""
    async with ActorSystem.open() as system:
        ref = await system.spawn(EchoActor())
        async with pretend_remote({"desk": ref}) as (peer, _):
            desk = peer.ref(Echoing, "desk")
            with pytest.raises(ProtocolError, match="Echo cannot be sent: a object"):
                await desk.ask(Echo(value=object()))
            with pytest.raises(RemoteError, match="the reply to Echo cannot be sent"):
                await desk.ask(Echo(value="unsendable"))
            with pytest.raises(ProtocolError, match="does not take Foreign this way"):
                await desk.ask(Foreign())
            with pytest.raises(ProtocolError, match="does not speak Other; it speaks Echoing"):
                peer.ref(Other, "desk")
            with pytest.raises(ActorStopped, match="exposes no actor 'missing'; it exposes desk"):
                peer.ref(Echoing, "missing")

            assert await desk.ask(Echo(value=3)) == 3


async def test_remote_tells_wait_for_room_and_arrive_in_order():
    """However slow the actor; memory at both ends stays bounded."""
    actor = EchoActor()
    async with ActorSystem.open() as system, anyio.create_task_group() as tasks:
        ref = await system.spawn(actor, mailbox_size=2)
        async with pretend_remote({"desk": ref}) as (peer, _):
            desk = peer.ref(Echoing, "desk")
            sent: list[int] = []

            async def send() -> None:
                for number in range(30):
                    await desk.tell(Note(text=str(number)))
                    sent.append(number)

            tasks.start_soon(send)
            await wait_all_tasks_blocked()

            assert len(sent) == 3
            assert ref.statistics().num_waiting_senders == 1
            actor.go.set()
            while len(sent) < 30:
                await anyio.lowlevel.checkpoint()
            await desk.ask(Echo())
            assert [str(number) for number in range(30)] == actor.seen
            with pytest.raises(ActorError, match="only in its own process"):
                await desk.stop()


async def test_listener_replaces_a_node_by_its_later_incarnation():
    """A copy is refused, what is over stays out, and a restarted process takes its own place."""
    async with (
        ActorSystem.open() as system,
        listen(None, secret=SECRET, expose={"desk": await system.spawn(EchoActor())}) as listener,
        anyio.create_task_group() as tasks,
    ):

        def stream() -> Any:
            near, far = memory_pair()
            tasks.start_soon(listener.serve, far)
            return near

        async with connect_stream(stream(), secret=SECRET, node="worker", incarnation=2) as first:
            with pytest.raises(Unreachable, match="connected already, as incarnation 2"):
                async with connect_stream(stream(), secret=SECRET, node="worker", incarnation=2):
                    pass
            with pytest.raises(Unreachable, match="incarnation 1 is over"):
                async with connect_stream(stream(), secret=SECRET, node="worker", incarnation=1):
                    pass
            assert await first.ref(Echoing, "desk").ask(Echo()) == 1
            async with connect_stream(stream(), secret=SECRET, node="worker", incarnation=3) as second:
                assert "lost" in await first.wait_closed()
                assert await second.ref(Echoing, "desk").ask(Echo()) == 1
                with pytest.raises(Unreachable):
                    await first.ref(Echoing, "desk").ask(Echo())


@pytest.mark.parametrize(
    "bytes_", [b"GET / HTTP/1.1\r\n\r\n", b"areal-actors\n\xff\xff\xff\xff", b"areal-actors\n\x01\0\0\0\x80", b"ar"]
)
async def test_listener_refuses_peers_that_speak_another_protocol(bytes_, caplog):
    """After a few bytes, or when they close the connection."""
    async with listen(None, secret=SECRET) as listener:
        near, far = memory_pair()
        with anyio.fail_after(5):
            async with near, anyio.create_task_group() as tasks:
                tasks.start_soon(listener.serve, far)
                await near.send(bytes_)
                await near.send_eof()
        assert "connection_refused" in caplog.text
        assert listener.peers == ()


async def test_connection_handshake_and_heartbeat_have_time_limits():
    """An introduction has its time, on both sides, and so has a connection without heartbeats."""
    limits = Limits(hello_seconds=0.05, heartbeat_seconds=0.02, silence_seconds=0.05)
    async with listen(None, secret=SECRET, limits=limits) as listener:
        near, far = memory_pair()
        with anyio.fail_after(5):
            async with near:
                await listener.serve(far)
            near, far = memory_pair()
            async with far:
                with pytest.raises(Unreachable, match="no introduction within"):
                    async with connect_stream(near, secret=SECRET, limits=limits):
                        pass
            near, far = memory_pair()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(listener.serve, far)
                async with connect_stream(near, secret=SECRET, limits=Limits(heartbeat_seconds=1000)) as peer:
                    assert "closed" in await peer.wait_closed() or "lost" in await peer.wait_closed()


async def test_listener_drops_silent_connections_for_new_ones(monkeypatch, caplog):
    """As many as there may be in the handshake do not hold up the next one until their time is over."""
    monkeypatch.setattr(transport, "_SILENT_SECONDS", 0.0)
    async with (
        listen(None, secret=SECRET, limits=Limits(hello_seconds=1000)) as listener,
        anyio.create_task_group() as tasks,
        AsyncExitStack() as stack,
    ):
        for _ in range(transport._MAX_STRANGERS):
            near, far = memory_pair()
            await stack.enter_async_context(near)
            tasks.start_soon(listener.serve, far)
        await anyio.wait_all_tasks_blocked()
        near, far = memory_pair()
        tasks.start_soon(listener.serve, far)
        with anyio.fail_after(10):
            async with connect_stream(near, secret=SECRET, node="next") as peer:
                assert peer.is_connected
        tasks.cancel_scope.cancel()

    assert 1 == caplog.text.count("it was silent")


async def test_connection_with_a_wrong_secret_is_refused_on_both_sides():
    """The connecting side notices it first, and sends no proof then."""
    async with listen(None, secret=SECRET) as listener, anyio.create_task_group() as tasks:
        near, far = memory_pair()
        tasks.start_soon(listener.serve, far)
        with anyio.fail_after(5), pytest.raises(Unreachable, match="does not know the secret"):
            async with connect_stream(near, secret=b"another one of some length"):
                pass


@pytest.mark.parametrize(
    ("address", "complaint"),
    [
        ("tcp://0.0.0.0:0", "names every interface"),
        ("tcp://[::]:0", "names every interface"),
        ("tcp://:0", "neither unix:PATH nor"),
        ("http://localhost:1", "neither unix:PATH nor"),
        ("unix:relative.sock", "absolute path"),
        ("tcp://localhost:99999999", "cannot be read"),
    ],
)
async def test_listen_refuses_invalid_addresses(address, complaint):
    """Before anything is bound."""
    with pytest.raises(ConfigError, match=complaint):
        async with listen(address, secret=SECRET):
            pass


async def test_listen_refuses_unsafe_directories_and_secrets(tmp_path):
    """A directory that other users can enter, a short secret, a path in use."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o755)
    with pytest.raises(ConfigError, match="others can enter"):
        async with listen(f"unix:{shared}/x.sock", secret=SECRET):
            pass
    with pytest.raises(ConfigError, match="has 5 bytes; give at least 16"):
        async with listen(None, secret=b"short"):
            pass
    async with listen(f"unix:{tmp_path}/own/x.sock", secret=SECRET) as listener:
        with pytest.raises(ActorError, match="another process already listens at"):
            async with listen(listener.address, secret=SECRET):
                pass
    with pytest.raises(Unreachable, match="no answer at"):
        async with connect(listener.address, secret=SECRET):
            pass


CHILD = """
import os, sys, anyio
sys.path.insert(0, sys.argv[2])
from echo_actor import EchoActor, SECRET
from areal_actors.kernel import ActorSystem
from areal_actors.kernel.remote import listen

async def main():
    async with ActorSystem.open() as system:
        ref = await system.spawn(EchoActor())
        async with listen(sys.argv[1], secret=SECRET, expose={"desk": ref}, node="child"):
            print("listening", flush=True)
            await anyio.sleep_forever()

anyio.run(main)
"""


async def test_connection_notices_a_killed_process_at_once(tmp_path):
    """Its askers and watchers learn it from the socket, long before a heartbeat is missed."""
    address = f"unix:{tmp_path}/own/child.sock"
    with subprocess.Popen(  # noqa: ASYNC220 - no waiting, and it is killed behind our back
        [sys.executable, "-c", CHILD, address, str(Path(__file__).parent)],
        stdout=subprocess.PIPE,
        env=os.environ.copy(),
    ) as child:
        try:
            assert child.stdout is not None
            assert await anyio.to_thread.run_sync(child.stdout.readline) == b"listening\n"
            with anyio.fail_after(20):
                async with ActorSystem.open() as system, connect(address, secret=SECRET) as peer:
                    desk = peer.ref(Echoing, "desk")
                    assert peer.node == "child"
                    assert await desk.ask(Echo(value=[1, 2])) == [1, 2]
                    async with desk.stream(Numbers(n=100), buffer_size=3) as items:
                        assert list(range(100)) == [item async for item in items]

                    async def ask() -> None:
                        with pytest.raises(Unreachable) as caught:
                            await desk.ask(Wait())
                        assert caught.value.sent

                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(ask)
                        await anyio.lowlevel.checkpoint()
                        assert await desk.ask(Echo()) == 1
                        os.kill(child.pid, signal.SIGKILL)
                        assert (await system.watch(desk)).reason is DownReason.UNREACHABLE
        finally:
            child.kill()
