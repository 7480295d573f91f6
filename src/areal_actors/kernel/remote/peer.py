"""The two ends of a connection: refs to the actors that the other side exposes, and delivery to those of this process.

After the handshake both sides are equal: each may ask the actors that the other exposes. A peer is one connection to
one incarnation of one node. When it is cut, all pending calls end as ``Unreachable``, watchers are notified, and
nothing is retried: a new connection is a new peer, and frames of the old one cannot reach it.

A remote ref differs from a local one in three ways. A message is encoded when it is sent, so that values that cannot be
encoded are refused at once. ``tell`` returns when the message is within the credit that the other side granted, and
does not report what happens to it afterwards. A deadlock across processes is not detected; use deadlines there.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from types import NoneType
from typing import Any, Generic, TypeVar, cast

import anyio
from anyio.lowlevel import checkpoint
from attrs import frozen

from areal_actors.errors import (
    ActorStopped,
    ArealError,
    ConfigError,
    DeadlineExceeded,
    DeadlockError,
    MailboxFull,
    ProtocolError,
    RemoteError,
    Unreachable,
)
from areal_actors.kernel.asks import PENDING, Ask, StreamCall
from areal_actors.kernel.failure import error_from_data, error_to_data
from areal_actors.kernel.message import Address, AnyMessage, Handler, Message, StreamMessage, protocol_of, reply_of
from areal_actors.kernel.ref import ActorState, ActorStatistics, Down, DownReason, Life, Ref, Watched
from areal_actors.kernel.remote.codec import Codec
from areal_actors.kernel.remote.connection import Connection
from areal_actors.kernel.remote.frames import CHUNK_BYTES, Buffer, Frame, Kind, Limits, Outgoing
from areal_actors.kernel.remote.hello import Hello
from areal_actors.kernel.runtime import LocalRef
from areal_actors.kernel.stream import Stream, check_buffer_size
from areal_actors.lib.change_signal import ChangeSignal
from areal_actors.lib.loops import Signal
from areal_actors.lib.telemetry import get_logger

__all__ = [
    "Call",
    "Channel",
    "Credit",
    "Exposed",
    "Peer",
    "RemoteRef",
    "Server",
    "check_free",
    "expose",
]


class Credit:
    """The credit of all actors on one connection."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._used: dict[str, list[int]] = {}
        self._withheld: dict[str, list[int]] = {}

    def use(self, name: str, num_bytes: int) -> None:
        """Count a message that has arrived for an actor.

        Raises:
            ProtocolError: there was no credit for it.
        """
        used = self._used.setdefault(name, [0, 0])
        if used[0] >= self._limits.window_messages or used[1] >= self._limits.window_bytes:
            raise ProtocolError(f"a message to actor {name!r} came without credit: {used[0]} are under way")
        used[0] += 1
        used[1] += num_bytes

    def give_back(self, name: str, num_bytes: int) -> bool:
        """Count a message that was admitted or refused.

        Return whether enough has accumulated to notify the other side.
        """
        withheld = self._withheld.setdefault(name, [0, 0])
        withheld[0] += 1
        withheld[1] += num_bytes
        return self._is_portion(withheld)

    @property
    def is_due(self) -> bool:
        """True if enough credit has accumulated for any actor to notify the other side."""
        return any(map(self._is_portion, self._withheld.values()))

    def collect(self) -> list[tuple[str, int, int]]:
        """Return all credit to give back, as tuples of actor name, messages and bytes, and make it available again."""
        found = [(name, num_messages, num_bytes) for name, (num_messages, num_bytes) in self._withheld.items()]
        self._withheld.clear()
        for name, num_messages, num_bytes in found:
            used = self._used[name]
            used[0] -= num_messages
            used[1] -= num_bytes
        return found

    def _is_portion(self, withheld: list[int]) -> bool:
        # Credit is returned in quarters of the window instead of one frame per message.
        return withheld[0] * 4 >= self._limits.window_messages or withheld[1] * 4 >= self._limits.window_bytes


_log = get_logger(__name__)

P = TypeVar("P")
P_contra = TypeVar("P_contra", contravariant=True)
R = TypeVar("R")
Item = TypeVar("Item")


# ----------------------------------------------------------------------------------------------------------------------
# The asking side
#
# A ``Channel`` is one remote actor as seen from here: its credit, the senders that wait for it, its watchers and its
# present incarnation. A ``Call`` is one message; it ends exactly once.


