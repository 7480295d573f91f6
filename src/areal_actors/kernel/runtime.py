"""How actors run: authors write an ``Actor``, the system gives it a ``Cell``, and callers hold a ``LocalRef``.

The file reads from top to bottom::

    Actor, Context        what authors of actors write and receive
    Frame, Ask, StreamCall  work in progress, and the graph of who waits for whom
    Cell                  one actor across its incarnations: start, crash, restart, stop
    Serving               the message loop and the tasks of one incarnation
    LocalRef              the sender's side: ask, tell, stream, stop
    Stream, produce       both ends of a stream; ``stream`` has the part that streams of other processes share

``supervision`` decides about restarts, ``mailbox`` keeps the queue, ``system`` opens and spawns, and ``remote`` carries
the same messages between processes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import ContextVar
from enum import IntEnum
from random import Random
from typing import Any, ClassVar, Generic, NoReturn, TypeVar, TypeVarTuple

import anyio
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint
from attrs import define, frozen

from areal_actors.errors import (
    ActorError,
    ActorStopped,
    ArealError,
    ConfigError,
    DeadlineExceeded,
    DeadlockError,
    MailboxFull,
    ProtocolError,
)
from areal_actors.kernel.failure import is_stray_cancellation, root_cause, transferred
from areal_actors.kernel.mailbox import Mailbox, Ticket
from areal_actors.kernel.message import (
    Address,
    AnyMessage,
    Handler,
    Message,
    StreamMessage,
    check_complete,
    collect_handlers,
)
from areal_actors.kernel.ref import ActorState, ActorStatistics, Down, DownReason, Ref, Watched
from areal_actors.kernel.stream import BufferedStream
from areal_actors.kernel.supervision import Escalate, Restart, RestartHistory, Supervision
from areal_actors.lib.loops import Loop, Scope, Signal
from areal_actors.lib.telemetry import get_logger

__all__ = ["Actor", "Ask", "BackgroundTasks", "Blueprint", "Cell", "Context", "LocalRef", "Runtime", "StreamCall"]

P = TypeVar("P")
P_contra = TypeVar("P_contra", contravariant=True)
R = TypeVar("R")
Item = TypeVar("Item")
Arguments = TypeVarTuple("Arguments")

_log = get_logger(__name__)


class Actor(Generic[P]):
    """An owner of state that is reached only by messages of the protocol ``P`` (or of several: ``Actor[A | B]``).

    An actor handles one message at a time unless a handler declares ``concurrency``. If a handler raises on an ask,
    that ask fails. If it raises on a tell, the actor crashes and its supervision policy decides what happens next.
    Handlers are methods and can be called directly in tests.

    Raises:
        ProtocolError: at class creation, for two handlers of one message or for a message of a protocol that the actor
            does not name; at spawn, for a message of the protocol without a handler.
    """

    # ``message`` recognises this class by the attribute, because it cannot import this module.
    __areal_actor_root__: ClassVar[bool] = True
    handlers: ClassVar[dict[type[AnyMessage[Any]], Handler]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.handlers = collect_handlers(cls)

    @asynccontextmanager
    async def lifespan(self, context: Context) -> AsyncIterator[None]:  # noqa: ARG002
        """Set up and tear down an incarnation; entered and left in the actor's own task.

        ``spawn`` returns once the lifespan is entered. The lifespan is left after the last handler and background task
        have ended, shielded from cancellation for a bounded time (``cleanup_seconds`` of the system). If the actor
        crashes, the error is raised at the ``yield`` so that the lifespan can record it; it cannot be swallowed here.
        """
        yield


class BackgroundTasks:
    """Background tasks of an actor.

    They run concurrently with its handlers and end with it; one that raises crashes it.
    """

    def __init__(self, cell: Cell) -> None:
        self._cell = cell

    def start_soon(
        self,
        function: Callable[[*Arguments], Awaitable[Any]],
        *arguments: *Arguments,
        name: str | None = None,
    ) -> None:
        """Run ``function(*arguments)`` in the background until it returns or the actor ends.

        The task does not belong to any message that is being handled, so it may ask any actor, including its own. It
        must not outlive the actor.
        """
        self._cell.start_background(
            lambda: function(*arguments), name or str(getattr(function, "__qualname__", "task"))
        )


class Context:
    """The view that an actor has of its system and of itself, for one incarnation."""

    def __init__(self, cell: Cell, incarnation: int) -> None:
        self._cell = cell
        self.incarnation = incarnation
        """Number of this incarnation: 1 at the first start, incremented at each restart."""
        self.tasks = BackgroundTasks(cell)
        """Background tasks that end with the actor."""

    @property
    def name(self) -> str:
        """The actor's name."""
        return self._cell.name

    @property
    def system(self) -> Runtime:
        """The system that runs the actor; use it to spawn other actors."""
        return self._cell.system

    @property
    def self_ref(self) -> Ref[Any]:
        """A ref to this actor, to pass to other actors or to send messages to itself."""
        return self._cell.ref

    def watch(self, ref: Ref[Any]) -> None:
        """Deliver a ``Down`` on this actor's control lane whenever an incarnation of ``ref`` ends.

        Watching the same ref twice has no further effect. If the watched actor has already ended, the ``Down`` is
        delivered at once.

        Raises:
            ProtocolError: this actor has no handler for ``Down``.
        """
        if Down not in self._cell.handlers:
            raise ProtocolError(f"actor {self.name!r} watches {ref.name!r}; add a method under @Down.handler")
        ref.life.watch(self._cell.on_down)

    def stop(self) -> None:
        """Request that this actor stops, and return at once.

        Messages that were already accepted are handled for up to the system's grace period.
        """
        self._cell.request_stop(None)


