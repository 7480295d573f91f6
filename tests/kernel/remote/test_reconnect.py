"""Refs that stand while the actors behind them come and go."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio import wait_all_tasks_blocked
from tests.kernel.remote.echo_actor import (
    SECRET,
    EchoActor,
    Echoing,
    Foreign,
    Note,
    Numbers,
    Other,
    Wait,
    WhoAreYou,
)

from areal_actors.errors import (
    ActorStopped,
    ConfigError,
    DeadlineExceeded,
    NotFound,
    ProtocolError,
    Unreachable,
)
from areal_actors.kernel import ActorSystem, Down, DownReason
from areal_actors.kernel.remote import Limits, ReconnectingConnection, connect, listen, reconnecting

pytestmark = pytest.mark.anyio

LIMITS = Limits(redial_seconds=0.001, max_redial_seconds=0.01)


class Host(EchoActor):
    """An actor that handles nothing else while it waits."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.num_waits = 0
        self.notes: list[str] = []

    @Wait.handler
    async def wait(self, message: Wait) -> None:
        self.num_waits += 1
        await self.go.wait()

    @Note.handler
    async def note(self, message: Note) -> None:
        self.notes.append(message.text)


class World:
    """A directory of one worker, and the lives of it."""

    def __init__(self, system: ActorSystem, path: Path) -> None:
        self.system, self.path = system, path
        self.address: str | None = None
        self.num_lives = 0
        self.num_located = 0

    async def locate(self) -> str:
        self.num_located += 1
        if self.address is None:
            raise NotFound("the worker has no home now")
        return self.address

    @asynccontextmanager
    async def life(self, name: str, **options: Any) -> AsyncIterator[Host]:
        """The worker lives at a new place while the block lasts."""
        self.num_lives += 1
        options = {"node": "worker", "incarnation": self.num_lives} | options
        actor = Host(name)
        self.ref = ref = await self.system.spawn(actor, mailbox_size=1)
        address = f"unix:{self.path}/own/{self.num_lives}.sock"
        async with listen(address, secret=SECRET, expose={"desk": ref}, **options):
            self.address = address
            yield actor
            self.address = None

    def line(self, **options: Any) -> Any:
        return reconnecting(self.locate, secret=SECRET, target="worker", limits=LIMITS, **options)


@asynccontextmanager
async def opened(path: Path) -> AsyncIterator[World]:
    with anyio.fail_after(20):
        async with ActorSystem.open() as system:
            yield World(system, path)


async def test_reconnect_ref_reaches_the_next_incarnation(tmp_path):
    """Each ask reaches the present incarnation, at another address."""
    async with opened(tmp_path) as world, world.line() as line:
        desk, same = line.ref(Echoing, "desk"), line.ref(Echoing, "desk")
        for name in ("first", "second"):
            async with world.life(name):
                assert await desk.ask(WhoAreYou()) == name
                assert await desk.ask(WhoAreYou(), timeout=10) == name
                assert world.num_lives == (await line.wait_connected()).incarnation
                async with desk.stream(Numbers(n=40), buffer_size=2) as items:
                    assert list(range(40)) == [item async for item in items]

        assert desk is same
        assert ("worker", "desk") == (desk.address.node, desk.address.name)


async def test_reconnect_messages_wait_for_the_connection(tmp_path):
    """Asks, tells and streams."""
    answers: list[str] = []
    async with opened(tmp_path) as world, world.line() as line:
        desk = line.ref(Echoing, "desk")

        async def ask() -> None:
            answers.append(await desk.ask(WhoAreYou()))

        async def count() -> None:
            async with desk.stream(Numbers(n=3)) as items:
                answers.extend([str(item) async for item in items])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            tasks.start_soon(count)
            tasks.start_soon(desk.tell, Note(text="hello"))
            with pytest.raises(ValueError, match="buffer_size=-1"):
                desk.stream(Numbers(n=1), buffer_size=-1)
            assert not line.is_connected
            async with world.life("awaited") as actor:
                while len(answers) < 4 or not actor.notes:
                    await anyio.lowlevel.checkpoint()

    assert {"awaited", "0", "1", "2"} == set(answers)
    assert ["hello"] == actor.notes


async def test_reconnect_waits_until_the_deadline_of_the_ask(tmp_path):
    """The error says why there is no line, and that nothing was sent."""
    async with opened(tmp_path) as world, world.line() as line:
        desk = line.ref(Echoing, "desk")
        while not world.num_located:
            await anyio.lowlevel.checkpoint()
        await wait_all_tasks_blocked()
        with pytest.raises(DeadlineExceeded, match=r"WhoAreYou .* was not sent .* no home now"):
            await desk.ask(WhoAreYou(), timeout=0.01)
        with anyio.move_on_after(0.01) as scope:
            await desk.ask(WhoAreYou())
        assert scope.cancelled_caught
        async with world.life("busy"):
            with pytest.raises(DeadlineExceeded, match="the actor had it"):
                await desk.ask(Wait(), timeout=0.2)


