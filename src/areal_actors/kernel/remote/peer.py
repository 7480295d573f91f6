"""The two ends of a connection: refs to the actors that the other side exposes, and delivery to those of this process.

After the handshake both sides are equal: each may ask the actors that the other exposes. A peer is one connection to
one incarnation of one node. When it is cut, all pending calls end as ``Unreachable``, watchers are notified, and
nothing is retried: a new connection is a new peer, and frames of the old one cannot reach it.

A remote ref differs from a local one in two ways. A message is encoded when it is sent, so that values that cannot be
encoded are refused at once. A deadlock across processes is not detected; use deadlines there.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from types import NoneType
from typing import Any, Generic, Protocol, TypeVar

from anyio.lowlevel import checkpoint
from attrs import frozen

from areal_actors.errors import (
    ActorError,
    ActorStopped,
    ArealError,
    ConfigError,
    DeadlineExceeded,
    DeadlockError,
    ProtocolError,
    RemoteError,
    Unreachable,
)
from areal_actors.kernel.asks import Ask, StreamCall
from areal_actors.kernel.failure import error_from_data, error_to_data
from areal_actors.kernel.message import (
    Address,
    AnyMessage,
    Handler,
    Message,
    MessageClass,
    StreamMessage,
    protocol_of,
    reply_of,
)
from areal_actors.kernel.ref import ActorState, ActorStatistics, Down, DownReason, Ref, Watched
from areal_actors.kernel.remote.codec import Codec
from areal_actors.kernel.remote.connection import Connection
from areal_actors.kernel.remote.frames import Buffer, Frame, Kind, Limits, Outgoing
from areal_actors.kernel.remote.hello import Hello
from areal_actors.kernel.runtime import LocalRef
from areal_actors.kernel.stream import Stream, check_buffer_size
from areal_actors.lib.change_signal import ChangeSignal
from areal_actors.lib.loops import Signal, running_loop
from areal_actors.lib.telemetry import get_logger

_log = get_logger(__name__)

P = TypeVar("P")
P_contra = TypeVar("P_contra", contravariant=True)
R = TypeVar("R")
Item = TypeVar("Item")

Names = tuple[str, str, bool]
"""A message that an actor handles: its protocol, its class, and whether it is answered by a stream."""


# ----------------------------------------------------------------------------------------------------------------------
# The asking side
#
# A ``Call`` is one message; it ends exactly once. An ask waits for its reply, a stream for its items, and a tell until
# the mailbox has admitted the message, so that the number of calls is bounded by their senders.


class Call:
    """One message to a remote actor, or the stream that it opened."""

    def __init__(self, ref: RemoteRef[Any], peer: Peer, kind: Kind, message: MessageClass) -> None:
        self.ref, self.peer, self.kind, self.message = ref, peer, kind, message
        self.name = message.__name__
        self.outgoing = Outgoing(kind)
        self.signal: Signal = peer.connection.loop.new_signal()
        """Set when the call has ended."""
        self.is_done = False
        self.reply: Any = None
        self.error: ArealError | None = None
        self.buffer: deque[Any] = deque()
        self.limit = 0
        self.num_taken = 0
        self.arrival: Signal | None = None

    @property
    def is_overdue(self) -> bool:
        """True if the call has ended because its deadline passed."""
        return type(self.error) is DeadlineExceeded

    def finish(self, *, reply: Any = None, error: ArealError | None = None) -> None:
        """End the call, unless it has already ended, and wake its waiter."""
        if not self.is_done:
            self.is_done, self.reply, self.error = True, reply, error
            self.signal.set()
            if self.arrival is not None:
                self.arrival.set()

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

    def cut(self, cause: str) -> None:
        """End the call with ``Unreachable`` because the connection is lost."""
        is_sent = self.outgoing.is_sent
        state = "it may have been handled" if is_sent else "it was not sent"
        self.finish(
            error=Unreachable(f"{self.ref.where} is unreachable: {cause}; of {self.name}, {state}", sent=is_sent)
        )

    def cancel(self) -> None:
        """Discard the call if it was not written, or have its handler cancelled."""
        if self.is_done:
            return
        peer = self.peer
        self.ref.num_cancelled += 1
        if not peer.connection.withdraw(self.outgoing):
            # The first bytes have left, so that only the other side can cancel it now.
            peer.connection.send(Outgoing(Kind.CANCEL, self.outgoing.id))
            if self.kind is Kind.STREAM:
                # Leaving its block waits for the end of the handler.
                return
        self.peer.forget(self)
        self.finish(error=ActorStopped("the asker left"))

    def make_room(self) -> None:
        """Report taken items in quarters of the buffer."""
        self.num_taken += 1
        if self.num_taken * 4 >= self.limit and not self.is_done:
            words = self.peer.codec.encode([self.num_taken])
            self.peer.connection.send(Outgoing(Kind.TAKEN, self.outgoing.id, words))
            self.num_taken = 0


class Source(Protocol):
    """A connection that is established again whenever it is lost, as ``reconnect`` implements it."""

    name: str
    cause: str
    is_closed: bool

    async def wait_exposed(self, name: str) -> Peer:
        """Wait until the connection is up and the node exposes an actor ``name``."""
        ...


class RemoteRef(Watched, Ref[P_contra], Generic[P_contra]):
    """A ref to a remote actor: of one connection (``peer``), or of each connection of ``source`` in turn.

    See ``Ref`` for the contract; also raises ``Unreachable``, which says if the message was sent.
    """

    def __init__(self, name: str, node: str, limits: Limits, *, source: Source | None = None) -> None:
        super().__init__()
        self.peer: Peer | None = None
        """The node's present incarnation."""
        self.where = f"actor {name!r} on {node!r}"
        self.messages: frozenset[Names] = frozenset()
        self.num_handled = self.num_failed = self.num_cancelled = self.num_running = 0
        self._name, self._node, self._limits, self._source = name, node, limits, source
        self._loop = running_loop()
        self._incarnation, self._state = 1, ActorState.STARTING

    @property
    def address(self) -> Address:
        """The address of the actor, with its present incarnation as far as is known here."""
        return Address(node=self._node, name=self._name, incarnation=self._incarnation)

    async def ask(self, message: Message[P_contra, R], *, timeout: float | None = None) -> R:  # noqa: ASYNC109
        """Send ``message`` and wait for its reply; see ``Ref.ask``.

        ``timeout`` includes the wait for the connection.
        """
        calls: list[Call] = []
        if timeout is None:
            return await self._call(Kind.ASK, message, calls)  # type: ignore[no-any-return]
        with self._loop.new_scope(deadline=self._loop.now() + timeout):
            return await self._call(Kind.ASK, message, calls)  # type: ignore[no-any-return]
        name = type(message).__name__
        if not calls and self._source is not None:
            raise DeadlineExceeded(
                f"{name} to {self.where} was not sent before its deadline: the connection is down "
                f"({self._source.cause})"
            )
        state = "the actor had it" if calls and calls[0].outgoing.is_sent else "it was not sent yet"
        raise DeadlineExceeded(
            f"{name} to {self.where} was not answered before its deadline; {state}. "
            "Allow more time, or see the actor's statistics for what it is busy with."
        )

    async def tell(self, message: Message[P_contra, Any]) -> None:
        """Send ``message`` and wait until the mailbox has admitted it; see ``Ref.tell``."""
        await self._call(Kind.TELL, message, [])

    async def _call(self, kind: Kind, message: Message[Any, Any], calls: list[Call]) -> Any:
        """Send ``message`` and wait for its end; ``calls`` gets the call, once there is one."""

        async def act(peer: Peer) -> Any:
            call = self._create(peer, kind, message)
            calls[:] = [call]
            self._send(call, self._loop.effective_deadline())
            try:
                await call.signal.wait()
                if call.is_overdue:
                    # A scope of the caller with the same deadline must expire first.
                    await checkpoint()
            except BaseException:
                call.cancel()
                raise
            return call.claim()

        return await self._retry(act)

    def stream(self, message: StreamMessage[P_contra, Item], *, buffer_size: int = 16) -> Stream[Item]:
        """Open a stream of items; see ``Ref.stream``."""
        check_buffer_size(buffer_size)

        async def open_call(peer: Peer) -> Call:
            call = self._create(peer, Kind.STREAM, message, buffer_size)
            call.limit = buffer_size
            self._send(call, self._loop.effective_deadline())
            return call

        what = f"the handler of {type(message).__name__} in {self.where}"
        return Stream(lambda: self._retry(open_call), what, self._loop, self._limits.cleanup_seconds)

    async def stop(self, *, grace: float | None = None) -> None:  # noqa: ARG002 - the signature of a ref
        """Raise ``ActorError``: an actor is stopped in its own process, whose supervision decides about it."""
        raise ActorError(f"{self.where} can be stopped only in its own process")

    def statistics(self) -> ActorStatistics:
        """Return what this side knows about the actor: the counts cover only the calls of this side."""
        return ActorStatistics(
            name=self._name,
            state=self._state,
            incarnation=self._incarnation,
            num_running=self.num_running,
            num_handled=self.num_handled,
            num_failed=self.num_failed,
            num_cancelled=self.num_cancelled,
        )

    # ------------------------------------------------------------------------------------------------ the connection

    def speaks(self, protocol: type) -> bool:
        """Return whether the actor handles messages of ``protocol``."""
        return any(spoken == protocol.__name__ for spoken, _, _ in self.messages)

    def count(self, call: Call, change: int) -> None:
        """Count a call that begins (1) or has ended (-1)."""
        if call.kind is not Kind.TELL:
            self.num_running += change

    def go_up(self, peer: Peer, incarnation: int, messages: frozenset[Names]) -> None:
        """Refer to the actor that ``peer`` exposes under this name."""
        if self.peer is not peer:
            self.peer, self.num_running = peer, 0
        self._incarnation, self.messages = incarnation, messages
        self._state, self.final_down = ActorState.RUNNING, None

    def go_down(self, reason: DownReason, incarnation: int, error: str | None, *, is_restarting: bool) -> None:
        """Record that an incarnation has ended, as far as this side knows, and notify watchers."""
        if self.final_down is not None:
            return
        down = Down(ref=self, incarnation=incarnation, reason=reason, error=error, is_restarting=is_restarting)
        if is_restarting:
            self._incarnation = incarnation + 1
        else:
            self._state = ActorState.STOPPED if reason is DownReason.STOPPED else ActorState.CRASHED
            # After an actor has ended, another incarnation of its node may expose it again.
            if self._source is None or self._source.is_closed:
                self.final_down = down
        self.report(down)

    def lose(self, cause: str) -> None:
        """Record that the connection is lost."""
        is_restarting = self._source is not None and not self._source.is_closed
        self.go_down(DownReason.UNREACHABLE, self._incarnation, cause, is_restarting=is_restarting)
        if self._source is not None:
            self.peer, self._state = None, ActorState.STARTING

    async def _retry(self, act: Callable[[Peer], Awaitable[R]]) -> R:
        """Call ``act`` with the present connection, and again with the next one if nothing was sent."""
        while True:
            peer = self.peer
            if self._source is not None and (peer is None or self._source.is_closed):
                peer = await self._source.wait_exposed(self._name)
                peer.adopt(self)
            assert peer is not None, "a ref without a source has a connection from the start"
            try:
                return await act(peer)
            except Unreachable as error:
                # A message that may have been received must not be sent twice: delivery is at most once.
                if error.sent or self._source is None:
                    raise

    def _create(self, peer: Peer, kind: Kind, message: AnyMessage[Any], extra: int = 0) -> Call:
        """Return a call for ``message``, encoded but not yet sent.

        Raises:
            ProtocolError: the actor does not handle this message, or the message contains a value that cannot be sent.
        """
        cls = type(message)
        protocol = protocol_of(cls)
        spoken = "" if protocol is None else protocol.__name__
        if (spoken, cls.__name__, kind is Kind.STREAM) not in self.messages:
            known = ", ".join(sorted(name for _, name, _ in self.messages)) or "nothing"
            raise ProtocolError(
                f"{self.where} does not take {cls.__name__} this way; it handles {known}. "
                "Ask or tell a Message, stream a StreamMessage."
            )
        call = Call(self, peer, kind, cls)
        data = peer.codec.to_data(message, cls, cls.__name__)
        call.outgoing.parts = peer.encode([self._name, spoken, cls.__name__, data, extra], cls.__name__)
        return call

    def _send(self, call: Call, deadline: float = math.inf) -> None:
        if self._state is not ActorState.RUNNING and call.peer.is_connected:
            raise ActorStopped(f"{self.where} takes no more messages ({self._state}); {call.name} was not sent")
        call.outgoing.seconds = max(deadline - self._loop.now(), 0.0)
        call.peer.send(call)


