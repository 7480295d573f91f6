"""The asking side of a connection: the calls that have not ended, and the credit that each remote actor grants.

A ``Channel`` is one remote actor as seen from here: its credit, the senders that wait for it, its watchers and its
present incarnation. A ``Call`` is one message; it ends exactly once.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any

from areal_actors.core.loops import Signal
from areal_actors.core.message import Address, AnyMessage, protocol_of
from areal_actors.core.ref import Down, DownReason, Watched
from areal_actors.core.remote.frames import Buffer, Kind, Outgoing
from areal_actors.core.runtime import PENDING
from areal_actors.core.statistics import ActorState, ActorStatistics
from areal_actors.errors import ActorStopped, ArealError, ProtocolError, Unreachable

if TYPE_CHECKING:
    from areal_actors.core.ref import Ref
    from areal_actors.core.remote.peer import Peer

__all__ = ["Call", "Channel"]


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
        self.num_items = 0
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

    def claim_error(self) -> ArealError:
        """Return the error, once, to be raised.

        Its traceback refers to this object, so keeping it would make a reference cycle.
        """
        assert self.error is not None, "it has not failed"
        error, self.error = self.error, None
        return error

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
        known = self._known.get(cls) or self._learn(cls, is_stream=kind is Kind.STREAM)
        if known[2] is not (kind is Kind.STREAM):
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
        elif self.last_words is not None:
            call.finish(error=self._stopped(call))
        # ``cut`` and ``finish`` store the error; raise it here, once, instead of waiting.
        if call.error is not None:
            raise call.claim_error()
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
        if self.last_words is not None or incarnation < self.incarnation:
            return  # a late report about an earlier incarnation
        assert self.ref is not None, "a channel is made with its ref"
        down = Down(ref=self.ref, incarnation=incarnation, reason=reason, error=error, is_restarting=is_restarting)
        if is_restarting:
            self.incarnation = incarnation + 1
        else:
            self.last_words = down
            self.state = ActorState.STOPPED if reason is DownReason.STOPPED else ActorState.CRASHED
        self.report(down)
        if not is_restarting:
            self._end_waiting()

    def revive(self, incarnation: int, messages: frozenset[tuple[str, str, bool]]) -> None:
        """Reset the channel for another actor that is now exposed under this name."""
        self.incarnation, self.messages, self.state, self.last_words = incarnation, messages, ActorState.RUNNING, None
        self._known.clear()

    def _end_waiting(self) -> None:
        waiting, self._waiting = self._waiting, deque()
        for call in waiting:
            cause = self.peer.connection.cause
            if cause is None:
                call.finish(error=self._stopped(call))
            else:
                call.cut(cause)

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

    def _learn(self, message: type[AnyMessage[Any]], *, is_stream: bool) -> tuple[str, str, bool]:
        protocol = protocol_of(message)
        name = "" if protocol is None else protocol.__name__
        if (name, message.__name__, is_stream) not in self.messages:
            raise self._unhandled(message)
        self._known[message] = (name, message.__name__, is_stream)
        return self._known[message]

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
