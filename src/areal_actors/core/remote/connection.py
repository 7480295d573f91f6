"""One connection: a reader and a writer own the socket, and a heart beats. What frames mean is told in ``peer``.

Nobody else touches the socket, so that no cancelled asker can cut a frame in half. Whatever ends the connection, it
ends once, with a cause in words, and its owner is told in that moment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import anyio
from anyio.abc import ByteStream, TaskGroup

from areal_actors.core.loops import Loop, running_loop
from areal_actors.core.remote.frames import Assembler, Frame, Kind, Outbox, Outgoing
from areal_actors.core.remote.limits import Limits
from areal_actors.errors import ProtocolError

__all__ = ["Connection", "Owner"]

_LOST = (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError, OSError)


class Owner(Protocol):
    """What a connection reports to. Neither method waits."""

    def on_frame(self, frame: Frame) -> None:
        """A whole message has arrived. Raising ``ProtocolError`` ends the connection."""

    def on_written(self) -> None:
        """Something was written, so that there is room."""

    def on_cut(self, cause: str) -> None:
        """The connection is gone; called once."""


class Connection:
    """Moves messages between an outbox, a stream of bytes, and its owner."""

    def __init__(self, stream: ByteStream, limits: Limits) -> None:
        self.outbox = Outbox()
        self.assembler = Assembler(limits.max_message_bytes)
        self.limits = limits
        self.loop: Loop = running_loop()
        self.cause: str | None = None
        self.closed = anyio.Event()
        self._stream = stream
        self._owner: Owner | None = None
        self._scope = anyio.CancelScope()
        self._heard_at = self.loop.now()
        self._on_empty: Callable[[], object] | None = None
        self._tasks: TaskGroup | None = None

    def start(self, owner: Owner, tasks: TaskGroup) -> None:
        """Run in ``tasks`` until the connection is cut."""
        self._owner = owner
        tasks.start_soon(self._run, name="connection")

    def send(self, kind: Kind, call: int = 0, payload: bytes = b"", *, seconds: float = 0.0) -> None:
        """Queue a small frame that overtakes data."""
        self.outbox.put_ahead(Outgoing(kind, call, [payload] if payload else [], seconds))

    def start_soon(self, function: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Run ``function`` for as long as the connection stands; it must not raise."""
        assert self._tasks is not None, "only what arrives on a connection starts something there"
        self._tasks.start_soon(function)

    def cut(self, cause: str) -> None:
        """End the connection, unless it has ended."""
        if self.cause is None:
            self.cause = cause
            self._scope.cancel()
            self.closed.set()
            if self._owner is not None:
                self._owner.on_cut(cause)

    async def aclose(self) -> None:
        """Write what is queued, say goodbye and end; shielded, and therefore bounded."""
        deadline = self.loop.now() + self.limits.cleanup_seconds
        with self.loop.new_scope(deadline=deadline, shield=True):
            if self.cause is None:
                await self._drain()
                self.send(Kind.BYE)
                await self._drain()
        self.cut("this side has closed the connection")

    async def _drain(self) -> None:
        while self.outbox and self.cause is None:
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
                        tasks.start_soon(self._beat, name="connection.heartbeat")
                    await self._read()
        finally:
            self.cut("this side has closed the connection")
            await anyio.aclose_forcefully(self._stream)

    async def _read(self) -> None:
        assert self._owner is not None, "started with an owner"
        assembler, receive, owner = self.assembler, self._stream.receive, self._owner
        try:
            while True:
                data = await receive(assembler.wanted)
                self._heard_at = self.loop.now()
                for frame in assembler.feed(data):
                    if frame.kind is Kind.BYE:
                        self.cut("the other side has closed the connection")
                    elif self.cause is None and frame.kind is not Kind.PING:
                        owner.on_frame(frame)
        except ProtocolError as error:
            self.cut(f"the other side broke the protocol: {error}")
        except _LOST as error:
            self.cut(f"the connection was lost ({str(error) or type(error).__name__})")

    async def _write(self) -> None:
        assert self._owner is not None, "started with an owner"
        outbox, send = self.outbox, self._stream.send
        try:
            while True:
                data = outbox.take()
                if data:
                    await send(data)
                if outbox:
                    self._owner.on_written()
                    continue
                self._report_empty()
                if not outbox:
                    arrival = self.loop.new_signal()
                    outbox.wake = arrival.set
                    await arrival.wait()
        except _LOST as error:
            self.cut(f"the connection was lost ({str(error) or type(error).__name__})")

    def _report_empty(self) -> None:
        assert self._owner is not None, "started with an owner"
        self._owner.on_written()
        waiting, self._on_empty = self._on_empty, None
        if waiting is not None:
            waiting()

    async def _beat(self) -> None:
        limits = self.limits
        while True:
            await anyio.sleep(limits.heartbeat_seconds)
            silent = self.loop.now() - self._heard_at
            if silent > limits.silence_seconds:
                self.cut(f"nothing was heard from the other side for {silent:.1f} s")
            self.send(Kind.PING)