class Call:
    """One message to a remote actor, or the stream that it opened."""

    __slots__ = (
        "arrival",
        "buffer",
        "channel",
        "deadline",
        "error",
        "is_done",
        "kind",
        "limit",
        "message",
        "num_items",
        "num_taken",
        "outgoing",
        "parts",
        "reply",
        "signal",
        "size",
    )

    def __init__(self, channel: Channel, kind: Kind, message: type[Any] | None, parts: list[Buffer]) -> None:
        self.channel, self.kind, self.message, self.parts = channel, kind, message, parts
        self.size = sum(map(len, parts))
        self.deadline = math.inf
        self.signal: Signal = channel.peer.connection.loop.new_signal()
        self.outgoing: Outgoing | None = None
        self.is_done = False
        self.reply: Any = PENDING
        self.error: ArealError | None = None
        self.buffer: deque[Any] = deque()
        self.num_items = self.num_taken = 0
        self.limit = 0
        self.arrival: Signal | None = None

    @property
    def is_sent(self) -> bool:
        """True if the other side may have received it."""
        return self.outgoing is not None and self.outgoing.is_sent

    def finish(self, *, reply: Any = None, error: ArealError | None = None) -> None:
        """End the call, unless it has already ended, and wake its waiter."""
        if not self.is_done:
            self.is_done, self.reply, self.error = True, reply, error
            self.signal.set()
            if self.arrival is not None:
                self.arrival.set()

    @property
    def is_overdue(self) -> bool:
        """True if the call has ended because its deadline passed."""
        return type(self.error) is DeadlineExceeded

    def claim(self) -> Any:
        """Return the reply, or raise the error, once."""
        reply, self.reply = self.reply, None
        if self.error is None:
            return reply
        error, self.error = self.error, None
        try:
            raise error
        finally:
            # The traceback refers to this frame; a local variable would make a reference cycle.
            del error

    def make_room(self) -> None:
        """Report taken items in quarters of the buffer."""
        self.num_taken += 1
        if self.num_taken * 4 >= self.limit and not self.is_done and self.outgoing is not None:
            self.channel.peer.connection.send(Kind.TAKEN, self.outgoing.id, seconds=float(self.num_taken))
            self.num_taken = 0

    def cancel(self) -> None:
        """Discard the call if it was not sent, or have its handler cancelled."""
        self.channel.withdraw(self)

    def close(self) -> None:
        """Drop a late answer to the call."""
        self.channel.peer.forget(self)

    def cut(self, cause: str) -> None:
        """End the call with ``Unreachable`` because the connection is lost."""
        name = "its end" if self.message is None else self.message.__name__
        state = "it may have been handled" if self.is_sent else "it was not sent"
        where = f"actor {self.channel.name!r} on {self.channel.peer.node!r} is unreachable: {cause}"
        self.finish(error=Unreachable(f"{where}; of {name}, {state}", sent=self.is_sent))


class Channel(Watched):
    """One remote actor as seen from this side of the connection."""

    def __init__(self, peer: Peer, name: str, incarnation: int, messages: frozenset[tuple[str, str, bool]]) -> None:
        super().__init__()
        self.peer, self.name, self.incarnation, self.messages = peer, name, incarnation, messages
        self.state = ActorState.RUNNING
        self.ref: Ref[Any] | None = None
        self.num_handled = self.num_failed = self.num_cancelled = self.num_running = 0
        self._credit = peer.other.window_messages
        self._bytes_under_way = 0
        self._waiting: deque[Call] = deque()
        self._known: dict[type, tuple[str, str, bool]] = {}

    @property
    def address(self) -> Address:
        """The address of the actor."""
        return Address(node=self.peer.node, name=self.name, incarnation=self.incarnation)

    # ------------------------------------------------------------------------------------------------ sending

    def create(self, kind: Kind, message: AnyMessage[Any], extra: int = 0) -> Call:
        """Return a call for ``message``, encoded but not yet sent.

        Raises:
            ProtocolError: the actor does not handle this message, or the message contains a value that cannot be sent.
        """
        cls = type(message)
        is_stream = kind is Kind.STREAM
        known = self._known.get(cls)
        if known is None:
            protocol = protocol_of(cls)
            known = ("" if protocol is None else protocol.__name__, cls.__name__, is_stream)
            if known not in self.messages:
                raise self._unhandled(cls)
            self._known[cls] = known
        elif known[2] is not is_stream:
            raise self._unhandled(cls)
        data = self.peer.codec.to_data(message, cls, cls.__name__)
        return Call(self, kind, cls, self.peer.encode([self.name, known[0], known[1], data, extra], cls.__name__))

    def create_stop(self) -> Call:
        """Return a call that ends when the actor has ended."""
        return Call(self, Kind.STOP, None, self.peer.codec.encode([self.name]))

    def submit(self, call: Call) -> bool:
        """Send ``call``, or queue it until there is credit, in order. Return whether it was sent.

        Raises:
            Unreachable: the connection is lost.
            ActorStopped: the actor has ended.
        """
        cause = self.peer.connection.cause
        if cause is not None:
            call.cut(cause)
        elif self.final_down is not None:
            call.finish(error=self._stopped(call))
        # ``cut`` and ``finish`` store the error; raise it here, once, instead of waiting.
        call.claim()
        # Queue behind calls that wait already, to keep the order.
        if self._waiting or not self.has_credit:
            self._waiting.append(call)
            return False
        self._release(call)
        return True

    @property
    def has_credit(self) -> bool:
        """True if one more message may be sent now."""
        return self._credit > 0 and self._bytes_under_way < self.peer.other.window_bytes

    def refill(self, num_messages: int, num_bytes: int) -> None:
        """Add returned credit, and send calls that waited for it."""
        self._credit += num_messages
        self._bytes_under_way -= num_bytes
        while self._waiting and self.has_credit:
            self._release(self._waiting.popleft())

    def withdraw(self, call: Call) -> None:
        """Discard ``call`` if it was not sent, or have its handler cancelled, because its asker no longer waits."""
        if call.is_done:
            return
        self.num_cancelled += 1
        outgoing, peer = call.outgoing, self.peer
        if outgoing is None:
            self._waiting.remove(call)
            call.finish(error=ActorStopped("the asker left"))
        # Not written yet: the other side never learns of the call, so its credit is free again.
        elif peer.connection.outbox.withdraw(outgoing):
            peer.forget(call)
            call.finish(error=ActorStopped("the asker left"))
            self.refill(1, call.size)
        else:
            # The first bytes have left, so that only the other side can cancel it now. A stream stays pending until its
            # handler's end is reported, because leaving its block waits for that.
            peer.connection.send(Kind.CANCEL, outgoing.id)
            if call.kind is not Kind.STREAM:
                peer.forget(call)
                call.finish(error=ActorStopped("the asker left"))

    def _release(self, call: Call) -> None:
        self._credit -= 1
        self._bytes_under_way += call.size
        self.peer.send(call)

    # ------------------------------------------------------------------------------------------------ incarnations

    def go_down(self, reason: DownReason, incarnation: int, error: str | None, *, is_restarting: bool) -> None:
        """Record that an incarnation has ended, as far as this side knows, and notify watchers."""
        if self.final_down is not None or incarnation < self.incarnation:
            # A late report about an earlier incarnation.
            return
        assert self.ref is not None, "a channel is made with its ref"
        down = Down(ref=self.ref, incarnation=incarnation, reason=reason, error=error, is_restarting=is_restarting)
        if is_restarting:
            self.incarnation = incarnation + 1
        else:
            self.final_down = down
            self.state = ActorState.STOPPED if reason is DownReason.STOPPED else ActorState.CRASHED
        self.report(down)
        if not is_restarting:
            waiting, self._waiting = self._waiting, deque()
            for call in waiting:
                cause = self.peer.connection.cause
                if cause is None:
                    call.finish(error=self._stopped(call))
                else:
                    call.cut(cause)

    def revive(self, incarnation: int, messages: frozenset[tuple[str, str, bool]]) -> None:
        """Reset the channel for another actor that is now exposed under this name."""
        self.incarnation, self.messages, self.state, self.final_down = incarnation, messages, ActorState.RUNNING, None
        self._known.clear()

    # ------------------------------------------------------------------------------------------------ statistics

    def statistics(self) -> ActorStatistics:
        """Return what this side knows about the actor: the counts cover only the calls of this side."""
        return ActorStatistics(
            name=self.name,
            state=self.state,
            incarnation=self.incarnation,
            num_queued=0,
            num_parked=0,
            num_waiting_senders=len(self._waiting),
            num_running=self.num_running,
            mailbox_size=self.peer.other.window_messages,
            num_handled=self.num_handled,
            num_failed=self.num_failed,
            num_cancelled=self.num_cancelled,
            num_dropped=0,
            mailbox_peak=0,
        )

    def _unhandled(self, message: type) -> ProtocolError:
        known = ", ".join(sorted(name for _, name, _ in self.messages)) or "nothing"
        return ProtocolError(
            f"actor {self.name!r} on {self.peer.node!r} does not take {message.__name__} this way; it handles {known}. "
            "Ask or tell a Message, stream a StreamMessage."
        )

    def _stopped(self, call: Call) -> ActorStopped:
        name = "this" if call.message is None else call.message.__name__
        return ActorStopped(
            f"actor {self.name!r} on {self.peer.node!r} takes no more messages ({self.state}); {name} was not sent"
        )


