"""The answering side of a connection: delivers requests to the exposed actors and sends their answers.

A remote ask costs no task here. Its envelope is put in the actor's mailbox like any other, in the order of arrival.
Where a local asker would be woken, the reply is queued for the writer. The number of messages on their way to a mailbox
is bounded by the credit that was granted; credit is returned when the mailbox has admitted a message, but not while
unread replies pile up.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
from attrs import frozen

from areal_actors.core.failure import error_to_data
from areal_actors.core.message import AnyMessage, Handler, protocol_of
from areal_actors.core.ref import Down, Ref
from areal_actors.core.remote.credit import Credit
from areal_actors.core.remote.frames import Frame, Kind, Outgoing
from areal_actors.core.runtime import Ask, LocalRef, StreamCall
from areal_actors.errors import (
    ActorStopped,
    ArealError,
    ConfigError,
    DeadlineExceeded,
    DeadlockError,
    ProtocolError,
)

if TYPE_CHECKING:
    from areal_actors.core.remote.peer import Peer

__all__ = ["KERNEL_ERRORS", "Exposed", "Server", "check_free", "expose"]

logger = logging.getLogger(__name__)

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
        self._admission: anyio.Event | None = None
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
        exposed.ref.cell.watch(_Farewell(self._peer, frame.id))
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
        elif call > self._last_id:  # the request is still arriving, or follows in the same read; it must not start
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
        self._deliver(frame, exposed, value, handler, limit)

    def _deliver(self, frame: Frame, exposed: Exposed, value: Any, handler: Handler, limit: int) -> None:
        num_bytes, name, ref = frame.num_bytes, exposed.name, exposed.ref
        if frame.kind is Kind.TELL:
            credit = _Once(lambda: self.give_credit(name, num_bytes))
            self._num_unadmitted[name] += 1
            try:
                ref.accept(value, lambda admitted: self._note_told(credit, value, name, admitted=admitted))
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
            ref.accept(ask, answering.on_admission)
        except ArealError:
            del self._running[frame.id]
            raise

    async def _stop_after_admission(self, exposed: Exposed, grace: float) -> None:
        """Stop the actor once earlier messages have been admitted, within ``grace`` seconds in total."""
        loop = exposed.ref.cell.loop
        deadline = loop.now() + grace
        with loop.new_scope(deadline=deadline):
            while self._num_unadmitted[exposed.name]:
                if self._admission is None or self._admission.is_set():
                    self._admission = anyio.Event()
                await self._admission.wait()
        exposed.ref.cell.request_stop(max(deadline - loop.now(), 0.0))

    def _note_told(self, credit: _Once, message: AnyMessage[Any], name: str, *, admitted: bool) -> None:
        credit()
        self._num_unadmitted[name] -= 1
        if not self._num_unadmitted[name] and self._admission is not None:
            self._admission.set()
        if not admitted:
            kind = type(message).__name__
            logger.warning("%s, told to actor %r by node %r, is lost: the actor has ended", kind, name, self._peer.node)

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
                outgoing = Outgoing(Kind.REPLY, call, self._peer.encode_reply(ask.handler.message, ask.claim_reply()))
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
            logger.warning("a message told to actor %r by node %r is lost: %s", name, self._peer.node, error)
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
        super().__init__(message, handler, cell, None, deadline, limit=max(limit, 1))
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


class _Farewell:
    """A watcher that answers a stop request when the actor has ended for good."""

    def __init__(self, peer: Peer, call: int) -> None:
        self._peer, self._call = peer, call

    def __call__(self, down: Down) -> None:
        if not down.is_restarting:
            self._peer.queue(Outgoing(Kind.END, self._call, []))


def _unknown(name: object, exposed: dict[str, Exposed]) -> ActorStopped:
    known = ", ".join(sorted(exposed)) or "none"
    return ActorStopped(f"no actor {name!r} is exposed here; exposed are {known}")
