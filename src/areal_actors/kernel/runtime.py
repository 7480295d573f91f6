"""How actors run: authors write an ``Actor``, the system gives it a ``Cell``, and callers hold a ``LocalRef``.

The file reads from top to bottom::

    Actor, Context   what authors of actors write and receive
    Cell             one actor across its incarnations: start, crash, restart, stop
    Serving          the message loop and the tasks of one incarnation
    LocalRef         the sender's side: ask, tell, stream, stop

``asks`` has the work in progress, ``stream`` the consumer's end of a stream. ``supervision`` decides about restarts,
``mailbox`` keeps the queue, ``system`` opens and spawns, and ``remote`` carries the same messages between processes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from random import Random
from typing import Any, ClassVar, Generic, NoReturn, TypeVar, TypeVarTuple

import anyio
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint
from attrs import define, evolve, frozen

from areal_actors.errors import ActorError, ActorStopped, ConfigError, ProtocolError
from areal_actors.kernel.asks import (
    Ask,
    Frame,
    Phase,
    StreamCall,
    asking_frame,
    current_frame,
    refuse_deadlock,
    refuse_self_stop,
)
from areal_actors.kernel.failure import is_stray_cancellation, root_cause, transferred
from areal_actors.kernel.mailbox import Mailbox, Ticket
from areal_actors.kernel.message import (
    Address,
    Handler,
    Message,
    MessageClass,
    StreamMessage,
    check_complete,
    collect_handlers,
)
from areal_actors.kernel.ref import ActorState, ActorStatistics, Down, DownReason, Ref, Watched, Watcher
from areal_actors.kernel.stream import Stream, check_buffer_size
from areal_actors.kernel.supervision import Escalate, Restart, RestartHistory, Supervision
from areal_actors.lib.loops import Loop, Scope, Signal
from areal_actors.lib.telemetry import get_logger

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
    handlers: ClassVar[dict[MessageClass, Handler]] = {}

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
        self.handlers: dict[MessageClass, Handler] = blueprint.first.handlers
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
            else:
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
        )


# ----------------------------------------------------------------------------------------------------------------------
# Messages of one incarnation
#
# * A told message with a serial handler is awaited directly in the loop, without a scope or task: the fast path.
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
        cell, mailbox, actor, counters = self._cell, self._mailbox, self._actor, self._counters
        data, serial = mailbox.data, cell.serial
        # After a restart: messages that the previous incarnation had parked.
        mailbox.restore()
        current_frame.set(cell.frame)
        while True:
            for _ in range(FAIRNESS):
                # Inlines ``Mailbox.take`` for the common case, because every message passes here.
                entry = data.popleft() if data else mailbox.take()
                if entry is None:
                    if mailbox.closed and not self.num_concurrent:
                        return
                    await self._sleep()
                    continue
                function = serial.get(entry.__class__)
                if function is None:
                    await self._dispatch(entry)
                    continue
                if mailbox.senders:
                    mailbox.admit()
                try:
                    await function(actor, entry)
                except BaseException as error:  # noqa: BLE001 - raised again, with a note
                    self._fail_tell(entry, error)
                counters.handled += 1
            await checkpoint()

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

    async def _dispatch(self, entry: Any) -> None:
        """Handle an ask serially, start a task, or park it."""
        cell = self._cell
        handler = entry.handler if isinstance(entry, Ask) else cell.handlers[entry.__class__]
        if self._places[handler] >= handler.concurrency:
            # Parked instead of waited for, so that messages of other kinds are not delayed.
            self._mailbox.park(handler, entry)
            return
        self._mailbox.admit()
        if handler.concurrency > 1:
            self._start_concurrent(handler, entry)
            return
        cell.occupying = entry
        current_frame.set(entry)
        await self._answer(entry)
        current_frame.set(cell.frame)
        cell.occupying = cell.frame

    async def _answer(self, ask: Ask) -> None:
        """Run the handler of one ask, and end the ask in every case."""
        if ask.is_done:
            return
        counters = self._counters
        # Do not start work whose asker has timed out.
        if ask.deadline < math.inf and self._cell.loop.now() >= ask.deadline:
            counters.cancelled += 1
            ask.fail(ask.overdue())
            return
        ask.phase = Phase.RUNNING
        with self._cell.loop.new_scope(deadline=ask.deadline) as ask.scope:
            try:
                if isinstance(ask, StreamCall):
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
                await self._answer(entry)
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
            error = ActorError(f"an awaited task was cancelled from outside this actor, {where}")
        if isinstance(error, Exception):
            self._counters.handled += 1
            self._counters.failed += 1
            error.add_note(where)
        raise error


async def produce(call: StreamCall, generator: AsyncGenerator[Any, None]) -> None:
    """Drive the handler's ``generator`` to its end and pass on each item.

    The generator runs in one task from its first line to its last, so that it may open scopes and task groups around
    its ``yield``. If passing on an item is interrupted (by a cancellation or a deadline inside the handler), the
    exception is raised in the generator at its ``yield``, as if the ``yield`` had waited itself.
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
            self._address = evolve(self._address, incarnation=max(self.cell.incarnation, 1))
        return self._address

    def watch(self, watcher: Watcher) -> None:
        """Report the end of each incarnation; see ``Ref.watch``."""
        self.cell.watch(watcher)

    def unwatch(self, watcher: Watcher) -> None:
        """Remove ``watcher``, if it is registered."""
        self.cell.unwatch(watcher)

    async def ask(self, message: Message[P_contra, R], *, timeout: float | None = None) -> R:  # noqa: ASYNC109
        """Send ``message`` and wait for its reply; see ``Ref.ask``."""
        handler, loop = self._handler(message, is_stream=False), self.cell.loop
        ask = Ask(message, handler, self.cell, asking_frame(), loop.effective_deadline())
        if timeout is None:
            return await self._await_reply(ask)  # type: ignore[no-any-return]
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

    def stream(self, message: StreamMessage[P_contra, Item], *, buffer_size: int = 16) -> Stream[Item]:
        """Open a stream of items; see ``Ref.stream``."""
        check_buffer_size(buffer_size)
        cell = self.cell

        async def open_call() -> StreamCall:
            handler = self._handler(message, is_stream=True)
            deadline = cell.loop.effective_deadline()
            call = StreamCall(message, handler, cell, asking_frame(), deadline, buffer_size)
            self.send(call)
            return call

        what = f"the handler of {type(message).__name__} in actor {cell.name!r}"
        return Stream(open_call, what, cell.loop, cell.cleanup_seconds)

    async def stop(self, *, grace: float | None = None) -> None:
        """End the actor and wait until it is gone; see ``Ref.stop``."""
        refuse_self_stop(self.cell)
        self.cell.request_stop(grace)
        await self.cell.gone.wait()

    def statistics(self) -> ActorStatistics:
        """Return a snapshot of the actor's statistics."""
        return self.cell.statistics()

    def send(self, ask: Ask) -> None:
        """Put ``ask`` in the mailbox, or queue it for room; never waits.

        Raises:
            ActorStopped: the actor no longer takes messages.
            DeadlockError: the ask would wait for itself.
        """
        cell = self.cell
        if cell.mailbox.closed:
            raise self.stopped(ask.message)
        if ask.parent is not None:
            refuse_deadlock(ask.parent, cell, type(ask.message).__name__)
        if not cell.mailbox.offer(ask):
            # An ask waits for its reply anyway, so its ticket only has to report a refusal, not an admission.
            cell.mailbox.queue(Ticket(ask, lambda admitted: None if admitted else ask.fail(self.stopped(ask.message))))

    def queue_tell(self, message: Message[Any, Any], decided: Callable[[bool], object]) -> None:
        """Put a message that was told over a connection in the mailbox, or queue it for room; never waits.

        ``decided`` is called with ``True`` once the mailbox has admitted it, or with ``False`` if the actor ends first.
        """
        self.cell.mailbox.queue(Ticket(message, decided))

    async def _await_reply(self, ask: Ask) -> Any:
        self.send(ask)
        try:
            await ask.signal.wait()
            if ask.is_overdue:
                # A scope of the caller with the same deadline must expire first: it expects its own cancellation.
                await checkpoint()
        except BaseException:
            self.cell.abandon(ask)
            raise
        return ask.claim()

    async def _tell_slowly(self, message: object) -> None:
        cell = self.cell
        waiter = asking_frame()
        if waiter is not None and not cell.mailbox.closed:
            refuse_deadlock(waiter, cell, f"telling {type(message).__name__} to a full mailbox")
        decided = cell.loop.new_signal()
        ticket = Ticket(message, lambda _: decided.set())
        cell.mailbox.queue(ticket)
        try:
            await decided.wait()
        except BaseException:
            cell.mailbox.discard_ticket(ticket)
            raise
        if not ticket.admitted:
            raise self.stopped(message)

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

    def stopped(self, message: object) -> ActorStopped:
        """Return the error for a message that the actor, which ends, does not take."""
        return ActorStopped(
            f"actor {self.cell.name!r} takes no more messages ({self.cell.state}); "
            f"{type(message).__name__} was not sent"
        )