# ----------------------------------------------------------------------------------------------------------------------
# Refs


class RemoteRef(Ref[P_contra], Generic[P_contra]):
    """A ref to a remote actor.

    See ``Ref`` for the contract; also raises ``Unreachable``, which says if the message was sent.
    """

    __slots__ = ("_channel",)

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    @property
    def address(self) -> Address:
        """The address of the actor, with its present incarnation as far as is known here."""
        return self._channel.address

    @property
    def life(self) -> Life:
        """The channel, which reports the end of each incarnation and of the connection."""
        return self._channel

    async def ask(self, message: Message[P_contra, R], *, timeout: float | None = None) -> R:  # noqa: ASYNC109
        """Send ``message`` and wait for its reply; see ``Ref.ask``."""
        channel = self._channel
        call = channel.create(Kind.ASK, message)
        loop = channel.peer.connection.loop
        call.deadline = loop.effective_deadline()
        if timeout is None:
            return await self._await(call)  # type: ignore[no-any-return]
        deadline = loop.now() + timeout
        call.deadline = min(call.deadline, deadline)
        with loop.new_scope(deadline=deadline):
            return await self._await(call)  # type: ignore[no-any-return]
        state = "the actor had it" if call.is_sent else "it was not sent yet"
        raise DeadlineExceeded(
            f"{type(message).__name__} to actor {channel.name!r} on {channel.peer.node!r} was not answered before its "
            f"deadline; {state}. Allow more time, or see the actor's statistics for what it is busy with."
        )

    async def tell(self, message: Message[P_contra, Any]) -> None:
        """Send ``message``; waits while there is no credit. See ``Ref.tell``."""
        channel = self._channel
        call = channel.create(Kind.TELL, message)
        if channel.submit(call):
            return
        try:
            await call.signal.wait()
        except BaseException:
            channel.withdraw(call)
            raise
        call.claim()

    def tell_nowait(self, message: Message[P_contra, Any]) -> None:
        """Send ``message`` without waiting; see ``Ref.tell_nowait``."""
        channel = self._channel
        call = channel.create(Kind.TELL, message)
        if not channel.submit(call):
            channel.withdraw(call)
            raise MailboxFull(
                f"actor {channel.name!r} on {channel.peer.node!r} gives no credit for another message now; "
                f"use 'await tell' to wait for it, or let it listen with a larger window"
            )

    def stream(
        self, message: StreamMessage[P_contra, Item], *, buffer_size: int = 16
    ) -> AbstractAsyncContextManager[AsyncIterator[Item]]:
        """Open a stream of items; see ``Ref.stream``."""
        check_buffer_size(buffer_size)
        channel, connection = self._channel, self._channel.peer.connection

        def open_call() -> Call:
            call = channel.create(Kind.STREAM, message, buffer_size)
            call.limit = buffer_size
            call.deadline = connection.loop.effective_deadline()
            channel.submit(call)
            return call

        what = f"the handler of {type(message).__name__} in actor {channel.name!r}"
        return Stream(open_call, what, connection.loop, connection.limits.cleanup_seconds)

    async def stop(self, *, grace: float | None = None) -> None:
        """End the actor and wait until it is gone; see ``Ref.stop``.

        Raises:
            Unreachable: the connection was cut before the actor was gone.
        """
        channel = self._channel
        call = channel.create_stop()
        channel.peer.stop(call, grace)
        try:
            await call.signal.wait()
        except BaseException:
            channel.peer.forget(call)
            raise
        call.claim()

    def statistics(self) -> ActorStatistics:
        """Return what this side knows: the counts of its own calls, and whether the actor runs."""
        return self._channel.statistics()

    async def _await(self, call: Call) -> Any:
        channel = self._channel
        channel.submit(call)
        try:
            await call.signal.wait()
            if call.is_overdue:
                # A scope of the caller with the same deadline must expire first.
                await checkpoint()
        except BaseException:
            channel.withdraw(call)
            raise
        return call.claim()