class Runtime(ABC):
    """The system as its actors see it; ``ActorSystem`` implements it.

    ``grace`` and ``cleanup_seconds`` bound, in seconds, the handling of accepted messages and the clean-up at the end.
    """

    name: str
    grace: float
    cleanup_seconds: float
    loop: Loop
    is_closing: bool

    @abstractmethod
    async def spawn(
        self,
        actor: Actor[P] | Callable[[], Actor[P]],
        *,
        name: str | None = None,
        supervision: Supervision | None = None,
        mailbox_size: int = 1024,
    ) -> Ref[P]:
        """Start an actor; see ``ActorSystem.spawn``."""

    @abstractmethod
    def forget(self, cell: Cell) -> None:
        """Remove a cell that has ended, which frees its name. Called by the cell."""


# ----------------------------------------------------------------------------------------------------------------------
# Work in progress
#
# A *frame* is one piece of work of an actor. While an actor handles an ask, the ask's envelope is its frame; told
# messages and the lifespan run in the cell's own frame. A frame records what it waits for, which forms the graph that
# the deadlock check searches, and who asked for it, which forms the chain that an error can print.
# ``current_frame`` is the frame that the running task works for; background tasks have none.


PENDING: Any = object()
"""Placeholder for the reply of an ask that has not been answered yet."""


class Phase(IntEnum):
    """Progress of an envelope: queued, running or done."""

    QUEUED = 0
    RUNNING = 1
    DONE = 2


# Module constants: an attribute of an enum class costs a look-up through its metaclass on every ask.
_QUEUED, _RUNNING, _DONE = Phase.QUEUED, Phase.RUNNING, Phase.DONE


class Frame:
    """One piece of work of ``cell``, the frames it waits for, and the frame (``parent``) that asked for it."""

    __slots__ = ("cell", "parent", "phase", "waits")

    def __init__(self, cell: Cell, parent: Frame | None = None, phase: Phase = _RUNNING) -> None:
        self.cell = cell
        self.parent = parent
        self.phase = phase
        self.waits: set[Frame] = set()


class Ask(Frame):
    """A message whose sender waits for a reply. It ends exactly once, in a reply, an error, or abandonment."""

    __slots__ = ("deadline", "error", "handler", "message", "reply", "scope", "signal")

    def __init__(self, message: Any, handler: Handler, cell: Cell, parent: Frame | None, deadline: float) -> None:
        self.cell = cell
        self.parent = parent
        # Assigned here instead of by ``Frame.__init__``, which saves a call on every ask.
        self.phase = _QUEUED
        self.waits = set()
        self.message = message
        self.handler = handler
        self.deadline = deadline
        # Created by those who wait for it.
        self.signal: Signal | None = None
        self.scope: Scope | None = None
        self.reply: Any = PENDING
        self.error: ArealError | None = None

    def finish(self) -> None:
        """Mark the work as done and wake the asker, which then reads the reply or the error."""
        self.phase = _DONE
        if self.reply is PENDING and self.error is None:
            self.error = self.unanswered()
        # Release the message: timers that the handler started keep their context, and with it this envelope, alive.
        self.message = None
        if self.signal is not None:
            self.signal.set()

    def fail(self, error: ArealError) -> None:
        """End with ``error``, unless the ask has already ended."""
        if self.phase is not _DONE:
            self.error = error
            self.finish()

    def claim_reply(self) -> Any:
        """Return the reply, once, and drop the reference so that only the asker owns it."""
        # Not kept here: the reply may hold large arrays, and this envelope may live on in a timer's context.
        reply, self.reply = self.reply, None
        return reply

    def claim_error(self) -> ArealError:
        """Return the error, once, to be raised.

        Its traceback refers to this object, so keeping it would make a reference cycle.
        """
        assert self.error is not None, "it has ended in a reply"
        error, self.error = self.error, None
        return error

    def overdue(self) -> DeadlineExceeded:
        """Create the error for an ask whose deadline has passed."""
        state = "its handler was running" if self.scope is not None else "it was still queued"
        return DeadlineExceeded(
            f"{self.handler.message.__name__} to actor {self.cell.name!r} was not answered before its deadline; "
            f"{state}. Allow more time, or see the actor's statistics for what it is busy with."
        )

    def unanswered(self) -> ArealError:
        """Create the error for an ask whose handler was cancelled."""
        if self.deadline < math.inf and self.cell.loop.now() >= self.deadline:
            return self.overdue()
        return ActorStopped(
            f"actor {self.cell.name!r} ended while it handled {self.handler.message.__name__}; no reply will come"
        )