# ----------------------------------------------------------------------------------------------------------------------
# The answering side
#
# A remote ask costs no task here. It is put in the actor's mailbox like any other, in the order of arrival. Where a
# local asker would be woken, the reply is queued for the writer.


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
    messages: dict[tuple[str, str], tuple[MessageClass, Handler]]

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
    messages: dict[tuple[str, str], tuple[MessageClass, Handler]] = {}
    for message, handler in ref.cell.handlers.items():
        protocol = protocol_of(message)
        if protocol is None:
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
        self._watches: list[tuple[Exposed, Callable[[Down], object]]] = []
        self._last_id = 0
        for one in exposed.values():
            self._watch(one)

    def add(self, exposed: Exposed) -> None:
        """Expose another actor.

        Raises:
            ConfigError: a running actor has the name.
        """
        check_free(self._exposed, exposed.name)
        self._exposed[exposed.name] = exposed
        self._watch(exposed)

    def on_request(self, frame: Frame) -> None:
        """Deliver a message to an actor.

        Raises:
            ProtocolError: it violates the rules of the connection. An invalid message only fails its own call.
        """
        if frame.id <= self._last_id:
            raise ProtocolError(f"request {frame.id} came after {self._last_id}; it was delivered once already")
        self._last_id = frame.id
        name, *words = self._peer.words(frame, str, str, str, object, int)  # actor, protocol, message, body and buffer
        try:
            self._accept(frame, self._find(name), *words)
        except ArealError as error:
            self._fail(frame.id, name, error)

    def on_cancel(self, call: int) -> None:
        """Cancel a call whose asker has left."""
        ask = self._running.get(call)
        if ask is not None:
            ask.cell.abandon(ask)

    def on_taken(self, call: int, num_items: int) -> None:
        """Grant the handler of a stream room for more items."""
        ask = self._running.get(call)
        if isinstance(ask, _ServedStream):
            ask.grant(num_items)

    def on_cut(self) -> None:
        """Cancel all running calls, because the connection is lost."""
        running, self._running = self._running, {}
        for ask in running.values():
            ask.cell.abandon(ask)
        for exposed, note in self._watches:
            exposed.ref.cell.unwatch(note)

    def answer(self, call: int, ask: Ask) -> None:
        """Send the outcome of ``ask``."""
        if self._running.pop(call, None) is None:
            return
        if ask.error is not None:
            self._fail(call, ask.cell.name, ask.error)
        elif isinstance(ask, StreamCall):
            self._peer.connection.send(Outgoing(Kind.END, call))
        else:
            try:
                reply = self._peer.encode_reply(ask.handler.message, ask.claim())
            except ProtocolError as error:
                self._fail(call, ask.cell.name, error, is_handlers=True)
            else:
                self._peer.connection.send(Outgoing(Kind.REPLY, call, reply))

    def _find(self, name: str) -> Exposed:
        exposed = self._exposed.get(name)
        if exposed is None:
            known = ", ".join(sorted(self._exposed)) or "none"
            raise ActorStopped(f"no actor {name!r} is exposed here; exposed are {known}")
        return exposed

    def _accept(self, frame: Frame, exposed: Exposed, protocol: str, message: str, body: object, limit: int) -> None:  # noqa: PLR0917 - the words of a request
        name, ref = exposed.name, exposed.ref
        known = exposed.messages.get((protocol, message))
        if known is None or known[1].is_stream is not (frame.kind is Kind.STREAM):
            names = ", ".join(sorted(one for _, one in exposed.messages)) or "nothing"
            raise ProtocolError(f"actor {name!r} does not take {protocol}.{message} this way; it handles {names}")
        cls, handler = known
        value = self._peer.codec.from_data(body, cls, cls.__name__)
        if frame.kind is Kind.TELL:
            ref.queue_tell(value, partial(self._end_tell, frame.id, ref, value))
            return
        deadline = ref.cell.loop.now() + frame.seconds
        if frame.kind is Kind.STREAM:
            ask: _Served = _ServedStream(value, handler, ref.cell, None, deadline, max(limit, 1))
        else:
            ask = _Served(value, handler, ref.cell, None, deadline)
        ask.peer, ask.server, ask.call = self._peer, self, frame.id
        self._running[frame.id] = ask
        try:
            ref.send(ask)
        except ArealError:
            del self._running[frame.id]
            raise

    def _end_tell(self, call: int, ref: LocalRef[Any], message: object, admitted: bool) -> None:  # noqa: FBT001 - a callback
        if admitted:
            self._peer.connection.send(Outgoing(Kind.END, call))
        else:
            self._fail(call, ref.name, ref.stopped(message))

    def _watch(self, exposed: Exposed) -> None:
        """Notify the other side of each end of the actor."""

        def note(down: Down) -> None:
            words = [exposed.name, down.incarnation, str(down.reason), down.error, down.is_restarting]
            self._peer.connection.send(Outgoing(Kind.DOWN, 0, self._peer.codec.encode(words)))

        self._watches.append((exposed, note))
        exposed.ref.cell.watch(note)

    def _fail(self, call: int, name: str, error: ArealError, *, is_handlers: bool = False) -> None:
        kernel = type(error).__name__ if type(error).__name__ in KERNEL_ERRORS and not is_handlers else None
        words = [kernel, str(error)] if kernel else [None, error_to_data(error, name)]
        self._peer.connection.send(Outgoing(Kind.ERROR, call, self._peer.codec.encode(words)))