# ----------------------------------------------------------------------------------------------------------------------
# The answering side
#
# A remote ask costs no task here. Its envelope is put in the actor's mailbox like any other, in the order of arrival.
# Where a local asker would be woken, the reply is queued for the writer. The number of messages on their way to a
# mailbox is bounded by the credit that was granted; credit is returned when the mailbox has admitted a message, but not
# while unread replies pile up.


KERNEL_ERRORS: dict[str, type[ArealError]] = {
    kind.__name__: kind for kind in (ActorStopped, DeadlineExceeded, DeadlockError, ProtocolError)
}
"""Errors that the kernel itself raises for an ask; they keep their class across the connection."""


@frozen(kw_only=True, eq=False)
class Exposed:
    """An actor that connections may reach, with its messages by name.

    A peer can have only these classes constructed.
    """

    name: str
    ref: LocalRef[Any]
    messages: dict[tuple[str, str], tuple[type[AnyMessage[Any]], Handler]]

    def to_data(self) -> list[Any]:
        """Return the announcement for the other side: name, incarnation, and the names of the messages."""
        table = [[*names, handler.is_stream] for names, (_, handler) in self.messages.items()]
        return [self.name, self.ref.address.incarnation, table]


def expose(name: str, ref: Ref[Any]) -> Exposed:
    """Return the entry that makes ``ref`` reachable as ``name``.

    Raises:
        ConfigError: the actor does not run in this process.
        ProtocolError: two of its messages have the same names.
    """
    if not isinstance(ref, LocalRef):
        raise ConfigError(f"{ref!r} does not live in this process; expose it where it lives, and connect to there")
    messages: dict[tuple[str, str], tuple[type[AnyMessage[Any]], Handler]] = {}
    for message, handler in ref.cell.handlers.items():
        protocol = protocol_of(message)
        if protocol is None or message is Down:
            continue
        names = (protocol.__name__, message.__name__)
        if names in messages:
            raise ProtocolError(f"actor {ref.name!r} handles two messages named {'.'.join(names)}; rename one of them")
        messages[names] = (message, handler)
    return Exposed(name=name, ref=ref, messages=messages)


def check_free(exposed: Mapping[str, Exposed], name: str) -> None:
    """Check that no running actor is exposed as ``name``.

    Raises:
        ConfigError: one is.
    """
    old = exposed.get(name)
    if old is not None and not old.ref.cell.gone.is_set():
        raise ConfigError(f"an actor is exposed as {name!r} already; choose another name")