class StreamCall(Ask):
    """An ask that is answered by many items, through a bounded buffer between the handler and the consumer."""

    __slots__ = ("arrival", "buffer", "limit", "room")

    def __init__(
        self, message: Any, handler: Handler, cell: Cell, parent: Frame | None, deadline: float, *, limit: int
    ) -> None:
        super().__init__(message, handler, cell, parent, deadline)
        # The consumer waits for the end of the handler when it leaves the block early.
        self.signal = cell.loop.new_signal()
        self.buffer: deque[Any] = deque()
        self.limit = limit
        self.arrival: Signal | None = None
        self.room: Signal | None = None
        """Set by the consumer's side when the handler waits for room."""

    @property
    def is_done(self) -> bool:
        """True if the handler has ended; items that are still buffered can be read."""
        return self.phase is _DONE

    def finish(self) -> None:
        """Mark the work as done; items that are still buffered can be read."""
        super().finish()
        if self.arrival is not None:
            self.arrival.set()

    async def put(self, item: Any) -> None:
        """Append one item to the buffer; waits while the buffer is full, which gives the stream its back-pressure."""
        while len(self.buffer) >= self.limit:
            self.room = self.cell.loop.new_signal()
            await self.room.wait()
        self.buffer.append(item)
        if self.arrival is not None:
            self.arrival.set()


current_frame: ContextVar[Frame | None] = ContextVar("current_frame", default=None)


# ----------------------------------------------------------------------------------------------------------------------
# Deadlocks
#
# Asks that could never end are refused before they start to wait. The wait graph has two kinds of edges. A running
# frame waits for the asks, streams and full mailboxes in its ``waits``. A queued envelope waits for the frame that
# occupies the loop of its actor: the handler that is running there, if it is a serial one. A concurrent handler
# occupies nothing. A wait is refused if the frame that is about to wait can be reached from the frame that would block
# it, because the wait would close a cycle.
#
# This covers both chains (A asks B, whose handler asks A) and independent requests that cross (A asks B while B asks
# A), within one process. A cycle through handlers that are merely at their concurrency limit is not detected; use
# deadlines there.


def asking_frame() -> Frame | None:
    """Return the frame that this task works for; ``None`` outside actors and for work that outlived its frame."""
    frame = current_frame.get()
    return None if frame is None or frame.phase is _DONE else frame


def refuse_deadlock(waiter: Frame, target: Cell, what: str) -> None:
    """Check that ``waiter`` may wait until ``target`` takes its next message.

    Raises:
        DeadlockError: the wait would close a cycle; the message shows the path.
    """
    blocker = target.occupant()
    # Fast path for almost every ask: an idle target, or a blocker that itself waits for nothing.
    if blocker is None or (blocker is not waiter and not blocker.waits):
        return
    path = _path(blocker, waiter)
    if path is None:
        return
    names = " → ".join(repr(cell.name) for cell in (waiter.cell, *(frame.cell for frame in path)))
    raise DeadlockError(
        f"{what} would wait for itself: {names}. "
        "Tell instead of asking, or declare the handler that waits with concurrency=2 or more."
    )


def refuse_self_stop(target: Cell) -> None:
    """Check that this task does not work, directly or through a chain of asks, for a handler of ``target``.

    Raises:
        DeadlockError: the stop would wait for the handler that waits for it.
    """
    frame = asking_frame()
    while frame is not None:
        if frame.cell is target:
            raise DeadlockError(
                f"a handler of actor {target.name!r} would wait for its own end; call context.stop() and return"
            )
        frame = frame.parent