async def test_reconnect_never_sends_a_message_twice(tmp_path):
    """The asker of a message that may have been handled learns it; the next message goes to the next incarnation."""
    outcomes: list[bool] = []
    async with opened(tmp_path) as world, world.line() as line:
        desk = line.ref(Echoing, "desk")

        async def ask() -> None:
            with pytest.raises(Unreachable) as caught:
                await desk.ask(Wait())
            outcomes.append(caught.value.sent)

        async with anyio.create_task_group() as tasks, world.life("first") as first:
            tasks.start_soon(ask)
            while not first.num_waits:
                await anyio.lowlevel.checkpoint()
            (await line.wait_connected()).close("the worker is elsewhere")
            assert not line.is_connected
            world.address = None
            async with world.life("second") as second:
                assert await desk.ask(WhoAreYou()) == "second"

    assert [True] == outcomes
    assert (1, 0) == (first.num_waits, second.num_waits)


async def test_reconnect_reports_each_loss_to_watchers(tmp_path):
    """As the end of an incarnation that is followed by another; that of the line is the last one."""
    heard: list[Down] = []
    async with opened(tmp_path) as world:
        async with world.line() as line:
            desk = line.ref(Echoing, "desk")
            desk.watch(heard.append)
            for _ in range(2):
                async with world.life("x"):
                    await desk.ask(WhoAreYou())
                while line.is_connected:
                    await anyio.lowlevel.checkpoint()
            async with world.life("y"):
                await world.ref.stop()
                await wait_all_tasks_blocked()
                with pytest.raises(ActorStopped, match="takes no more messages"):
                    await desk.ask(WhoAreYou())
            while line.is_connected:
                await anyio.lowlevel.checkpoint()
        lost, stopped = DownReason.UNREACHABLE, DownReason.STOPPED
        assert [(lost, True), (lost, True), (stopped, False), (lost, True), (lost, False)] == [
            (down.reason, down.is_restarting) for down in heard
        ]
        assert all(down.ref is desk for down in heard)
        late: list[Down] = []
        desk.watch(late.append)
        assert heard[-1:] == late
        assert line.ref(Echoing, "late").watch(late.append) is None
        assert len(late) == 2
        with pytest.raises(Unreachable, match="the connection to 'worker' is closed"):
            await desk.ask(WhoAreYou())


async def test_reconnect_close_ends_waiting_asks(tmp_path):
    """They are outside, and the line will not come back."""
    async with opened(tmp_path) as world, anyio.create_task_group() as tasks:
        lines: list[ReconnectingConnection] = []

        async def ask() -> None:
            with pytest.raises(Unreachable, match="is closed"):
                await lines[0].ref(Echoing, "desk").ask(WhoAreYou())

        async with world.line() as line:
            lines.append(line)
            tasks.start_soon(ask)
            await wait_all_tasks_blocked()


async def test_reconnect_refuses_other_nodes_and_earlier_incarnations(tmp_path, caplog):
    """A connection to another node at the address, or to an earlier incarnation, is closed."""
    async with opened(tmp_path) as world, world.line() as line:
        desk = line.ref(Echoing, "desk")
        async with world.life("impostor", node="stranger"):
            while "answers node 'stranger'" not in line.cause:
                await anyio.lowlevel.checkpoint()
        async with world.life("young", incarnation=9):
            assert await desk.ask(WhoAreYou()) == "young"
        async with world.life("old", incarnation=4):
            while "incarnation 4 is over" not in line.cause:
                await anyio.lowlevel.checkpoint()
        async with world.life("youngest", incarnation=10):
            assert await desk.ask(WhoAreYou()) == "youngest"

    assert caplog.text.count("answers node 'stranger'") == 1


async def test_reconnect_names_unknown_actors_and_messages(tmp_path):
    """An actor that the node does not have, a protocol that it does not speak, a secret that is none."""
    limits = Limits(redial_seconds=0.001, hello_seconds=0.1)
    async with opened(tmp_path) as world, world.life("x"):
        async with reconnecting(world.locate, secret=SECRET, limits=limits) as line:
            with pytest.raises(ActorStopped, match="exposes no actor 'missing'; it exposes desk"):
                await line.ref(Echoing, "missing").ask(WhoAreYou())
            with pytest.raises(ProtocolError, match="does not take Foreign"):
                await line.ref(Other, "desk").ask(Foreign())
            assert line.ref(Echoing, "desk").statistics().num_handled == 0
            assert line.ref(Echoing, "missing").statistics().mailbox_size == 0
        with pytest.raises(ConfigError, match="at least 16"):
            async with reconnecting(world.locate, secret=b"short"):
                pass


async def test_wait_exposed_ends_with_the_connection(tmp_path):
    """Waiting for what a connection exposes ends with the connection."""

    async def wait() -> None:
        with pytest.raises(Unreachable, match="actor 'missing' on 'worker' is unreachable"):
            await peer.wait_exposed("missing")

    async with (
        opened(tmp_path) as world,
        anyio.create_task_group() as tasks,
        world.life("x"),
        connect(await world.locate(), secret=SECRET) as peer,
    ):
        tasks.start_soon(wait)
        await wait_all_tasks_blocked()