class Server:
    """The exposed actors, as one connection reaches them."""

    def __init__(self, peer: Peer, exposed: dict[str, Exposed]) -> None:
        self._peer = peer
        self._exposed = exposed
        self._running: dict[int, Ask] = {}
        self._credit = Credit(peer.limits)
        self._watches: list[tuple[Exposed, Callable[[Down], object]]] = []
        self._num_unadmitted: Counter[str] = Counter()
        self._admission = ChangeSignal()
        self._withdrawn_id = 0
        self._last_id = 0
        for one in exposed.values():
            self.watch(one)

    def add(self, exposed: Exposed) -> None:
        """Expose another actor.

        Raises:
            ConfigError: a running actor has the name.
        """
        check_free(self._exposed, exposed.name)
        self._exposed[exposed.name] = exposed
        self.watch(exposed)

    def watch(self, exposed: Exposed) -> None:
        """Notify the other side of each end of the actor."""
        note = _Note(self._peer, exposed.name)
        self._watches.append((exposed, note))
        exposed.ref.cell.watch(note)

    # ------------------------------------------------------------------------------------------------ requests

    def on_request(self, frame: Frame) -> None:
        """Deliver a message to an actor.

        Raises:
            ProtocolError: it violates the rules of the connection. An invalid message only fails its own call.
        """
        if frame.id <= self._last_id:
            raise ProtocolError(f"request {frame.id} came after {self._last_id}; it was delivered once already")
        self._last_id = frame.id
        words = self._peer.words(frame, str, str, str, object, int)  # actor, protocol, message, body and buffer
        name = words[0]
        if name not in self._exposed:
            self._refuse(frame, name, _unknown(name, self._exposed))
            return
        self._credit.use(name, frame.num_bytes)
        try:
            self._accept(frame, words)
        except ArealError as error:
            # A refused message never occupies the mailbox, so its credit is returned at once.
            self.give_credit(name, frame.num_bytes)
            self._refuse(frame, name, error)

    def on_stop(self, frame: Frame) -> None:
        """Stop an actor on request, and answer when it has ended."""
        (name,) = self._peer.words(frame, str)
        exposed = self._exposed.get(name)
        if exposed is None:
            self._refuse(frame, name, _unknown(name, self._exposed))
            return
        exposed.ref.cell.watch(_StopReply(self._peer, frame.id))
        grace = exposed.ref.cell.system.grace if math.isinf(frame.seconds) else frame.seconds
        if self._num_unadmitted[name]:
            self._peer.connection.start_soon(partial(self._stop_after_admission, exposed, grace))
        else:
            exposed.ref.cell.request_stop(grace)

    def on_cancel(self, call: int) -> None:
        """Cancel a call whose asker has left."""
        ask = self._running.get(call)
        if ask is not None:
            ask.cell.abandon(ask)
        elif call > self._last_id:
            # The request is still arriving, or follows in the same read; it must not start.
            self._withdrawn_id = call

    def on_taken(self, call: int, num_items: int) -> None:
        """Grant the handler of a stream room for more items."""
        ask = self._running.get(call)
        if isinstance(ask, _RemoteStreamCall):
            ask.grant(num_items)

    def on_cut(self) -> None:
        """Cancel all running calls, because the connection is lost."""
        running, self._running = self._running, {}
        for ask in running.values():
            ask.cell.abandon(ask)
        for exposed, note in self._watches:
            exposed.ref.cell.unwatch(note)

    def _accept(self, frame: Frame, words: list[Any]) -> None:
        name, protocol, message, body, limit = words
        exposed = self._exposed[name]
        known = exposed.messages.get((protocol, message))
        if known is None or known[1].is_stream is not (frame.kind is Kind.STREAM):
            names = ", ".join(sorted(one for _, one in exposed.messages)) or "nothing"
            raise ProtocolError(f"actor {name!r} does not take {protocol}.{message} this way; it handles {names}")
        if frame.id == self._withdrawn_id:
            raise ActorStopped("the asker left")
        cls, handler = known
        value = self._peer.codec.from_data(body, cls, cls.__name__)
        num_bytes, ref = frame.num_bytes, exposed.ref
        if frame.kind is Kind.TELL:
            credit = _Once(lambda: self.give_credit(name, num_bytes))
            self._num_unadmitted[name] += 1
            try:
                ref.queue_tell(value, lambda admitted: self._note_told(credit, value, name, admitted=admitted))
            except ArealError:
                self._num_unadmitted[name] -= 1
                raise
            return
        deadline = ref.cell.loop.now() + frame.seconds
        if frame.kind is Kind.STREAM:
            ask: Ask = _RemoteStreamCall(value, handler, ref.cell, deadline, self._peer, frame.id, limit)
        else:
            ask = Ask(value, handler, ref.cell, None, deadline)
        answering = ask.signal = _Answering(self, frame.id, ask, num_bytes, name)
        self._running[frame.id] = ask
        try:
            answering.on_admission(True)
            ref.send(ask)
        except ArealError:
            del self._running[frame.id]
            raise

    async def _stop_after_admission(self, exposed: Exposed, grace: float) -> None:
        """Stop the actor once earlier messages have been admitted, within ``grace`` seconds in total."""
        loop = exposed.ref.cell.loop
        deadline = loop.now() + grace
        with loop.new_scope(deadline=deadline):
            while self._num_unadmitted[exposed.name]:
                await self._admission.wait()
        exposed.ref.cell.request_stop(max(deadline - loop.now(), 0.0))

    def _note_told(self, credit: _Once, message: AnyMessage[Any], name: str, *, admitted: bool) -> None:
        credit()
        self._num_unadmitted[name] -= 1
        if not self._num_unadmitted[name]:
            self._admission.notify()
        if not admitted:
            kind = type(message).__name__
            _log.warning("message_lost", actor=name, node=self._peer.node, message=kind, reason="the actor has ended")

    # ------------------------------------------------------------------------------------------------ answers

    def answer(self, call: int, ask: Ask) -> None:
        """Send the outcome of ``ask``."""
        if self._running.pop(call, None) is None or self._peer.connection.cause is not None:
            return
        if ask.error is not None:
            self._fail(call, ask.cell.name, ask.error)
        elif isinstance(ask, StreamCall):
            self._peer.queue(Outgoing(Kind.END, call, []))
        else:
            try:
                outgoing = Outgoing(Kind.REPLY, call, self._peer.encode_reply(ask.handler.message, ask.claim()))
            except ProtocolError as error:
                self._fail(call, ask.cell.name, error, is_handlers=True)
            else:
                self._peer.connection.post(outgoing, is_alone=not self._running, is_ahead=True)

    def give_credit(self, name: str, num_bytes: int) -> None:
        """Count a message that was admitted or refused.

        Credit is returned in batches, and only while replies are read.
        """
        if self._credit.give_back(name, num_bytes):
            self.flush_credit()

    def flush_credit(self) -> None:
        """Return accumulated credit, unless too many bytes wait to be written."""
        connection, limits = self._peer.connection, self._peer.limits
        if connection.outbox.num_bytes > limits.max_pending_bytes or connection.cause is not None:
            return
        for words in self._credit.collect():
            connection.outbox.put_ahead(Outgoing(Kind.CREDIT, 0, self._peer.codec.encode([*words])))

    @property
    def owes_credit(self) -> bool:
        """True if accumulated credit is withheld until replies have been read."""
        return self._credit.is_due

    def _refuse(self, frame: Frame, name: str, error: ArealError) -> None:
        if frame.kind is Kind.TELL:
            _log.warning("message_lost", actor=name, node=self._peer.node, reason=str(error))
        else:
            self._fail(frame.id, name, error)

    def _fail(self, call: int, name: str, error: ArealError, *, is_handlers: bool = False) -> None:
        kernel = type(error).__name__ if type(error).__name__ in KERNEL_ERRORS and not is_handlers else None
        words = [kernel, str(error)] if kernel else [None, error_to_data(error, name)]
        self._peer.queue(Outgoing(Kind.ERROR, call, self._peer.codec.encode(words)))


class _Once:
    """A callback that returns the credit of one message, once."""

    __slots__ = ("_give",)

    def __init__(self, give: Callable[[], object]) -> None:
        self._give: Callable[[], object] | None = give

    def __call__(self) -> None:
        give, self._give = self._give, None
        if give is not None:
            give()