def _path(start: Frame, goal: Frame) -> list[Frame] | None:
    seen: set[Frame] = {start}
    stack: list[tuple[Frame, list[Frame]]] = [(start, [start])]
    while stack:
        frame, path = stack.pop()
        if frame is goal:
            return path
        # A queued envelope waits for the loop; a running frame waits for what it has asked.
        is_queued = frame.phase is _QUEUED
        for following in (frame.cell.occupant(),) if is_queued else tuple(frame.waits):
            if following is None or following in seen or (not is_queued and following.phase is _DONE):
                continue
            seen.add(following)
            stack.append((following, [*path, following]))
    return None


# ----------------------------------------------------------------------------------------------------------------------
# The life of an actor
#
# ::
#
#     run ─┬─▶ incarnate: task group ▸ lifespan ▸ serve (messages, one by one or in tasks) ──▶ stopped
#          │        │ crash
#          └── back-off ◀── supervision ──▶ Stop: gone │ Escalate: the error leaves the system's task group
#
# The nesting of scopes makes the shutdown orderly. The scope ``life`` surrounds the lifespan; it is shielded, with a
# deadline, only while the lifespan is left. The scope inside it (see ``_working``) surrounds the handling of messages,
# and its deadline is the grace period of a stop. The task group outside both holds concurrent handlers and background
# tasks, and is cancelled before the lifespan is left.


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

    def __init__(self, system: Runtime, blueprint: Blueprint, random: Random) -> None:
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
                if self._history is None or self.mailbox.closed:
                    break
                delay = self._history.next_delay(self.loop.now())
                if delay is None:
                    break
                self._report_down(DownReason.CRASHED, error, is_restarting=True)
                self.state = ActorState.RESTARTING
                _log.warning("actor_restarts", actor=self.name, delay_seconds=round(delay, 2), exc_info=error)
                with anyio.move_on_after(delay):
                    await self._stopping.wait()
                self.state = ActorState.STARTING
                if self._stopping.is_set():
                    # A stop was requested meanwhile.
                    error = None
                    break
        finally:
            self._finish_actor(error)
        # Raised inside the system's task group, which thereby cancels all other actors.
        if error is not None and self._is_escalating():
            raise error

    async def _incarnate(self) -> Exception | None:
        """Run one incarnation. Return the error that crashed it, or ``None`` if it was stopped or failed to start."""
        self.incarnation += 1
        self._crash = None
        try:
            await self._live(self.blueprint.first if self.incarnation == 1 else self.blueprint.recreate())
        except Exception as error:  # noqa: BLE001 - whatever it is, the supervision policy is its handler
            cause = self._crash or root_cause(error)
            crash = cause if isinstance(cause, Exception) else error
            if not self.born.is_set():
                # ``spawn`` raises it.
                self.birth_error = crash
            elif not isinstance(crash, ActorStopped) or not (self.mailbox.closed or self.system.is_closing):
                # An ``ActorStopped`` while this actor or the system is stopping, too, follows from that, and is no
                # crash.
                return crash
        return None

    async def _live(self, actor: Actor[Any]) -> None:
        lifespan = actor.lifespan(Context(self, self.incarnation))
        if not isinstance(lifespan, AbstractAsyncContextManager):
            raise ProtocolError(f"{type(actor).__name__}.lifespan must be decorated with @asynccontextmanager")
        async with anyio.create_task_group() as tasks:
            serving = self.serving = Serving(self, actor, tasks)
            # The deadline bounds the entry of the lifespan: a stop during the start cancels it when the grace period
            # ends.
            with self.loop.new_scope(deadline=self._stop_deadline) as life:
                self._scope = life
                async with lifespan, self._working(life, serving):
                    self.state = ActorState.STOPPING if self.mailbox.closed else ActorState.RUNNING
                    self.born.set()
                    await serving.serve()
            # A lifespan that was cut off before its ``yield`` may have started background tasks already.
            tasks.cancel_scope.cancel()
            if life.cancelled_caught and self.born.is_set():
                _log.warning("actor_cleanup_cut_off", actor=self.name, cleanup_seconds=self.cleanup_seconds)
        if self._crash is not None:
            # Without this, an async context manager that suppresses the exception would turn a crash into a normal
            # stop.
            # A lifespan sees the error, but must not swallow it.
            raise self._crash
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

    def _is_escalating(self) -> bool:
        policy = self.blueprint.supervision
        return isinstance(policy.then if isinstance(policy, Restart) else policy, Escalate)

    def _finish_actor(self, error: Exception | None) -> None:
        self.mailbox.close()
        self.state = ActorState.STOPPED if error is None else ActorState.CRASHED
        num_dropped = 0
        for entry in self.mailbox.drain():
            if isinstance(entry, Ask):
                message = entry.handler.message.__name__
                entry.fail(ActorStopped(f"actor {self.name!r} ended before it came to {message}"))
            elif not isinstance(entry, Down):
                num_dropped += 1
        self.counters.dropped += num_dropped
        if num_dropped:
            # ``told`` means that their senders do not wait for them; the counter keeps the number.
            _log.debug("messages_unhandled", actor=self.name, num_messages=num_dropped)
        if error is not None and not self._is_escalating():
            _log.error("actor_crashed", actor=self.name, exc_info=error)
        reason = DownReason.STOPPED if error is None else DownReason.CRASHED
        # The order matters: watchers are notified before the name becomes free and before ``stop`` returns.
        self.final_down = self._report_down(reason, error, is_restarting=False)
        self.system.forget(self)
        self.born.set()
        self.gone.set()

    # ------------------------------------------------------------------------------------------------ watching

    def on_down(self, down: Down) -> None:
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


