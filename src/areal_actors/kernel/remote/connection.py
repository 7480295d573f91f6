"""One connection: a reader, a writer and a heartbeat for one socket. ``peer`` interprets the frames.

Only the reader and writer touch the socket, so that a cancelled asker cannot cut a frame in half. ``sockets`` waits
until a socket is ready; any other byte stream works as well, and is then read and written by the two tasks themselves.

A connection ends exactly once, with a cause in words, and its owner is notified at that moment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Protocol

import anyio
from anyio.abc import ByteStream, TaskGroup
from anyio.lowlevel import checkpoint

from areal_actors.errors import ProtocolError
from areal_actors.kernel.remote.frames import CHUNK_BYTES, Assembler, Buffer, Frame, Kind, Limits, Outbox, Outgoing
from areal_actors.kernel.remote.sockets import SocketStream, run_reader, run_writer
from areal_actors.lib.loops import Loop, running_loop

__all__ = ["Connection", "Owner"]

_LOST = (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError, OSError)

_MAX_WRITES = _MAX_READS = 8
"""Limit of consecutive chunks, after which other tasks may run."""


class Owner(Protocol):
    """The interface to which a connection reports. No method waits."""

    def on_frame(self, frame: Frame) -> None:
        """Process a complete message. Raising ``ProtocolError`` ends the connection."""

    def on_written(self) -> None:
        """React to data having been written, so that there is room again."""

    def on_cut(self, cause: str) -> None:
        """React to the end of the connection; called once."""


class Connection:
    """Moves messages between an outbox, a byte stream, and its owner."""

    def __init__(self, stream: ByteStream, limits: Limits) -> None:
        self.outbox = Outbox()
        self.assembler = Assembler(limits.max_message_bytes)
        self.limits = limits
        self.loop: Loop = running_loop()
        self.cause: str | None = None
        self.closed = anyio.Event()
        self._stream = stream
        self._left: list[Buffer] = []
        self._owner: Owner | None = None
        self._scope = anyio.CancelScope()
        self._heard_at = self.loop.now()
        self._on_empty: Callable[[], object] | None = None
        self._tasks: TaskGroup | None = None

    def start(self, owner: Owner, tasks: TaskGroup) -> None:
        """Run in ``tasks`` until the connection is cut."""
        self._owner = owner
        tasks.start_soon(self._run, name="connection")

    def post(self, outgoing: Outgoing, *, is_alone: bool, is_ahead: bool = False) -> None:
        """Queue ``outgoing`` in the data lane, or, with ``is_ahead``, in the control lane.

        ``is_alone`` means that no other message is pending that could share a write with it. It is then written
        immediately if the socket has room: waking the writer for it would cost more than the write.
        """
        outbox, stream = self.outbox, self._stream
        wake = outbox.wake
        if not is_alone or wake is None or outgoing.is_large or not isinstance(stream, SocketStream):
            (outbox.put_ahead if is_ahead else outbox.put)(outgoing)
            return
        outbox.wake = None
        outbox.put(outgoing)
        try:
            is_written = self._flush(stream)
        except OSError:
            # The writer will get the same error, and handles it.
            is_written = False
        if is_written:
            outbox.wake = wake
        else:
            wake()

    def send(self, kind: Kind, call: int = 0, payload: bytes = b"", *, seconds: float = 0.0) -> None:
        """Queue a small frame that overtakes data."""
        self.outbox.put_ahead(Outgoing(kind, call, [payload] if payload else [], seconds))

    def start_soon(self, function: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Run ``function`` until it ends or the connection is cut; it must not raise."""
        assert self._tasks is not None, "only what arrives on a connection starts something there"
        self._tasks.start_soon(function)

    def cut(self, cause: str) -> None:
        """End the connection, unless it has already ended."""
        if self.cause is None:
            self.cause = cause
            self._scope.cancel()
            self.closed.set()
            # Wakes ``_drain``, which would wait forever otherwise.
            self._notify_empty()
            if self._owner is not None:
                self._owner.on_cut(cause)

    async def aclose(self) -> None:
        """Write what is queued, send the closing frame and end.

        Shielded, and therefore bounded by ``cleanup_seconds``.
        """
        deadline = self.loop.now() + self.limits.cleanup_seconds
        with self.loop.new_scope(deadline=deadline, shield=True):
            if self.cause is None:
                await self._drain()
                self.send(Kind.BYE)
                await self._drain()
        self.cut("this side has closed the connection")

    async def _drain(self) -> None:
        while (self.outbox or self._left) and self.cause is None:
            written = self.loop.new_signal()
            self._on_empty = written.set
            await written.wait()

    async def _run(self) -> None:
        try:
            with self._scope:
                async with anyio.create_task_group() as self._tasks:
                    tasks = self._tasks
                    tasks.start_soon(self._write, name="connection.write")
                    if self.limits.heartbeat_seconds < math.inf:
                        tasks.start_soon(self._send_heartbeats, name="connection.heartbeat")
                    await self._read()
        finally:
            self.cut("this side has closed the connection")
            await anyio.aclose_forcefully(self._stream)

    async def _read(self) -> None:
        try:
            if isinstance(self._stream, SocketStream):
                await run_reader(self._stream, partial(self._receive, self._stream))
            while True:
                data = await self._stream.receive(CHUNK_BYTES)
                self._take_in(self.assembler.feed(data))
        except ProtocolError as error:
            self.cut(f"the other side broke the protocol: {error}")
        except _LOST as error:
            self.cut(_describe_loss(error))

    def _receive(self, stream: SocketStream) -> None:
        assembler, num_bytes, num_wanted = self.assembler, 0, 0
        for _ in range(_MAX_READS):
            targets = assembler.targets()
            num_wanted = sum(map(len, targets))
            try:
                num_bytes = stream.receive_into(targets)
            except BlockingIOError:
                return
            self._take_in(assembler.advance(num_bytes))
            # The socket is drained; another receive would only raise ``BlockingIOError``.
            if num_bytes < num_wanted:
                return

    def _take_in(self, frames: list[Frame]) -> None:
        assert self._owner is not None, "started with an owner"
        self._heard_at = self.loop.now()
        for frame in frames:
            if frame.kind is Kind.BYE:
                self.cut("the other side has closed the connection")
            elif self.cause is None and frame.kind is not Kind.PING:
                self._owner.on_frame(frame)

    async def _write(self) -> None:
        try:
            if isinstance(self._stream, SocketStream):
                await run_writer(self._stream, partial(self._flush, self._stream), self._on_next)
            while True:
                if data := b"".join(self.outbox.take()):
                    await self._stream.send(data)
                if not self._is_all_written():
                    continue
                arrival = self.loop.new_signal()
                self._on_next(arrival.set)
                await arrival.wait()
        except _LOST as error:
            self.cut(_describe_loss(error))

    def _flush(self, stream: SocketStream) -> bool:
        """Write what can be written without waiting, at most 8 chunks. Return whether everything was written."""
        for _ in range(_MAX_WRITES):
            self._left = self._left or self.outbox.take()
            if self._left:
                try:
                    num_bytes = stream.send_some(self._left)
                except BlockingIOError:
                    return False
                while self._left and num_bytes >= len(self._left[0]):
                    num_bytes -= len(self._left.pop(0))
                if num_bytes:
                    self._left[0] = memoryview(self._left[0])[num_bytes:]
            if not self._left and self._is_all_written():
                return True
        return False

    def _is_all_written(self) -> bool:
        """Notify the owner of room, and ``_drain`` of an empty outbox.

        Both may queue more: return whether it is still empty.
        """
        assert self._owner is not None, "started with an owner"
        is_empty = not self.outbox
        self._owner.on_written()
        if is_empty:
            self._notify_empty()
        return not self.outbox

    def _on_next(self, wake: Callable[[], object]) -> None:
        self.outbox.wake = wake

    def _notify_empty(self) -> None:
        waiting, self._on_empty = self._on_empty, None
        if waiting is not None:
            waiting()

    async def _send_heartbeats(self) -> None:
        limits = self.limits
        while True:
            await anyio.sleep(limits.heartbeat_seconds)
            if self._silence() > limits.silence_seconds:
                # After this process itself was suspended, first read what arrived meanwhile.
                await checkpoint()
            silent = self._silence()
            if silent > limits.silence_seconds:
                self.cut(f"nothing was heard from the other side for {silent:.1f} s")
            self.send(Kind.PING)

    def _silence(self) -> float:
        return self.loop.now() - self._heard_at


def _describe_loss(error: BaseException) -> str:
    """Return the cause in words for people, who see it when a worker has died."""
    if isinstance(error, (anyio.EndOfStream, anyio.BrokenResourceError, ConnectionError)):
        return "the connection was lost: the process on the other side has ended, or has closed it"
    return f"the connection was lost: {str(error) or 'this side has closed it'}"
