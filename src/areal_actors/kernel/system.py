"""The actor system: a task group inside the user's event loop that runs the actors.

``async with ActorSystem.open() as system`` is the only set-up: there is no global state, no thread and no signal
handler. Leaving the block stops the actors in reverse order of their start; an exception in the block, or a crash that
escalates, cancels them.

Exceptions that leave the block are flattened: the block's own exception is raised as it is, otherwise one group of
plain exceptions whose message names the root cause.

Threads reach the actors through an ``anyio.from_thread.BlockingPortal``. ``HeldContext`` (of ``lib``) holds a system
open for frameworks whose start and stop hooks run in different tasks.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from random import Random
from typing import Any, TypeVar, cast

import anyio
from anyio.abc import TaskGroup

from areal_actors.errors import ActorError, ActorStopped, ConfigError
from areal_actors.kernel.failure import root_cause
from areal_actors.kernel.ref import Down, Ref, SystemStatistics
from areal_actors.kernel.runtime import Actor, Blueprint, Cell, Runtime
from areal_actors.kernel.supervision import Escalate, Supervision
from areal_actors.lib.loops import running_loop
from areal_actors.lib.task_groups import leaves
from areal_actors.lib.telemetry import load_logging

P = TypeVar("P")


class ActorSystem(Runtime):
    """A group of actors that run in one task group. Made by ``open``."""

    def __init__(self, *, name: str, grace: float, cleanup_seconds: float, random: Random) -> None:
        self.name = name
        self.grace = grace
        self.cleanup_seconds = cleanup_seconds
        self._random = random
        self._cells: dict[str, Cell] = {}
        self._tasks: TaskGroup | None = None
        self.loop = running_loop()
        self.is_closing = False

    @classmethod
    @asynccontextmanager
    async def open(
        cls, *, name: str = "local", grace: float = 5.0, cleanup_seconds: float = 5.0, random: Random | None = None
    ) -> AsyncIterator[ActorSystem]:
        """Open a system for the duration of a block.

        Args:
            name: the name of the node in addresses.
            grace: seconds that all actors together have, when the block ends, to handle the messages they have
                accepted.
            cleanup_seconds: seconds that a shielded clean-up (leaving a lifespan, ending a stream) may take.
            random: source of the jitter in restart back-offs.

        Raises:
            ExceptionGroup: an actor crashed and escalated; the group's message names the root cause, which comes first.
        """
        # Now rather than at the first record, because a process without free descriptors can import nothing.
        load_logging()
        system = cls(name=name, grace=grace, cleanup_seconds=cleanup_seconds, random=random or Random())  # noqa: S311
        body: list[BaseException] = []
        with _flattened(body):
            async with anyio.create_task_group() as system._tasks:
                try:
                    yield system
                    await system.stop()
                except BaseException as error:
                    # An exception in the block cancels the actors instead of stopping them within the grace period.
                    body.append(error)
                    system._tasks.cancel_scope.cancel()
                    raise
                finally:
                    system.is_closing = True

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
            name: unique among the running actors; by default the class name in snake case, numbered if it is taken.
            supervision: the policy for crashes; by default ``Escalate``.
            mailbox_size: bound of the mailbox, in messages.

        Raises:
            ProtocolError: the actor does not handle every message of its protocols.
            ConfigError: ``Restart`` with an instance, or ``mailbox_size`` below 1.
            ActorError: the name is taken.
            ActorStopped: the system is closing.
            Exception: raised by the factory or the lifespan.
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
        try:
            await cell.born.wait()
        except BaseException:
            # If ``spawn`` is cancelled, do not leave a half-started actor behind.
            cell.request_stop(0)
            raise
        if cell.birth_error is not None:
            raise cell.birth_error
        return cast("Ref[P]", cell.ref)

    async def watch(self, ref: Ref[Any]) -> Down:
        """Wait until the present incarnation of ``ref`` ends, and return its ``Down``.

        If the actor has already ended, this returns at once.
        """
        news: list[Down] = []
        arrived = anyio.Event()

        def note(down: Down) -> None:
            news.append(down)
            arrived.set()

        ref.watch(note)
        try:
            await arrived.wait()
        finally:
            ref.unwatch(note)
        return news[0]

    async def stop(self, *, grace: float | None = None) -> None:
        """Stop all actors in reverse order of their start, within ``grace`` seconds in total.

        No more actors can be spawned.
        """
        self.is_closing = True
        deadline = anyio.current_time() + (self.grace if grace is None else grace)
        while self._cells:
            # Later actors may depend on earlier ones, so the last one goes first.
            cell = next(reversed(self._cells.values()))
            await cell.ref.stop(grace=max(deadline - anyio.current_time(), 0.0))

    def statistics(self) -> SystemStatistics:
        """Return the statistics of all running actors."""
        return SystemStatistics(name=self.name, actors=tuple(cell.statistics() for cell in self._cells.values()))

    def forget(self, cell: Cell) -> None:
        """Remove a cell that has ended, which frees its name. Called by the cell."""
        # The name may already belong to another actor.
        if self._cells.get(cell.name) is cell:
            del self._cells[cell.name]

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
        # Errors that report the actor as stopped follow from its crash, and would only hide the cause.
        rest = [leaf for leaf in leaves(group) if leaf is not cause and not isinstance(leaf, ActorStopped)]
        where = "".join(f" ({note})" for note in getattr(cause, "__notes__", ()))
        raise BaseExceptionGroup(f"{type(cause).__name__}: {cause}{where}", [cause, *rest]) from None