# ----------------------------------------------------------------------------------------------------------------------
# Messages of one incarnation
#
# Messages are handled serially in the loop, concurrently in tasks, or parked for later.
#
# * A told message with a serial handler is awaited directly in the loop, without a scope or task: this is the fast
#   path.
# * An ask or a stream runs under a cancel scope, which is cancelled when its asker leaves or its deadline passes.
# * A message whose handler declares ``concurrency`` gets a task; at the limit it is parked in the mailbox.


FAIRNESS = 64
"""Messages handled in a row before the loop yields to other tasks; a checkpoint costs as much as several tells."""


class Serving:
    """The message loop and the tasks of one incarnation."""

    def __init__(self, cell: Cell, actor: Actor[Any], tasks: TaskGroup) -> None:
        self.num_concurrent = 0
        self._cell, self._actor, self._tasks = cell, actor, tasks
        self._mailbox, self._counters = cell.mailbox, cell.counters
        self._places: Counter[Handler] = Counter()
        self._num_tasks = 0
        self._all_ended: Signal | None = None

    async def serve(self) -> None:
        """Handle messages until the mailbox is closed and empty and no handler runs.

        Raises the error of a told message.
        """
        # After a restart: messages that the previous incarnation had parked.
        self._mailbox.restore()
        while not await self._serve_under_one_scope():
            pass

    async def _serve_under_one_scope(self) -> bool:
        """Handle messages until an ask in the loop is cancelled (return ``False``), or to the end (return ``True``)."""
        cell, mailbox, actor, counters = self._cell, self._mailbox, self._actor, self._counters
        data, control, serial = mailbox.data, mailbox.control, cell.serial
        cell.occupying = cell.frame
        current_frame.set(cell.frame)
        # Serial handlers share one cancel scope, because only one of them runs at a time; a cancelled scope is
        # replaced. A separate scope for each ask would cost as much as the rest of its handling.
        with cell.loop.new_scope() as scope:
            while True:
                for _ in range(FAIRNESS):
                    # Inlines ``Mailbox.take`` for the common case, because every message passes here.
                    entry = data.popleft() if data and not control else mailbox.take()
                    if entry is None:
                        if mailbox.closed and not self.num_concurrent:
                            return True
                        await self._sleep()
                        continue
                    function = serial.get(entry.__class__)
                    if function is not None:
                        if mailbox.senders:
                            mailbox.admit()
                        try:
                            await function(actor, entry)
                        except BaseException as error:  # noqa: BLE001 - raised again, with a note
                            self._fail_tell(entry, error)
                        counters.handled += 1
                    elif await self._dispatch(entry, scope):
                        return False
                await checkpoint()
        return False

    def start_background(self, function: Callable[[], Awaitable[Any]], name: str) -> None:
        """Run ``function`` in a task without a frame, until it returns or the incarnation ends."""
        self._num_tasks += 1
        self._tasks.start_soon(self._run_background, function, name=f"{self._cell.name}.{name}")

    async def end_tasks(self) -> None:
        """Cancel every task of this incarnation and wait for them. The caller must be shielded."""
        self._tasks.cancel_scope.cancel()
        if self._num_tasks:
            self._all_ended = self._cell.loop.new_signal()
            await self._all_ended.wait()

    async def _sleep(self) -> None:
        event = self._cell.loop.new_signal()
        self._mailbox.wake = event.set
        try:
            await event.wait()
        finally:
            self._mailbox.wake = None

    async def _dispatch(self, entry: Any, scope: Scope) -> bool:
        """Handle an ask serially, start a task, or park it.

        Return ``True`` if ``scope`` was cancelled and must be replaced.
        """
        cell = self._cell
        handler = entry.handler if isinstance(entry, Ask) else cell.handlers[entry.__class__]
        if handler.concurrency != 1:
            # Parked instead of waited for, so that messages of other kinds are not delayed.
            if self._places[handler] >= handler.concurrency:
                self._mailbox.park(handler, entry)
            else:
                self._mailbox.admit()
                self._start_concurrent(handler, entry)
            return False
        if self._mailbox.senders:
            self._mailbox.admit()
        cell.occupying = entry
        current_frame.set(entry)
        if entry.deadline == math.inf:
            await self.answer(entry, scope)
        else:
            scope.deadline = entry.deadline
            await self.answer(entry, scope)
            # The scope is shared with the following messages.
            scope.deadline = math.inf
        current_frame.set(cell.frame)
        cell.occupying = cell.frame
        return scope.cancel_called

    async def answer(self, ask: Ask, scope: Scope) -> None:
        """Run the handler of one ask inside ``scope``, and end the ask in every case."""
        if ask.phase is _DONE:
            return
        counters = self._counters
        # Do not start work whose asker has timed out.
        if ask.deadline < math.inf and self._cell.loop.now() >= ask.deadline:
            counters.cancelled += 1
            ask.fail(ask.overdue())
            return
        ask.phase = _RUNNING
        ask.scope = scope
        try:
            if ask.handler.is_stream:
                assert isinstance(ask, StreamCall)
                await produce(ask, ask.handler.function(self._actor, ask.message))
            else:
                ask.reply = await ask.handler.function(self._actor, ask.message)
        except BaseException as error:
            # A stray ``CancelledError`` is a failure of the handler; a real cancellation has to propagate.
            if not isinstance(error, Exception) and not is_stray_cancellation(error):
                counters.cancelled += 1
                raise
            counters.failed += 1
            ask.error = transferred(error, self._cell.name)
        finally:
            counters.handled += 1
            ask.finish()

    def _start_concurrent(self, handler: Handler, entry: object) -> None:
        self._places[handler] += 1
        self.num_concurrent += 1
        self._num_tasks += 1
        self._tasks.start_soon(self._run_concurrent, handler, entry, name=self._cell.name)

    async def _run_concurrent(self, handler: Handler, entry: object) -> None:
        try:
            if isinstance(entry, Ask):
                current_frame.set(entry)
                with self._cell.loop.new_scope(deadline=entry.deadline) as scope:
                    await self.answer(entry, scope)
            else:
                # A separate frame, because a concurrent handler does not occupy the loop.
                current_frame.set(Frame(self._cell))
                try:
                    await handler.function(self._actor, entry)
                except BaseException as error:  # noqa: BLE001 - raised again, with a note
                    self._fail_tell(entry, error)
                self._counters.handled += 1
        finally:
            self._give_place_back(handler)

    def _give_place_back(self, handler: Handler) -> None:
        self._places[handler] -= 1
        self.num_concurrent -= 1
        # If this incarnation has ended, a parked message is left for the next one.
        if self._mailbox.num_parked and not self._tasks.cancel_scope.cancel_called:
            entry = self._mailbox.unpark(handler)
            if entry is not None:
                self._start_concurrent(handler, entry)
        # Wake ``serve``, which returns when the mailbox is closed and no concurrent handler runs.
        if self._mailbox.closed and not self.num_concurrent:
            self._mailbox.wake_reader()
        self._leave()

    # ------------------------------------------------------------------------------------------------ tasks

    async def _run_background(self, function: Callable[[], Awaitable[Any]]) -> None:
        # The task inherits the context of its starter, whose frame it must not keep.
        current_frame.set(None)
        try:
            await function()
        finally:
            self._leave()

    def _leave(self) -> None:
        self._num_tasks -= 1
        if self._all_ended is not None and not self._num_tasks:
            self._all_ended.set()

    def _fail_tell(self, message: object, error: BaseException) -> NoReturn:
        """Let ``error`` crash the actor, with a note that names the message; cancellations pass unchanged."""
        where = f"while actor {self._cell.name!r} handled {type(message).__name__}"
        if is_stray_cancellation(error):
            error = ActorError(f"something that was awaited had been cancelled by a stranger, {where}")
        if isinstance(error, Exception):
            self._counters.handled += 1
            self._counters.failed += 1
            error.add_note(where)
        raise error