class _Answering:
    """The signal of a remote ask: sends the answer and returns the message's credit, once, instead of waking a task."""

    __slots__ = ("_ask", "_call", "_name", "_num_bytes", "_server")

    def __init__(self, server: Server, call: int, ask: Ask, num_bytes: int, name: str) -> None:
        self._server, self._call, self._name = server, call, name
        self._ask: Ask | None = ask
        self._num_bytes: int | None = num_bytes

    def on_admission(self, _: bool) -> None:  # noqa: FBT001 - the signature of such callbacks
        """Return the credit, because the message has been admitted or refused."""
        num_bytes, self._num_bytes = self._num_bytes, None
        if num_bytes is not None:
            self._server.give_credit(self._name, num_bytes)

    def set(self) -> None:
        """Send the outcome of the ask. If it was never admitted, its credit is returned now."""
        self.on_admission(False)
        # The ask refers to this object. Without breaking the cycle, received arrays stayed in memory until the garbage
        # collector ran: a process that was sent 150 arrays of 16 MiB grew to 1.4 GiB.
        ask, self._ask = self._ask, None
        if ask is not None:
            self._server.answer(self._call, ask)

    async def wait(self) -> None:
        """Do nothing: no task of this process waits for a remote ask."""


class _RemoteStreamCall(StreamCall):
    """A stream whose consumer, and therefore its buffer, is in another process; the room there is known as credit."""

    __slots__ = ("_call", "_credit", "_num_sent", "_peer", "_reply")

    def __init__(  # noqa: PLR0917 - all of an envelope, and where its items go
        self, message: Any, handler: Handler, cell: Any, deadline: float, peer: Peer, call: int, limit: int
    ) -> None:
        super().__init__(message, handler, cell, None, deadline, max(limit, 1))
        self._peer, self._call, self._credit = peer, call, self.limit
        self._num_sent = 0
        self._reply = type(message)

    async def put(self, item: Any) -> None:
        """Send one item; waits while the consumer has no room."""
        while not self._credit:
            self.room = self.cell.loop.new_signal()
            await self.room.wait()
        self._credit -= 1
        body = self._peer.encode_reply(self._reply, item)
        self._peer.queue(Outgoing(Kind.ITEM, self._call, body, float(self._num_sent)))
        self._num_sent += 1

    def grant(self, num_items: int) -> None:
        """Add credit for ``num_items`` that the consumer has taken."""
        # Limited, so that a peer cannot raise the bound by reporting items that it was never sent.
        self._credit = min(self._credit + num_items, self.limit)
        room, self.room = self.room, None
        if room is not None:
            room.set()


class _Note:
    """A watcher that reports the ends of an actor to a peer."""

    def __init__(self, peer: Peer, name: str) -> None:
        self._peer, self._name = peer, name

    def __call__(self, down: Down) -> None:
        words = [self._name, down.incarnation, str(down.reason), down.error, down.is_restarting]
        self._peer.queue(Outgoing(Kind.DOWN, 0, self._peer.codec.encode(words)))


class _StopReply:
    """A watcher that answers a stop request when the actor has ended for good."""

    def __init__(self, peer: Peer, call: int) -> None:
        self._peer, self._call = peer, call

    def __call__(self, down: Down) -> None:
        if not down.is_restarting:
            self._peer.queue(Outgoing(Kind.END, self._call, []))


def _unknown(name: object, exposed: dict[str, Exposed]) -> ActorStopped:
    known = ", ".join(sorted(exposed)) or "none"
    return ActorStopped(f"no actor {name!r} is exposed here; exposed are {known}")


# ----------------------------------------------------------------------------------------------------------------------
# Both sides


_REQUESTS = (Kind.ASK, Kind.TELL, Kind.STREAM)


