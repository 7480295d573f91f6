"""The cell: runs the task of one actor, from its first incarnation to its last.

::

    run ─┬─▶ incarnate: task group ▸ lifespan ▸ serve (messages, one by one or in tasks) ──▶ stopped
         │        │ crash
         └── back-off ◀── supervision ──▶ Stop: gone │ Escalate: the error leaves the system's task group

The nesting of scopes makes the shutdown orderly. The scope ``life`` surrounds the lifespan; it is shielded, with a
deadline, only while the lifespan is left. The scope inside it (see ``_working``) surrounds the handling of messages,
and its deadline is the grace period of a stop. The task group outside both holds concurrent handlers and background
tasks, and is cancelled before the lifespan is left.

Messages are handled in ``serving``, restart decisions are made in ``supervision``, and the sender's side is in
``local``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from random import Random
from typing import TYPE_CHECKING, Any

import anyio
from attrs import define, frozen

from areal_actors.core.actor import Actor, Context
from areal_actors.core.contract import Handler, check_complete
from areal_actors.core.envelope import Ask, Frame, Phase, current_frame
from areal_actors.core.failure import root_cause
from areal_actors.core.local import LocalRef
from areal_actors.core.loops import Scope
from areal_actors.core.mailbox import Mailbox
from areal_actors.core.message import Address, AnyMessage
from areal_actors.core.serving import Serving
from areal_actors.core.statistics import ActorState, ActorStatistics
from areal_actors.core.supervision import Down, DownReason, Escalate, Restart, RestartHistory, Supervision
from areal_actors.core.watching import Watched
from areal_actors.errors import ActorStopped, ConfigError, ProtocolError

if TYPE_CHECKING:
    from areal_actors.core.system import ActorSystem

__all__ = ["Blueprint", "Cell", "Counters"]

logger = logging.getLogger(__name__)


@frozen(kw_only=True, eq=False)
class Blueprint:
    """The first instance of an actor, the factory of the following ones, its supervision and its mailbox size."""

    name: str
    first: Actor[Any]
    create: Callable[[], Actor[Any]] | None
    supervision: Supervision
    mailbox_size: int

    def __attrs_post_init__(self) -> None:
        # Checked at spawn and not at class creation, because messages may be defined after the actor's class.
        check_complete(type(self.first), self.first.handlers)
        if isinstance(self.supervision, Restart) and self.create is None:
            kind = type(self.first).__name__
            raise ConfigError(
                f"actor {self.name!r} is to be restarted, which needs fresh state: "
                f"spawn a factory (lambda: {kind}(...)) instead of an instance"
            )

    def recreate(self) -> Actor[Any]:
        """Create the instance, with fresh state, for the next incarnation.

        Raises:
            ProtocolError: the factory returned an instance of a different class than at first.
        """
        actor = self.first if self.create is None else self.create()
        if type(actor) is not type(self.first):
            raise ProtocolError(
                f"the factory of actor {self.name!r} made a {type(self.first).__name__} first and a "
                f"{type(actor).__name__} at its restart; it must always make the same class"
            )
        return actor


@define
class Counters:
    """Counts of the messages that an actor has handled, failed, cancelled and dropped since its first start."""

    handled: int = 0
    failed: int = 0
    cancelled: int = 0
    dropped: int = 0


class Cell(Watched):
    """The runtime of one actor across its incarnations. Internal to the kernel: all other code holds a ref."""

    def __init__(self, system: ActorSystem, blueprint: Blueprint, random: Random) -> None:
        super().__init__()
        self.system = system
        self.name = blueprint.name
        self.blueprint = blueprint
        self.incarnation = 0
        self.state = ActorState.STARTING
        self.handlers: dict[type[AnyMessage[Any]], Handler] = blueprint.first.handlers
        # Functions of serial handlers by message class: one look-up per message on the fast path of ``Serving``.
        self.serial: dict[type, Callable[[Any, Any], Awaitable[Any]]] = {
            message: handler.function
            for message, handler in self.handlers.items()
            if handler.concurrency == 1 and not handler.is_stream
        }
        self.mailbox = Mailbox(blueprint.mailbox_size)
        self.counters = Counters()
        self.frame = Frame(self)
        self.occupying: Frame = self.frame
        self.born, self.gone = anyio.Event(), anyio.Event()
        self.birth_error: Exception | None = None
        self.loop = system.loop
        self.ref: LocalRef[Any] = LocalRef(self, Address(node=system.name, name=self.name))
        policy = blueprint.supervision
        self._history = RestartHistory(policy, random) if isinstance(policy, Restart) else None
        self.serving: Serving | None = None
        self._scope: Scope | None = None
        self._stopping = anyio.Event()
        self._stop_deadline = math.inf
        self._crash: Exception | None = None

    @property
    def cleanup_seconds(self) -> float:
        """Time limit, in seconds, of shielded clean-up when the actor ends."""
        return self.system.cleanup_seconds

    def occupant(self) -> Frame | None:
        """Return the frame that keeps the loop from taking the next message; ``None`` while the loop is idle."""
        return self.occupying if self.mailbox.wake is None else None

    # ------------------------------------------------------------------------------------------------ incarnations

    async def run(self) -> None:
        """Run the actor, with restarts after crashes, until it is stopped, its policy gives up or it is cancelled."""
        current_frame.set(self.frame)
        error: Exception | None = None
        try:
            while (error := await self._incarnate()) is not None:
                delay = self._restart_delay()
                if delay is None:
                    break
                self._report_down(DownReason.CRASHED, error, is_restarting=True)
                if not await self._back_off(delay, error):
                    error = None
                    break
        finally:
            self._bury(error)
        # Raised inside the system's task group, which thereby cancels all other actors.
        if error is not None and self._is_escalating():
            raise error

    async def _incarnate(self) -> Exception | None:
        """Run one incarnation. Return the error that crashed it, or ``None`` if it was stopped or failed to start.

        An error at the first start is stored in ``birth_error``, so that ``spawn`` raises it.
        """
        self.incarnation += 1
        self._crash = None
        try:
            await self._live(self.blueprint.first if self.incarnation == 1 else self.blueprint.recreate())
        except Exception as error:  # noqa: BLE001 - whatever it is, the supervision policy is its handler
            cause = self._crash or root_cause(error)
            crash = cause if isinstance(cause, Exception) else error
            if not self.born.is_set():
                self.birth_error = crash
            elif not self._follows_from_the_end(crash):
                return crash
        return None

    def _follows_from_the_end(self, crash: Exception) -> bool:
        """Return whether ``crash`` is an ``ActorStopped`` while this actor or the system is stopping too."""
        return isinstance(crash, ActorStopped) and (self.mailbox.closed or self.system.is_closing)

    async def _live(self, actor: Actor[Any]) -> None:
        async with anyio.create_task_group() as tasks:
            serving = self.serving = Serving(self, actor, tasks)
            # The deadline bounds the entry of the lifespan: a stop during the start cancels it when the grace period
            # ends.
            with self.loop.new_scope(deadline=self._stop_deadline) as life:
                self._scope = life
                async with _lifespan_of(actor, Context(self, self.incarnation)), self._working(life, serving):
                    self.state = ActorState.STOPPING if self.mailbox.closed else ActorState.RUNNING
                    self.born.set()
                    await serving.serve()
            # A lifespan that was cut off before its ``yield`` may have started background tasks already.
            tasks.cancel_scope.cancel()
            if life.cancelled_caught and self.born.is_set():
                logger.warning("actor %r did not end within %s s and was cut off", self.name, self.cleanup_seconds)
        if self._crash is not None:
            # Without this, an async context manager that suppresses the exception would turn a crash into a normal
            # stop.
            raise self._crash  # a lifespan sees the error, but must not swallow it
        if not self.born.is_set():
            raise ActorStopped(f"actor {self.name!r} was stopped before its lifespan was entered")

    @asynccontextmanager
    async def _working(self, life: Scope, serving: Serving) -> AsyncIterator[None]:
        """Surround the handling of messages; afterwards end every task, shielded, before the lifespan is left."""
        try:
            with self.loop.new_scope(deadline=self._stop_deadline) as self._scope:
                life.deadline = math.inf
                yield
        except Exception as error:
            self._crash = error
            raise
        finally:
            self._scope = None
            self.occupying = self.frame
            # The shield protects the clean-up from the system's cancellation; the deadline keeps it from blocking the
            # shutdown.
            life.deadline = self.loop.now() + self.cleanup_seconds
            life.shield = True
            await serving.end_tasks()

    # ------------------------------------------------------------------------------------------------ the end

    def request_stop(self, grace: float | None) -> None:
        """Close the mailbox and let the actor end within ``grace`` seconds (``None``: the system's default).

        Idempotent. Repeated calls can only shorten the deadline.
        """
        deadline = self.loop.now() + (self.system.grace if grace is None else grace)
        # A later stop with a shorter grace period still counts.
        self._stop_deadline = min(self._stop_deadline, deadline)
        if self._scope is not None:
            self._scope.deadline = min(self._scope.deadline, self._stop_deadline)
        if not self.mailbox.closed:
            if self.state is ActorState.RUNNING:
                self.state = ActorState.STOPPING
            self._stopping.set()
            self.mailbox.close()

    def abandon(self, ask: Ask) -> None:
        """Discard ``ask`` if it is queued, or cancel its handler if it runs, because its asker no longer waits."""
        if ask.phase is Phase.QUEUED:
            self.mailbox.discard(ask)
            self.counters.cancelled += 1
            ask.fail(ActorStopped("the asker left"))
        elif ask.phase is Phase.RUNNING and ask.scope is not None:
            ask.scope.cancel()

    def _restart_delay(self) -> float | None:
        if self._history is None or self.mailbox.closed:
            return None
        return self._history.next_delay(self.loop.now())

    def _is_escalating(self) -> bool:
        policy = self.blueprint.supervision
        return isinstance(policy.then if isinstance(policy, Restart) else policy, Escalate)

    async def _back_off(self, delay: float, error: Exception) -> bool:
        """Wait ``delay`` seconds before a restart. Return ``False`` if a stop was requested meanwhile."""
        self.state = ActorState.RESTARTING
        logger.warning("actor %r crashed and restarts in %.2f s", self.name, delay, exc_info=error)
        with anyio.move_on_after(delay):
            await self._stopping.wait()
        self.state = ActorState.STARTING
        return not self._stopping.is_set()

    def _bury(self, error: Exception | None) -> None:
        self.mailbox.close()
        self.state = ActorState.STOPPED if error is None else ActorState.CRASHED
        dropped = [entry for entry in self.mailbox.drain() if not self._fail_queued(entry)]
        self.counters.dropped += len(dropped)
        if dropped:
            logger.warning("actor %r ended with %d told messages unhandled", self.name, len(dropped))
        if error is not None and not self._is_escalating():
            logger.error("actor %r crashed", self.name, exc_info=error)
        reason = DownReason.STOPPED if error is None else DownReason.CRASHED
        # The order matters: watchers are notified before the name becomes free and before ``stop`` returns.
        self.last_words = self._report_down(reason, error, is_restarting=False)
        self.system.forget(self)
        self.born.set()
        self.gone.set()

    def _fail_queued(self, entry: object) -> bool:
        """Fail an ask that was never handled.

        Return ``True`` if ``entry`` need not be counted as dropped (an ask or a ``Down``).
        """
        if isinstance(entry, Ask):
            entry.fail(ActorStopped(f"actor {self.name!r} ended before it came to {entry.handler.message.__name__}"))
        return isinstance(entry, (Ask, Down))

    # ------------------------------------------------------------------------------------------------ watching

    def hear(self, down: Down) -> None:
        """Queue the ``Down`` of an actor that this actor watches."""
        if not self.mailbox.closed:
            self.mailbox.push_control(down)

    def _report_down(self, reason: DownReason, error: Exception | None, *, is_restarting: bool) -> Down:
        down = Down(
            ref=self.ref,
            incarnation=self.incarnation,
            reason=reason,
            error=None if error is None else f"{type(error).__name__}: {error}",
            is_restarting=is_restarting,
        )
        self.report(down)
        return down

    # ------------------------------------------------------------------------------------------------ tasks, statistics

    def start_background(self, function: Callable[[], Awaitable[Any]], name: str) -> None:
        """Run ``function`` in the background of the present incarnation."""
        assert self.serving is not None, "a context exists only within an incarnation"
        self.serving.start_background(function, name)

    def statistics(self) -> ActorStatistics:
        """Return a snapshot of the actor's statistics."""
        mailbox, counters = self.mailbox, self.counters
        # The loop sets ``wake`` only while it sleeps.
        is_busy = mailbox.wake is None and self.state in (ActorState.RUNNING, ActorState.STOPPING)
        return ActorStatistics(
            name=self.name,
            state=self.state,
            incarnation=self.incarnation,
            num_queued=len(mailbox),
            num_parked=mailbox.num_parked,
            num_waiting_senders=len(mailbox.senders),
            num_running=is_busy + (0 if self.serving is None else self.serving.num_concurrent),
            mailbox_size=mailbox.bound,
            num_handled=counters.handled,
            num_failed=counters.failed,
            num_cancelled=counters.cancelled,
            num_dropped=counters.dropped,
            mailbox_peak=mailbox.peak,
        )


def _lifespan_of(actor: Actor[Any], context: Context) -> AbstractAsyncContextManager[None]:
    manager = actor.lifespan(context)
    if not isinstance(manager, AbstractAsyncContextManager):
        raise ProtocolError(f"{type(actor).__name__}.lifespan must be decorated with @asynccontextmanager")
    return manager