# ----------------------------------------------------------------------------------------------------------------------
# The sender's side
#
# Messages and replies within a process are passed by reference.


class LocalRef(Ref[P_contra], Generic[P_contra]):
    """A ref to an actor in this process. See ``Ref`` for the contract."""

    __slots__ = ("_address", "_offer", "_tellable", "cell")

    def __init__(self, cell: Cell, address: Address) -> None:
        self.cell = cell
        self._address = address
        # Cached for ``tell``, to save attribute look-ups on its fast path.
        self._offer = cell.mailbox.offer
        self._tellable = frozenset(message for message, handler in cell.handlers.items() if not handler.is_stream)

    @property
    def address(self) -> Address:
        """The address of the actor, with its present incarnation."""
        if self._address.incarnation != self.cell.incarnation:
            # The cell's incarnation is 0 until its task has started.
            self._address = Address(
                node=self._address.node, name=self._address.name, incarnation=max(self.cell.incarnation, 1)
            )
        return self._address

    @property
    def life(self) -> Cell:
        """The cell, which reports the end of each incarnation."""
        return self.cell

    async def ask(self, message: Message[P_contra, R], *, timeout: float | None = None) -> R:  # noqa: ASYNC109
        """Send ``message`` and wait for its reply; see ``Ref.ask``."""
        handler = self._handler(message, is_stream=False)
        ask = Ask(message, handler, self.cell, asking_frame(), self.cell.loop.effective_deadline())
        if timeout is None:
            return await self._await_reply(ask)  # type: ignore[no-any-return]
        loop = self.cell.loop
        deadline = loop.now() + timeout
        ask.deadline = min(ask.deadline, deadline)
        with loop.new_scope(deadline=deadline):
            return await self._await_reply(ask)  # type: ignore[no-any-return]
        # Reached only if the deadline has cancelled the wait: the scope then swallows its cancellation.
        raise ask.overdue()

    async def tell(self, message: Message[P_contra, Any]) -> None:
        """Put ``message`` in the mailbox; see ``Ref.tell``."""
        if message.__class__ not in self._tellable:
            raise self._unhandled(message)
        if not self._offer(message):
            await self._tell_slowly(message)

    def tell_nowait(self, message: Message[P_contra, Any]) -> None:
        """Put ``message`` in the mailbox without waiting; see ``Ref.tell_nowait``."""
        cell = self.cell
        if message.__class__ not in self._tellable:
            raise self._unhandled(message)
        if self._offer(message):
            return
        if cell.mailbox.closed:
            raise self._stopped(message)
        raise MailboxFull(
            f"the mailbox of actor {cell.name!r} holds {cell.mailbox.bound} messages and is full; "
            f"use 'await tell' to wait for room, or spawn it with a larger mailbox_size"
        )

    def stream(
        self, message: StreamMessage[P_contra, Item], *, buffer_size: int = 16
    ) -> AbstractAsyncContextManager[AsyncIterator[Item]]:
        """Open a stream of items; see ``Ref.stream``."""
        if buffer_size < 0:
            raise ValueError(f"buffer_size={buffer_size} is not a number of items; give 0 or more")
        return Stream(self, message, max(buffer_size, 1))

    async def stop(self, *, grace: float | None = None) -> None:
        """End the actor and wait until it is gone; see ``Ref.stop``."""
        refuse_self_stop(self.cell)
        self.cell.request_stop(grace)
        await self.cell.gone.wait()

    def statistics(self) -> ActorStatistics:
        """Return a snapshot of the actor's statistics."""
        return self.cell.statistics()

    def accept(self, entry: Any, decided: Callable[[bool], object]) -> None:
        """Accept an ask or a told message that arrived over a connection; never waits.

        ``decided`` is called with ``True`` once the mailbox has admitted the entry, or with ``False`` if it was refused
        because the actor ends. It is not called for an ask that ends while it waits for room.

        Raises:
            ActorStopped: the actor no longer takes messages.
        """
        mailbox = self.cell.mailbox
        if mailbox.closed:
            raise self._stopped(entry.message if isinstance(entry, Ask) else entry)
        if not isinstance(entry, Ask):
            mailbox.queue(Ticket(entry, decided))
            return
        mailbox.queue(Ticket(entry, lambda admitted: self._note_admission(entry, decided, admitted=admitted)))

    def open_call(self, message: StreamMessage[P_contra, Any], buffer_size: int) -> StreamCall:
        """Send a stream message and return its call; the caller reads from it, and removes it from the wait graph."""
        handler = self._handler(message, is_stream=True)
        call = StreamCall(
            message, handler, self.cell, asking_frame(), self.cell.loop.effective_deadline(), limit=buffer_size
        )
        self._send(call)
        return call

    async def _await_reply(self, ask: Ask) -> Any:
        # Created before the message is sent, because a mailbox that closes refuses it at once.
        ask.signal = signal = self.cell.loop.new_signal()
        self._send(ask)
        try:
            await signal.wait()
            if ask.error is not None and type(ask.error) is DeadlineExceeded:
                # A scope of the caller with the same deadline must expire first: it expects its own cancellation.
                await checkpoint()
        except BaseException:
            self.cell.abandon(ask)
            raise
        finally:
            if ask.parent is not None:
                ask.parent.waits.discard(ask)
        if ask.error is not None:
            raise ask.claim_error()
        return ask.claim_reply()

    def _send(self, ask: Ask) -> None:
        cell = self.cell
        if cell.mailbox.closed:
            raise self._stopped(ask.message)
        if ask.parent is not None:
            refuse_deadlock(ask.parent, cell, type(ask.message).__name__)
            ask.parent.waits.add(ask)
        if not cell.mailbox.offer(ask):
            # An ask waits for its reply anyway, so its ticket only has to report a refusal, not an admission.
            cell.mailbox.queue(Ticket(ask, lambda admitted: None if admitted else ask.fail(self._stopped(ask.message))))

    def _note_admission(self, ask: Ask, decided: Callable[[bool], object], *, admitted: bool) -> None:
        decided(admitted)
        if not admitted:
            ask.fail(self._stopped(ask.message))

    async def _tell_slowly(self, message: Any) -> None:
        cell = self.cell
        # ``wait`` represents the message in the wait graph, because a told message has no envelope.
        waiter, wait = asking_frame(), Frame(cell, phase=Phase.QUEUED)
        if waiter is not None and not cell.mailbox.closed:
            refuse_deadlock(waiter, cell, f"telling {type(message).__name__} to a full mailbox")
            waiter.waits.add(wait)
        decided = cell.loop.new_signal()
        ticket = Ticket(message, lambda _: decided.set())
        cell.mailbox.queue(ticket)
        try:
            await decided.wait()
        except BaseException:
            cell.mailbox.discard_ticket(ticket)
            raise
        finally:
            if waiter is not None:
                waiter.waits.discard(wait)
        if not ticket.admitted:
            raise self._stopped(message)

    def _handler(self, message: Any, *, is_stream: bool) -> Handler:
        handler = self.cell.handlers.get(message.__class__)
        if handler is None or handler.is_stream is not is_stream:
            raise self._unhandled(message)
        return handler

    def _unhandled(self, message: object) -> ProtocolError:
        known = ", ".join(sorted(known.__name__ for known in self.cell.handlers)) or "nothing"
        return ProtocolError(
            f"actor {self.cell.name!r} does not take {type(message).__name__} this way; it handles {known}. "
            "Ask or tell a Message, stream a StreamMessage."
        )

    def _stopped(self, message: object) -> ActorStopped:
        return ActorStopped(
            f"actor {self.cell.name!r} takes no more messages ({self.cell.state}); "
            f"{type(message).__name__} was not sent"
        )


