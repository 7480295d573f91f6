"""Actors of tests in a process of their own: ``python -m tests.kernel.processes PATH BACKEND`` hosts them.

A test's ``ActorSystem.open`` opens a second system over there, and its ``spawn`` spawns there. That an actor goes over
by pickle is between a test and a process that it started itself; what the two say to each other is not pickled.

Tests look into their actors. So that they can, what an actor over there has noted is copied into the test's own
instance after each ask, tell and stream, and whenever the test waits until all is quiet. Time runs ``SPEED`` times as
fast.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import selectors
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
from attrs import evolve, frozen

from areal_actors.kernel import Actor, ActorSystem, Context, Message, Ref
from areal_actors.kernel.ref import ActorStatistics
from areal_actors.kernel.remote import Limits, Listener, Peer, connect, listen
from areal_actors.kernel.remote.peer import RemoteRef

SECRET = b"a secret of a test and its process"
SPEED = 20
"""Of the clocks in both processes."""

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


class Hosts:
    """Address of who opens systems in the other process."""


@frozen(kw_only=True)
class Open(Message[Hosts, str]):
    """Open a system; the address where its actors are reached."""

    options: bytes


@frozen(kw_only=True)
class Spawn(Message[Hosts, str]):
    """Spawn an actor in a system; its name."""

    address: str
    arguments: bytes


@frozen(kw_only=True)
class Look(Message[Hosts, bytes]):
    """Look into an actor, where it is, once all is quiet there (``is_quiet``)."""

    address: str
    name: str
    is_quiet: bool = False


@frozen(kw_only=True)
class Learn(Message[Hosts, None]):
    """Take over the errors that the actors of a module are to raise."""

    module: str
    faults: bytes


@frozen(kw_only=True)
class Close(Message[Hosts, None]):
    """Close a system."""

    address: str


class Host(Actor[Hosts]):
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.num_opened = 0
        self.actors: dict[tuple[str, str], tuple[Actor[Any], Ref[Any]]] = {}
        self.systems: dict[str, tuple[ActorSystem, Listener, anyio.Event]] = {}
        self.context: Context

    @asynccontextmanager
    async def lifespan(self, context: Context) -> AsyncIterator[None]:
        self.context = context
        yield

    @Open.handler
    async def open(self, message: Open) -> str:
        self.num_opened += 1
        address = f"unix:{self.directory}/{self.num_opened}.sock"
        opened = anyio.Event()
        self.context.tasks.start_soon(self.keep, address, pickle.loads(message.options), opened)
        await opened.wait()
        return address

    @Spawn.handler
    async def spawn(self, message: Spawn) -> str:
        system, listener, _ = self.systems[message.address]
        actor, options = pickle.loads(message.arguments)
        ref = await system.spawn(actor, **options)
        listener.expose(ref.name, ref)
        self.actors[message.address, ref.name] = actor, ref
        return ref.name

    @Look.handler(concurrency=100)
    async def look(self, message: Look) -> bytes:
        if message.is_quiet:
            await anyio.wait_all_tasks_blocked()
        actor, ref = self.actors[message.address, message.name]
        noted = {name: value for name, value in vars(actor).items() if is_plain(value)}
        return pickle.dumps((noted, ref.statistics()))

    @Learn.handler
    async def learn(self, message: Learn) -> None:
        sys.modules[message.module].FAULTS[:] = pickle.loads(message.faults)

    @Close.handler
    async def close(self, message: Close) -> None:
        self.systems.pop(message.address)[2].set()

    async def keep(self, address: str, options: dict[str, Any], opened: anyio.Event) -> None:
        over = anyio.Event()
        try:
            async with (
                ActorSystem.open(**options) as system,
                listen(address, secret=SECRET, limits=PATIENT) as listener,
            ):
                self.systems[address] = (system, listener, over)
                opened.set()
                await over.wait()
                await system.stop(grace=0)
        except Exception as error:  # noqa: BLE001 - what a test does to its actors must not reach the next test
            sys.stderr.write(f"{address}: {error!r}\n")


async def serve(path: str) -> None:
    async with ActorSystem.open() as system:
        host = await system.spawn(Host(Path(path).parent))
        async with listen(f"unix:{path}", secret=SECRET, expose={"host": host}, limits=PATIENT):
            print("listening", flush=True)  # noqa: T201 - the line that is waited for
            await anyio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)


def start(path: Path, backend: str) -> subprocess.Popen[bytes]:
    """Start a process that ends with its standard input."""
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.kernel.processes", str(path), backend],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        cwd=Path(__file__).parents[2],
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"listening\n"
    return child


def is_plain(value: object) -> bool:
    return isinstance(value, int | float | str | None) or (
        isinstance(value, list | tuple) and all(map(is_plain, value))
    )


class ElsewhereRef(RemoteRef[Any]):
    """A ref to an actor over there. Whatever it does, the test's own instance notes what the actor has noted."""

    def __init__(self, name: str, home: Elsewhere, mirror: Actor[Any]) -> None:
        super().__init__(home.peer, name)
        self._home, self._mirror = home, mirror
        self._statistics = super().statistics()
        self.go_up(1, home.peer._refs[name].messages)
        home.peer._refs[name] = self

    async def ask(self, message: Any, *, timeout: float | None = None) -> Any:  # noqa: ASYNC109
        await self._teach(message)
        try:
            return await super().ask(message, timeout=timeout)
        finally:
            await self.look()

    async def tell(self, message: Any) -> None:
        await self._teach(message)
        await super().tell(message)
        await self.look()

    async def stop(self, **options: Any) -> None:
        try:
            await super().stop(**options)
        finally:
            await self.look()

    def stream(self, message: Any, *, buffer_size: int = 16) -> Any:
        return LookingStream(self, super().stream(message, buffer_size=buffer_size))

    def statistics(self) -> ActorStatistics:
        return self._statistics

    async def look(self, *, is_quiet: bool = False) -> None:
        """Bring the test's own instance up to date."""
        home = self._home
        if not home.peer.is_connected:
            return
        with anyio.CancelScope(shield=True):
            noted = await home.host.ask(Look(address=home.address, name=self.name, is_quiet=is_quiet))
        values, self._statistics = pickle.loads(noted)
        for name, value in values.items():
            known = getattr(self._mirror, name, None)
            if isinstance(known, list):
                known[:] = value
            else:
                setattr(self._mirror, name, value)

    async def _teach(self, message: Any) -> None:
        module = type(message).__module__
        faults = getattr(sys.modules[module], "FAULTS", None)
        if faults:
            await self._home.host.ask(Learn(module=module, faults=pickle.dumps(faults)))


