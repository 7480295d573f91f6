"""One connection: a reader, a writer and a heartbeat for one byte stream. ``peer`` interprets the messages.

Only the reader and the writer use the stream, so that a cancelled asker cannot cut a frame in half. A connection ends
exactly once, with a cause in words, and its owner is notified at that moment.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Protocol

import anyio
from anyio.abc import ByteStream, TaskGroup
from anyio.lowlevel import checkpoint

from areal_actors.errors import ProtocolError
from areal_actors.kernel.remote.frames import Buffer, Frame, FrameReader, Kind, Limits, Outgoing
from areal_actors.lib.change_signal import ChangeSignal
from areal_actors.lib.loops import Loop, Signal, running_loop

LOST = (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError, OSError)
"""Errors of a byte stream whose other end is gone."""

_JOINED_BYTES = 64 * 1024
"""Small messages are joined up to about this size: one write for many costs a fraction of many writes."""


class Owner(Protocol):
    """The interface to which a connection reports. No method waits."""

    def on_frame(self, frame: Frame) -> None:
        """Process a complete message. Raising ``ProtocolError`` ends the connection."""

    def on_cut(self, cause: str) -> None:
        """React to the end of the connection; called once."""


class Connection:
    """Moves messages between a queue, a byte stream, and its owner."""

    def __init__(self, stream: ByteStream, limits: Limits) -> None:
        self.limits = limits
        self.loop: Loop = running_loop()
        self.cause: str | None = None
        self.closed = anyio.Event()
        self._stream = stream
        self._owner: Owner | None = None
        self._scope = anyio.CancelScope()
        self._heard_at = self.loop.now()
        self._queue: deque[Outgoing] = deque()
        self._arrival: Signal | None = None
        self._num_written = 0
        self._is_writing = False
        self._written = ChangeSignal()

    def start(self, owner: Owner, tasks: TaskGroup) -> None:
        """Run in ``tasks`` until the connection is cut."""
        self._owner = owner
        tasks.start_soon(self._run, name="connection")

    def send(self, outgoing: Outgoing) -> None:
        """Queue a message for the writer, unless the connection is cut."""
        if self.cause is None:
            self._queue.append(outgoing)
            if self._arrival is not None:
                self._arrival.set()

    def withdraw(self, outgoing: Outgoing) -> bool:
        """Remove a queued message that has not been written yet. Return whether that was possible."""
        if not outgoing.is_sent:
            self._queue.remove(outgoing)
        return not outgoing.is_sent

    def cut(self, cause: str) -> None:
        """End the connection, unless it has already ended."""
        if self.cause is None:
            self.cause = cause
            self._scope.cancel()
            self.closed.set()
            self._written.notify()
            if self._owner is not None:
                self._owner.on_cut(cause)

    async def aclose(self) -> None:
        """Write what is queued, send the closing frame and end.

        Shielded, and therefore bounded by ``cleanup_seconds``.
        """
        deadline = self.loop.now() + self.limits.cleanup_seconds
        with self.loop.new_scope(deadline=deadline, shield=True):
            self.send(Outgoing(Kind.BYE))
            while (self._queue or self._is_writing) and self.cause is None:
                await self._written.wait()
        self.cut("this side has closed the connection")

    async def _run(self) -> None:
        try:
            with self._scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._write, name="connection.write")
                    if self.limits.heartbeat_seconds < math.inf:
                        tasks.start_soon(self._send_heartbeats, name="connection.heartbeat")
                    await self._read()
        finally:
            self.cut("this side has closed the connection")
            await anyio.aclose_forcefully(self._stream)

    async def _read(self) -> None:
        reader = FrameReader(self._receive, self.limits.max_message_bytes)
        try:
            while True:
                # Without a local variable, which would keep the message alive until the next one arrives.
                self._on_frame(await reader.read())
        except ProtocolError as error:
            self.cut(f"the other side broke the protocol: {error}")
        except LOST as error:
            self.cut(_describe_loss(error))

    def _on_frame(self, frame: Frame) -> None:
        assert self._owner is not None, "started with an owner"
        if frame.kind is Kind.BYE:
            self.cut("the other side has closed the connection")
        elif self.cause is None and frame.kind is not Kind.PING:
            self._owner.on_frame(frame)

    async def _receive(self) -> bytes:
        data = await self._stream.receive()
        self._heard_at = self.loop.now()
        return data

    async def _write(self) -> None:
        try:
            while True:
                while self._queue:
                    self._is_writing = True
                    parts = self._take()
                    while parts:
                        await self._stream.send(parts.pop(0))  # type: ignore[arg-type]  # streams take any buffer
                self._is_writing = False
                self._written.notify()
                self._arrival = self.loop.new_signal()
                await self._arrival.wait()
                self._arrival = None
        except LOST as error:
            self.cut(_describe_loss(error))

    def _take(self) -> list[Buffer]:
        """Return the next bytes to write: messages joined, up to the first one with buffers, and these."""
        heads: list[Buffer] = []
        buffers: list[Buffer] = []
        while self._queue and not buffers and sum(map(len, heads)) < _JOINED_BYTES:
            outgoing = self._queue.popleft()
            outgoing.is_sent = True
            head, *buffers = outgoing.frame(self._num_written)
            self._num_written += 1
            heads.append(head)
        return [b"".join(heads), *buffers]

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
            self.send(Outgoing(Kind.PING))

    def _silence(self) -> float:
        return self.loop.now() - self._heard_at


def _describe_loss(error: BaseException) -> str:
    """Return the cause in words for people, who see it when a worker has died."""
    if isinstance(error, (anyio.EndOfStream, anyio.BrokenResourceError, ConnectionError)):
        return "the connection was lost: the process on the other side has ended, or has closed it"
    return f"the connection was lost: {str(error) or 'this side has closed it'}"
