"""The other side of a connection: refs to the actors it exposes, and the actors of this process that it may reach.

After the handshake both sides are equal: each may ask the actors that the other exposes. A peer is one connection to
one incarnation of one node. When it is cut, all pending calls end as ``Unreachable``, watchers are notified, and
nothing is retried: a new connection is a new peer, and frames of the old one cannot reach it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import NoneType
from typing import Any, TypeVar, cast

import anyio

from areal_actors.core.failure import error_from_data
from areal_actors.core.message import AnyMessage, reply_of
from areal_actors.core.ref import DownReason, Ref
from areal_actors.core.remote.calls import Call, Channel
from areal_actors.core.remote.codec import Codec
from areal_actors.core.remote.connection import Connection
from areal_actors.core.remote.frames import Buffer, Frame, Kind, Outgoing
from areal_actors.core.remote.hello import Hello
from areal_actors.core.remote.limits import CHUNK_BYTES, Limits
from areal_actors.core.remote.ref import RemoteRef
from areal_actors.core.remote.serving import KERNEL_ERRORS, Exposed, Server
from areal_actors.core.remote.serving import expose as expose_actor
from areal_actors.errors import ActorStopped, ArealError, ProtocolError, RemoteError, Unreachable

__all__ = ["Peer"]

P = TypeVar("P")

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
        self.add(expose_actor(name, ref))

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
        if frame.seconds != frame.seconds:  # NaN as a deadline would break the event loop's ordering of timers
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
        self._tell_followers()

    def _tell_followers(self) -> None:
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
        call.finish(error=self._error(kernel, text))

    def _error(self, kernel: Any, text: Any) -> ArealError:
        known = KERNEL_ERRORS.get(kernel) if isinstance(kernel, str) else None
        if known is not None:
            return known(text)
        try:
            return error_from_data(text)
        except ProtocolError as error:
            return RemoteError("a remote actor", "an error that cannot be read", str(error))

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
            raise ProtocolError(f"{frame.seconds:g} is no number of items")
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
            raise ProtocolError(f"{reason!r} is no reason for the end of an actor")
        if channel is not None:
            channel.go_down(DownReason(reason), incarnation, error, is_restarting=is_restarting)

    def _on_exposed_frame(self, frame: Frame) -> None:
        self._on_exposed(self.words(frame, str, int, list))
        self._tell_followers()

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