class LookingStream:
    """A stream after which the test's own instance is up to date."""

    def __init__(self, ref: ElsewhereRef, stream: Any) -> None:
        self._ref, self._stream = ref, stream

    async def __aenter__(self) -> Any:
        return await self._stream.__aenter__()

    def __anext__(self) -> Any:
        return self._stream.__anext__()

    async def __aexit__(self, *error: object) -> None:
        try:
            await self._stream.__aexit__(*error)
        finally:
            await self._ref.look()


class Elsewhere:
    """One system in the other process, and the connection to it."""

    def __init__(self, host: Ref[Hosts], address: str, peer: Peer) -> None:
        self.host, self.address, self.peer = host, address, peer
        self.refs: list[ElsewhereRef] = []

    async def spawn(self, actor: Actor[Any], **options: Any) -> Ref[Any]:
        name = await self.host.ask(Spawn(address=self.address, arguments=pickle.dumps((actor, options))))
        await self.peer.wait_exposed(name)
        ref = ElsewhereRef(name, self, actor)
        self.refs.append(ref)
        await ref.look()
        return ref

    async def wait_until_quiet(self) -> None:
        """Both here and there, whatever is still on its way between the two."""
        for _ in range(3):
            await anyio.wait_all_tasks_blocked()
            for ref in self.refs:
                await ref.look(is_quiet=True)


@asynccontextmanager
async def elsewhere(path: Path, options: dict[str, Any]) -> AsyncIterator[Elsewhere]:
    """A system over there, while the block lasts."""
    limits = evolve(PATIENT, cleanup_seconds=options.get("cleanup_seconds", 5.0))
    async with connect(f"unix:{path}", secret=SECRET, limits=PATIENT) as control:
        host = control.ref(Hosts, "host")
        address = await host.ask(Open(options=pickle.dumps(options)))
        try:
            async with connect(address, secret=SECRET, limits=limits) as peer:
                yield Elsewhere(host, address, peer)
        finally:
            with anyio.CancelScope(shield=True, deadline=anyio.current_time() + 5 * SPEED):
                await host.ask(Close(address=address))


if __name__ == "__main__":
    name, options = fast_backend(sys.argv[2])
    anyio.run(serve, sys.argv[1], backend=name, backend_options=options)