# ----------------------------------------------------------------------------------------------------------------------
# Streams
#
# The handler's generator runs in the actor's task from its first line to its last, so that it may open scopes and task
# groups around its ``yield``. Items pass through the bounded buffer of a ``StreamCall``; a slow consumer makes the
# handler wait at its ``yield``.


class Stream(BufferedStream[StreamCall, Item]):
    """A stream from an actor of this process."""

    def __init__(self, ref: LocalRef[Any], message: Any, buffer_size: int) -> None:
        super().__init__(message, ref.cell.name, ref.cell.loop, ref.cell.cleanup_seconds)
        self._ref = ref
        self._buffer_size = buffer_size

    def open_call(self) -> StreamCall:
        """Put the message in the actor's mailbox."""
        return self._ref.open_call(self._message, self._buffer_size)

    def make_room(self, call: StreamCall) -> None:
        """Wake the handler if it waits at its ``yield``."""
        if call.room is not None:
            call.room.set()
            call.room = None

    def cancel_call(self, call: StreamCall) -> None:
        """Discard the call if it is queued, or cancel its handler."""
        call.cell.abandon(call)

    def close_call(self, call: StreamCall) -> None:
        """Remove the call from the wait graph."""
        if call.parent is not None:
            call.parent.waits.discard(call)


async def produce(call: StreamCall, generator: AsyncGenerator[Any, None]) -> None:
    """Drive the handler's ``generator`` to its end and pass on each item.

    If passing on an item is interrupted (by a cancellation or a deadline inside the handler), the exception is raised
    in the generator at its ``yield``, as if the ``yield`` had waited itself.
    """
    try:
        item = await anext(generator)
        while True:
            try:
                await call.put(item)
            except BaseException as error:  # noqa: BLE001 - raised again in the generator
                item = await generator.athrow(error)
            else:
                item = await anext(generator)
    except StopAsyncIteration:
        call.reply = None
    finally:
        await generator.aclose()