class _Served(Ask):
    """Work for the other side: its outcome is sent instead of waking a task."""

    peer: Peer
    server: Server
    call: int

    def finish(self) -> None:
        """Mark the work as done, and send its outcome."""
        super().finish()
        self.server.answer(self.call, self)


class _ServedStream(_Served, StreamCall):
    """A stream whose consumer, and therefore its buffer, is on the other side; the room there is known here."""

    num_sent = 0

    async def put(self, item: object) -> None:
        """Send one item; waits while the consumer has no room."""
        while self.num_sent >= self.limit:
            self.room = self.cell.loop.new_signal()
            await self.room.wait()
        self.num_sent += 1
        self.peer.connection.send(Outgoing(Kind.ITEM, self.call, self.peer.encode_reply(self.handler.message, item)))

    def grant(self, num_items: int) -> None:
        """Note that the consumer has taken ``num_items``."""
        # Limited, so that a peer cannot raise the bound by reporting items that it was never sent.
        self.num_sent = max(self.num_sent - num_items, 0)
        self.make_room()


# ----------------------------------------------------------------------------------------------------------------------
# Both sides


class Peer:
    """A connected node. Made by ``connect`` and ``listen``."""

    def __init__(
        self, connection: Connection, other: Hello, limits: Limits, exposed: dict[str, Exposed], welcome: Any
    ) -> None:
        self.connection, self.other, self.limits = connection, other, limits
        self.codec = Codec()
        self._reply_kinds: dict[MessageClass, Any] = {}
        self._refs: dict[str, RemoteRef[Any]] = {}
        self._pending: dict[int, Call] = {}
        self._next_id = 1
        self.changed = ChangeSignal()
        """Notified when the other side exposes an actor, and when the connection is cut."""
        self._server = Server(self, dict(exposed))
        if not isinstance(welcome, (list, tuple)):
            raise ProtocolError("a welcome names no actors")
        for words in welcome:
            self._go_up(words)

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
        return tuple(self._refs)

    def ref(self, protocol: type[P], name: str) -> Ref[P]:
        """Return a ref to the actor that the other side exposes as ``name``.

        Raises:
            ActorStopped: it exposes no such actor.
            ProtocolError: the actor does not speak ``protocol``.
        """
        ref: RemoteRef[P] | None = self._refs.get(name)
        if ref is None:
            known = ", ".join(sorted(self._refs)) or "none"
            raise ActorStopped(f"node {self.node!r} exposes no actor {name!r}; it exposes {known}")
        if not ref.speaks(protocol):
            spoken = ", ".join(sorted({spoken for spoken, _, _ in ref.messages})) or "nothing"
            raise ProtocolError(
                f"actor {name!r} on {self.node!r} does not speak {protocol.__name__}; it speaks {spoken}"
            )
        return ref

    async def wait_exposed(self, name: str) -> None:
        """Wait until the other side exposes an actor ``name``, which it may do at any time.

        Raises:
            Unreachable: the connection was cut before that.
        """
        while name not in self._refs:
            if self.connection.cause is not None:
                raise Unreachable(
                    f"actor {name!r} on {self.node!r} is unreachable: {self.connection.cause}", sent=False
                )
            await self.changed.wait()

    def adopt(self, ref: RemoteRef[Any]) -> None:
        """Let ``ref`` refer to the actor that the other side exposes under its name, if there is one."""
        known = self._refs.get(ref.name)
        if known is not None and known is not ref:
            self._refs[ref.name] = ref
            ref.go_up(self, known.address.incarnation, known.messages)

    async def wait_closed(self) -> str:
        """Wait until the connection is closed, and return the cause."""
        await self.connection.closed.wait()
        return self.connection.cause or ""

    def close(self, cause: str = "this side has closed the connection") -> None:
        """Cut the connection at once."""
        self.connection.cut(cause)

    # ------------------------------------------------------------------------------------------------ sending

    def send(self, call: Call) -> None:
        """Send ``call`` under the next free id.

        Raises:
            Unreachable: the connection is lost.
        """
        if self.connection.cause is not None:
            call.cut(self.connection.cause)
            call.claim()
        call.outgoing.id = self._next_id
        self._pending[self._next_id] = call
        self._next_id += 1
        call.ref.count(call, 1)
        self.connection.send(call.outgoing)

    def forget(self, call: Call) -> None:
        """Remove a call whose asker has left; a late answer to it is dropped."""
        if self._pending.pop(call.outgoing.id, None) is not None:
            call.ref.count(call, -1)

    def encode_reply(self, message: MessageClass, reply: object) -> list[Buffer]:
        """Return a reply to ``message`` (for a stream, an item) as parts.

        Raises:
            ProtocolError: the reply cannot be sent.
        """
        what = f"the reply to {message.__name__}"
        return self.encode([self.codec.to_data(reply, self._reply_kind(message), what)], what)

    def encode(self, words: Sequence[object], what: str) -> list[Buffer]:
        """Encode ``words`` as parts, within the size that the other side accepts.

        Raises:
            ProtocolError: a value cannot be encoded, or the message is larger than the other side accepts.
        """
        parts = self.codec.encode(words, what)
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
        self.connection.send(Outgoing(Kind.EXPOSED, 0, self.codec.encode(exposed.to_data())))

    # ------------------------------------------------------------------------------------------------ receiving

    def on_frame(self, frame: Frame) -> None:
        """Process a message; see ``connection.Owner``."""
        match frame.kind:
            case Kind.ASK | Kind.TELL | Kind.STREAM:
                self._server.on_request(frame)
            case Kind.CANCEL:
                self._server.on_cancel(frame.id)
            case Kind.TAKEN:
                (num_items,) = self.words(frame, int)
                self._server.on_taken(frame.id, num_items)
            case Kind.DOWN:
                self._go_down(self.words(frame, str, int, str, (str, NoneType), bool))
            case Kind.EXPOSED:
                self._go_up(self.words(frame, str, int, list))
                self.changed.notify()
            case _:
                call = self._pending.get(frame.id)
                # Otherwise its asker has left.
                if call is not None:
                    self._on_answer(call, frame)

    def words(self, frame: Frame, *kinds: type | tuple[type, ...]) -> list[Any]:
        """Decode ``frame`` and check the types of its words.

        Raises:
            ProtocolError: the words are not of these ``kinds``, in this order.
        """
        return _checked(self.codec.decode(frame.parts), kinds, f"a message of kind {frame.kind.name}")

    def on_cut(self, cause: str) -> None:
        """End all calls and notify watchers; see ``connection.Owner``."""
        pending, self._pending = self._pending, {}
        for call in pending.values():
            call.cut(cause)
        for ref in self._refs.values():
            ref.lose(cause)
        self._server.on_cut()
        self.changed.notify()

    def _on_answer(self, call: Call, frame: Frame) -> None:
        if frame.kind is Kind.ITEM:
            self._on_item(call, frame)
            return
        del self._pending[frame.id]
        call.ref.num_handled += call.kind is not Kind.TELL
        call.ref.count(call, -1)
        if frame.kind is Kind.REPLY:
            (data,) = self.words(frame, object)
            try:
                call.finish(reply=self._reply_from(data, call))
            except ProtocolError as error:
                call.finish(error=error)
        elif frame.kind is Kind.ERROR:
            kernel, data = self.words(frame, object, object)
            call.ref.num_failed += kernel is None
            call.finish(error=_error_from(kernel, data))
        else:
            call.finish()

    def _on_item(self, call: Call, frame: Frame) -> None:
        # The consumer's buffer is bounded even if the other side ignores the room in it.
        if len(call.buffer) >= call.limit:
            raise ProtocolError(f"a stream of {call.name} sends more than there is room for")
        (data,) = self.words(frame, object)
        try:
            call.buffer.append(self._reply_from(data, call))
        except ProtocolError as error:
            # An item that cannot be decoded ends the stream: cancel the handler, then report the error.
            call.cancel()
            call.finish(error=error)
        if call.arrival is not None:
            call.arrival.set()

    def _reply_from(self, data: object, call: Call) -> Any:
        return self.codec.from_data(data, self._reply_kind(call.message), f"the reply to {call.name}")

    def _reply_kind(self, message: MessageClass) -> Any:
        if message not in self._reply_kinds:
            self._reply_kinds[message] = reply_of(message)
        return self._reply_kinds[message]

    def _go_up(self, words: object) -> None:
        name, incarnation, table = _checked(words, (str, int, list), "the word of an actor")
        rows = [_checked(row, (str, str, bool), f"what actor {name!r} handles") for row in table]
        ref = self._refs.get(name)
        if ref is None:
            ref = self._refs[name] = RemoteRef(name, self.node, self.limits)
        ref.go_up(self, incarnation, frozenset((protocol, message, is_stream) for protocol, message, is_stream in rows))

    def _go_down(self, words: list[Any]) -> None:
        name, incarnation, reason, error, is_restarting = words
        if reason not in tuple(DownReason):
            raise ProtocolError(f"{reason!r} is not a reason for the end of an actor")
        ref = self._refs.get(name)
        if ref is not None:
            ref.go_down(DownReason(reason), incarnation, error, is_restarting=is_restarting)


def _error_from(kernel: object, data: object) -> ArealError:
    known = KERNEL_ERRORS.get(kernel) if isinstance(kernel, str) else None
    try:
        return error_from_data(data) if known is None else known(str(data))
    except ProtocolError as unreadable:
        return RemoteError("a remote actor", "an error that cannot be read", str(unreadable))


def _checked(words: object, kinds: tuple[type | tuple[type, ...], ...], what: str) -> list[Any]:
    if not isinstance(words, list) or len(words) != len(kinds) or not all(map(isinstance, words, kinds)):
        raise ProtocolError(f"{what} has {len(kinds)} words of other kinds than {words!r:.200}")
    return words
