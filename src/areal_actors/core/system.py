"""The system: a task group inside the user's event loop, with actors in it.

``async with ActorSystem.open() as system`` is the whole of it: no global state, no thread, no signal handler. Leaving
the block stops the actors, last one first; an exception in the block, or a crash that escalates, cancels them.

What leaves the block is flattened: the block's own exception as it is, otherwise one group of plain exceptions whose
message names the root cause. Hosting for frameworks whose hooks run in different tasks is in ``hosting``, the entrance
for threads in ``portal``.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from random import Random
from typing import Any, TypeVar, cast

import anyio
from anyio.abc import TaskGroup
from anyio.from_thread import BlockingPortal

from areal_actors.core.actor import Actor
from areal_actors.core.cell import Blueprint, Cell
from areal_actors.core.failure import leaves, root_cause
from areal_actors.core.hosting import Host
from areal_actors.core.local import LocalRef
from areal_actors.core.loops import running_loop
from areal_actors.core.message import Address
from areal_actors.core.portal import Portal
from areal_actors.core.ref import Ref
from areal_actors.core.statistics import SystemStatistics
from areal_actors.core.supervision import Down, Escalate, Supervision
from areal_actors.errors import ActorError, ActorStopped, ConfigError

__all__ = ["ActorSystem"]

P = TypeVar("P")


class ActorSystem:
    """Actors that live and end together. Made by ``open`` or ``start_hosted``."""

    def __init__(self, *, name: str, grace: float, cleanup_seconds: float, random: Random) -> None:
        self.name = name
        self.grace = grace
        self.cleanup_seconds = cleanup_seconds
        self._random = random
        self._cells: dict[str, Cell] = {}
        self._tasks: TaskGroup | None = None
        self._portal: BlockingPortal | None = None
        self.loop = running_loop()
        self.host: Host[ActorSystem] | None = None
        self.is_closing = False

    @classmethod
    @asynccontextmanager
    async def open(
        cls, *, name: str = "local", grace: float = 5.0, cleanup_seconds: float = 5.0, random: Random | None = None
    ) -> AsyncIterator[ActorSystem]:
        """Open a system for the length of a block.

        Args:
            name: names the node in addresses.
            grace: seconds that all actors together may use to handle what they had accepted when the block ends.
            cleanup_seconds: seconds that a shielded clean-up (leaving a lifespan, ending a stream) may take.
            random: source of the jitter in restart back-offs.

        Raises:
            ExceptionGroup: an actor crashed and escalated; the group's message names the root cause, which comes first.
        """
        system = cls(name=name, grace=grace, cleanup_seconds=cleanup_seconds, random=random or Random())  # noqa: S311
        body: list[BaseException] = []
        with _flattened(body):
            async with anyio.create_task_group() as system._tasks, BlockingPortal() as system._portal:
                try:
                    yield system
                    await system.stop()
                except BaseException as error:
                    body.append(error)
                    system._tasks.cancel_scope.cancel()
                    raise
                finally:
                    system.is_closing = True

    @classmethod
    async def start_hosted(
        cls, *, name: str = "local", grace: float = 5.0, cleanup_seconds: float = 5.0, random: Random | None = None
    ) -> ActorSystem:
        """Open a system in an owner task of its own, to be ended by ``aclose()`` from any task.

        For frameworks whose start and stop hooks run in different tasks; prefer ``open`` elsewhere. Arguments as there.
        """
        host = Host(lambda: cls.open(name=name, grace=grace, cleanup_seconds=cleanup_seconds, random=random))
        system = await host.start()
        system.host = host
        return system

    async def aclose(self) -> None:
        """End a hosted system, as leaving the block ends an opened one; twice is fine.

        Raises:
            ExceptionGroup: an actor had crashed and escalated.
            ActorError: the system was opened by a block, which alone can end it.
        """
        if self.host is None:
            raise ActorError(f"system {self.name!r} was opened by 'async with', and ends where that block ends")
        await self.host.aclose()

    async def spawn(
        self,
        actor: Actor[P] | Callable[[], Actor[P]],
        *,
        name: str | None = None,
        supervision: Supervision | None = None,
        mailbox_size: int = 1024,
    ) -> Ref[P]:
        """Start an actor; returns once its lifespan is entered.

        Args:
            actor: an instance, or a factory without arguments (which ``Restart`` needs, for fresh state).
            name: unique among the living; by default the class name in snake case, numbered if it is taken.
            supervision: what a crash leads to; by default ``Escalate``.
            mailbox_size: bound of the mailbox, in messages.

        Raises:
            ProtocolError: the actor does not handle every message of its protocols.
            ConfigError: ``Restart`` with an instance.
            ActorError: the name is taken.
            ActorStopped: the system is closing.
            Exception: what the factory or the lifespan raised.
        """
        if self._tasks is None or self.is_closing:
            raise ActorStopped(f"system {self.name!r} is not open; spawn actors inside 'async with ActorSystem.open()'")
        first, create = (actor, None) if isinstance(actor, Actor) else (actor(), actor)
        if mailbox_size < 1:
            raise ConfigError(f"mailbox_size is {mailbox_size}; a mailbox must hold at least 1 message")
        blueprint = Blueprint(
            name=self._free_name(name, type(first)),
            first=first,
            create=create,
            supervision=supervision or Escalate(),
            mailbox_size=mailbox_size,
        )
        cell = self._cells[blueprint.name] = Cell(self, blueprint, self._random)
        self._tasks.start_soon(cell.run, name=f"actor {cell.name}")
        await self._birth_of(cell)
        return cast("Ref[P]", cell.ref)

    async def watch(self, ref: Ref[Any]) -> Down:
        """Wait until the present incarnation of ``ref`` is gone, and say why; at once if the actor is gone already.

        Actors watch through ``Context.watch`` instead.
        """
        life = ref.life
        news: list[Down] = []
        arrived = anyio.Event()

        def note(down: Down) -> None:
            news.append(down)
            arrived.set()

        life.watch(note)
        try:
            await arrived.wait()
        finally:
            life.unwatch(note)
        return news[0]

    async def stop(self, *, grace: float | None = None) -> None:
        """Stop every actor, last one first, within ``grace`` seconds in all; no actor can be spawned afterwards."""
        self.is_closing = True
        deadline = anyio.current_time() + (self.grace if grace is None else grace)
        while self._cells:
            cell = next(reversed(self._cells.values()))
            await cell.ref.stop(grace=max(deadline - anyio.current_time(), 0.0))

    def portal(self) -> Portal:
        """The entrance for threads and synchronous code: ``with system.portal() as portal: portal.ask(ref, ...)``."""
        return Portal(self._portal, self.name)

    def resolve(self, address: Address) -> Ref[Any]:
        """The ref of a living actor of this system.

        Raises:
            ActorStopped: there is no such actor (any more).
        """
        cell = self._cells.get(address.name) if address.node == self.name else None
        if cell is None:
            raise ActorStopped(f"no actor {address.name!r} lives on {address.node!r}, seen from system {self.name!r}")
        return cell.ref

    def statistics(self) -> SystemStatistics:
        """Figures of every living actor."""
        return SystemStatistics(name=self.name, actors=tuple(cell.statistics() for cell in self._cells.values()))

    def cell_of(self, ref: Ref[Any]) -> Cell:
        """The cell behind a ref of this process."""
        if not isinstance(ref, LocalRef):
            raise ActorError(f"{ref!r} does not live in this process")
        return ref.cell

    def forget(self, cell: Cell) -> None:
        """Called by a cell at its end; its name is free again."""
        if self._cells.get(cell.name) is cell:
            del self._cells[cell.name]

    async def _birth_of(self, cell: Cell) -> None:
        try:
            await cell.born.wait()
        except BaseException:
            cell.request_stop(0)
            raise
        if cell.birth_error is not None:
            raise cell.birth_error

    def _free_name(self, wish: str | None, kind: type) -> str:
        if wish is not None:
            if wish in self._cells:
                raise ActorError(f"an actor named {wish!r} lives in system {self.name!r} already; choose another name")
            return wish
        base = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", kind.__name__).lower()
        number, name = 1, base
        while name in self._cells:
            number, name = number + 1, f"{base}-{number + 1}"
        return name


@contextmanager
def _flattened(body: list[BaseException]) -> Iterator[None]:
    """Raise the block's own exception as it is, anything else as one flat group that names its root cause."""
    try:
        yield
    except BaseExceptionGroup as group:
        own = body[0] if body else None
        others = [leaf for leaf in leaves(group) if own is None or leaf not in tuple(leaves(own))]
        if own is not None and not others:
            raise own from own.__cause__
        cause = root_cause(group)
        if not isinstance(cause, Exception):
            raise cause from None
        # That others found the actor stopped follows from its crash, and would only hide it.
        rest = [leaf for leaf in leaves(group) if leaf is not cause and not isinstance(leaf, ActorStopped)]
        where = "".join(f" ({note})" for note in getattr(cause, "__notes__", ()))
        raise BaseExceptionGroup(f"{type(cause).__name__}: {cause}{where}", [cause, *rest]) from None