class Peer:
    """A connected node. Made by ``connect`` and ``listen``."""

    def __init__(
        self, connection: Connection, other: Hello, limits: Limits, exposed: dict[str, Exposed], welcome: Any
    ) -> None:
        self.connection, self.other, self.limits = connection, other, limits
        self.codec = Codec()
        self._reply_kinds: dict[type[AnyMessage[Any]], Any] = {}
        self._channels: dict[str, Channel] = {}
        self._pending: dict[int, Call] = {}
        self._next_id = 1
        self._followers: dict[Callable[[], object], None] = {}
        self._server = Server(self, dict(exposed))
        if not isinstance(welcome, (list, tuple)):
            raise ProtocolError("a welcome names no actors")
        for words in welcome:
            self._on_exposed(words)

    @property
    def node(self) -> str:
        """The other node's name."""
        return self.other.node

    @property
    def incarnation(self) -> int:
        """The incarnation of the other node."""
        return self.other.incarnation

    @property
    def is_connected(self) -> bool:
        """True if the connection is up, as far as is known."""
        return self.connection.cause is None

    @property
    def exposed(self) -> tuple[str, ...]:
        """Names of the actors that the other side exposes."""
        return tuple(self._channels)

    def ref(self, protocol: type[P], name: str) -> Ref[P]:
        """Return a ref to the actor that the other side exposes as ``name``.

        Raises:
            ActorStopped: it exposes no such actor.
            ProtocolError: the actor does not speak ``protocol``.
        """
        channel = self._channels.get(name)
        if channel is None:
            known = ", ".join(sorted(self._channels)) or "none"
            raise ActorStopped(f"node {self.node!r} exposes no actor {name!r}; it exposes {known}")
        if not self.has(protocol, name):
            spoken = ", ".join(sorted({spoken for spoken, _, _ in channel.messages})) or "nothing"
            raise ProtocolError(
                f"actor {name!r} on {self.node!r} does not speak {protocol.__name__}; it speaks {spoken}"
            )
        return cast("Ref[P]", channel.ref)

    def has(self, protocol: type, name: str) -> bool:
        """Return whether the other side exposes an actor ``name`` that speaks ``protocol``."""
        channel = self._channels.get(name)
        return channel is not None and any(spoken == protocol.__name__ for spoken, _, _ in channel.messages)

    async def wait_exposed(self, name: str) -> None:
        """Wait until the other side exposes an actor ``name``, which it may do at any time.

        Raises:
            Unreachable: the connection was cut before that.
        """
        while name not in self._channels:
            if self.connection.cause is not None:
                raise Unreachable(
                    f"actor {name!r} on {self.node!r} is unreachable: {self.connection.cause}", sent=False
                )
            news = anyio.Event()
            self.follow(news.set)
            try:
                await news.wait()
            finally:
                self.unfollow(news.set)

    def follow(self, follower: Callable[[], object]) -> None:
        """Call ``follower`` whenever the other side exposes an actor, and when the connection is cut."""
        self._followers[follower] = None

    def unfollow(self, follower: Callable[[], object]) -> None:
        """Remove ``follower``, if it is registered."""
        self._followers.pop(follower, None)

    def expose(self, name: str, ref: Ref[Any]) -> None:
        """Make an actor of this process reachable over this connection, whichever side opened the connection.

        Raises:
            ConfigError: a running actor has the name, or the actor does not run in this process.
        """
        self.add(expose(name, ref))

    async def wait_closed(self) -> str:
        """Wait until the connection is closed, and return the cause."""
        await self.connection.closed.wait()
        return self.connection.cause or ""

    def close(self, cause: str = "this side has closed the connection") -> None:
        """Cut the connection at once."""
        self.connection.cut(cause)

    # ------------------------------------------------------------------------------------------------ sending

    def send(self, call: Call) -> None:
        """Send ``call`` under the next free id."""
        seconds = math.inf if math.isinf(call.deadline) else max(call.deadline - self.connection.loop.now(), 0.0)
        outgoing = call.outgoing = Outgoing(call.kind, self._next_id, call.parts, seconds)
        # The outgoing message holds the buffers from now on.
        call.parts = []
        self._next_id += 1
        if call.kind is Kind.TELL:
            call.finish()
        else:
            call.channel.num_running += 1
            self._pending[outgoing.id] = call
        self.connection.post(outgoing, is_alone=call.kind is not Kind.TELL and len(self._pending) == 1)

    def queue(self, outgoing: Outgoing) -> None:
        """Queue an answer in the data lane, unless the connection is cut."""
        if self.connection.cause is None:
            self.connection.outbox.put(outgoing)

    def stop(self, call: Call, grace: float | None) -> None:
        """Send a request to stop an actor; ``call`` ends when the actor has ended."""
        if self.connection.cause is not None:
            call.cut(self.connection.cause)
            return
        call.outgoing = Outgoing(Kind.STOP, self._next_id, call.parts, math.inf if grace is None else grace)
        self._pending[self._next_id] = call
        self._next_id += 1
        call.channel.num_running += 1
        self.connection.outbox.put(call.outgoing)

    def forget(self, call: Call) -> None:
        """Remove a call whose asker has left; a late answer to it is dropped."""
        if call.outgoing is not None and self._pending.pop(call.outgoing.id, None) is not None:
            call.channel.num_running -= 1

    def encode_reply(self, message: type[AnyMessage[Any]], reply: Any) -> list[Buffer]:
        """Return a reply to ``message`` (for a stream, an item) as parts.

        Raises:
            ProtocolError: the reply cannot be sent.
        """
        what = f"the reply to {message.__name__}"
        return self.encode([self.codec.to_data(reply, self._reply_kind(message), what)], what)

    def encode(self, words: list[Any], what: str) -> list[Buffer]:
        """Encode ``words`` as parts, within the size that the other side accepts.

        Raises:
            ProtocolError: a value cannot be encoded, or the message is larger than the other side accepts.
        """
        parts = self.codec.encode(words, what)
        if len(parts) > 1 or len(parts[0]) > CHUNK_BYTES:
            num_bytes, most = sum(map(len, parts)), self.other.max_message_bytes
            if num_bytes > most:
                raise ProtocolError(f"{what} has {num_bytes} bytes; {self.node!r} takes at most {most} at once")
        return parts

    def add(self, exposed: Exposed) -> None:
        """Expose an actor and announce it to the other side.

        Raises:
            ConfigError: a running actor has the name.
        """
        self._server.add(exposed)
        self.announce(exposed)

    def announce(self, exposed: Exposed) -> None:
        """Notify the other side that an actor is exposed."""
        self.queue(Outgoing(Kind.EXPOSED, 0, self.codec.encode(exposed.to_data())))

    # ------------------------------------------------------------------------------------------------ receiving

    def on_frame(self, frame: Frame) -> None:
        """Process a frame; see ``connection.Owner``."""
        kind = frame.kind
        # NaN as a deadline would break the event loop's ordering of timers.
        if frame.seconds != frame.seconds:
            raise ProtocolError(f"a frame of kind {kind.name} has no time")
        if kind in _REQUESTS:
            self._server.on_request(frame)
        elif kind is Kind.CANCEL:
            self._server.on_cancel(frame.id)
        elif kind is Kind.STOP:
            self._server.on_stop(frame)
        elif kind in _ANSWERS:
            _ANSWERS[kind](self, frame)
        else:
            raise ProtocolError(f"a frame of kind {kind.name} is out of place")

    def words(self, frame: Frame, *kinds: Any) -> list[Any]:
        """Decode ``frame`` and check the types of its words.

        Raises:
            ProtocolError: the words are not of these ``kinds``, in this order.
        """
        return _checked(self.codec.decode(frame.parts), kinds, f"a frame of kind {frame.kind.name}")

    def on_written(self) -> None:
        """Return credit that was withheld; see ``connection.Owner``."""
        if self._server.owes_credit:
            self._server.flush_credit()

    def on_cut(self, cause: str) -> None:
        """End all calls and notify watchers; see ``connection.Owner``."""
        pending, self._pending = self._pending, {}
        for call in pending.values():
            call.cut(cause)
        for channel in self._channels.values():
            channel.go_down(DownReason.UNREACHABLE, channel.incarnation, cause, is_restarting=False)
        self._server.on_cut()
        self._notify_followers()

    def _notify_followers(self) -> None:
        for follower in tuple(self._followers):
            follower()

    def _on_reply(self, frame: Frame) -> None:
        call = self._pending.get(frame.id)
        if call is None:
            return  # its asker has left
        (data,) = self.words(frame, object)
        if call.message is None:
            raise ProtocolError("the end of an actor was answered with a reply")
        self._end(call)
        name = self._name(call)
        try:
            call.finish(reply=self.codec.from_data(data, self._reply_kind(call.message), f"the reply to {name}"))
        except ProtocolError as error:
            call.finish(error=error)

    def _on_error(self, frame: Frame) -> None:
        call = self._pending.get(frame.id)
        if call is None:
            return
        kernel, text = self.words(frame, object, object)
        self._end(call)
        call.channel.num_failed += kernel is None
        known = KERNEL_ERRORS.get(kernel) if isinstance(kernel, str) else None
        try:
            error = error_from_data(text) if known is None else known(text)
        except ProtocolError as unreadable:
            error = RemoteError("a remote actor", "an error that cannot be read", str(unreadable))
        call.finish(error=error)

    def _on_item(self, frame: Frame) -> None:
        call = self._pending.get(frame.id)
        if call is None or call.is_done:
            return
        # The consumer's buffer is bounded even if the other side ignores the credit.
        if len(call.buffer) >= call.limit:
            raise ProtocolError(f"a stream of {self._name(call)} sends more than it has credit for")
        # Items are numbered, so that replayed bytes cannot deliver one twice.
        if frame.seconds != call.num_items:
            raise ProtocolError(f"item {frame.seconds:g} of {self._name(call)} came where item {call.num_items} is due")
        call.num_items += 1
        (data,) = self.words(frame, object)
        try:
            call.buffer.append(self.codec.from_data(data, self._reply_kind(call.message), "an item"))
        except ProtocolError as error:
            # An item that cannot be decoded ends the stream: cancel the handler, then report the error.
            call.channel.withdraw(call)
            call.finish(error=error)
        if call.arrival is not None:
            call.arrival.set()

    def _on_end(self, frame: Frame) -> None:
        call = self._pending.get(frame.id)
        if call is not None:
            self._end(call)
            call.finish()

    def _on_taken(self, frame: Frame) -> None:
        if not frame.seconds.is_integer():
            raise ProtocolError(f"{frame.seconds:g} is not a number of items")
        self._server.on_taken(frame.id, int(frame.seconds))

    def _on_credit(self, frame: Frame) -> None:
        name, num_messages, num_bytes = self.words(frame, str, int, int)
        channel = self._channels.get(name)
        if channel is not None:
            channel.refill(num_messages, num_bytes)

    def _on_down(self, frame: Frame) -> None:
        name, incarnation, reason, error, is_restarting = self.words(frame, str, int, str, (str, NoneType), bool)
        channel = self._channels.get(name)
        if reason not in tuple(DownReason):
            raise ProtocolError(f"{reason!r} is not a reason for the end of an actor")
        if channel is not None:
            channel.go_down(DownReason(reason), incarnation, error, is_restarting=is_restarting)

    def _on_exposed_frame(self, frame: Frame) -> None:
        self._on_exposed(self.words(frame, str, int, list))
        self._notify_followers()

    def _on_exposed(self, words: Any) -> None:
        name, incarnation, table = _checked(words, (str, int, list), "the word of an actor")
        rows = [_checked(row, (str, str, bool), f"what actor {name!r} handles") for row in table]
        messages = frozenset((protocol, message, is_stream) for protocol, message, is_stream in rows)
        channel = self._channels.get(name)
        if channel is None:
            channel = self._channels[name] = Channel(self, name, incarnation, messages)
            channel.ref = RemoteRef(channel)
        else:
            channel.revive(incarnation, messages)

    def _end(self, call: Call) -> None:
        assert call.outgoing is not None, "what is pending was sent"
        del self._pending[call.outgoing.id]
        call.channel.num_handled += 1
        call.channel.num_running -= 1

    def _reply_kind(self, message: type[AnyMessage[Any]] | None) -> Any:
        assert message is not None, "only messages have replies"
        kind = self._reply_kinds.get(message, self)
        if kind is self:
            kind = self._reply_kinds[message] = reply_of(message)
        return kind

    def _name(self, call: Call) -> str:
        return "its end" if call.message is None else call.message.__name__


def _checked(words: Any, kinds: tuple[Any, ...], what: str) -> list[Any]:
    if not isinstance(words, list) or len(words) != len(kinds) or not all(map(isinstance, words, kinds)):
        raise ProtocolError(f"{what} has {len(kinds)} words of other kinds than {words!r:.200}")
    return words


_ANSWERS: dict[Kind, Callable[[Peer, Frame], None]] = {
    Kind.REPLY: Peer._on_reply,  # noqa: SLF001 - a table of its own methods
    Kind.ERROR: Peer._on_error,  # noqa: SLF001
    Kind.ITEM: Peer._on_item,  # noqa: SLF001
    Kind.END: Peer._on_end,  # noqa: SLF001
    Kind.TAKEN: Peer._on_taken,  # noqa: SLF001
    Kind.CREDIT: Peer._on_credit,  # noqa: SLF001
    Kind.DOWN: Peer._on_down,  # noqa: SLF001
    Kind.EXPOSED: Peer._on_exposed_frame,  # noqa: SLF001
}
