"""Sockets without a layer between: what is received goes to where it belongs, and what is sent is not copied first.

A portable stream hands out fresh bytes for every receive and takes one piece of bytes for every send, each with a turn
of the event loop; for small messages that is half of what they cost, and for arrays most of it. Here a socket is read
and written when it is ready: on asyncio in the event loop's own callbacks, as its transports do, on trio in a task.
Which bytes those are is told in ``frames``, what they mean in ``connection``.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import anyio
from anyio.abc import ByteStream

from areal_actors.core.loops import is_trio, running_loop
from areal_actors.core.remote.frames import Buffer

__all__ = ["SocketStream", "accept", "dial_tcp", "dial_unix", "run_reader", "run_writer"]

logger = logging.getLogger(__name__)

_BUFFER_BYTES = 1048576
"""Room in the kernel for what a unix socket sends: with the default of 208 KiB, each chunk would wait in the middle."""

_RETRY_SECONDS = 0.01

_NEXT_ADDRESS_SECONDS = 3.0
"""An address of several that does not answer for so long is left for the next one; the last one has all the time."""

_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_EXHAUSTED_SECONDS = 0.1
"""Whoever connects waits in the backlog until something is free again."""


class SocketStream(ByteStream):
    """A connected socket. ``receive_into`` and ``send_some`` never wait; the rest is what any stream does."""

    def __init__(self, raw: socket.socket) -> None:
        raw.setblocking(False)
        if raw.family == socket.AF_UNIX:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        else:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.raw = raw

    def receive_into(self, targets: Sequence[memoryview]) -> int:
        """Fill ``targets`` with what has arrived; the number of bytes.

        Raises:
            BlockingIOError: nothing has.
            EndOfStream: nothing will.
            OSError: the connection is gone.
        """
        raw = self.raw
        num_bytes = raw.recv_into(targets[0]) if len(targets) == 1 else raw.recvmsg_into(targets)[0]
        if not num_bytes:
            raise anyio.EndOfStream
        return num_bytes

    def send_some(self, buffers: Sequence[Buffer]) -> int:
        """Send the beginning of ``buffers``; the number of bytes.

        Raises:
            BlockingIOError: there is no room.
            OSError: the connection is gone.
        """
        return self.raw.send(buffers[0]) if len(buffers) == 1 else self.raw.sendmsg(buffers)

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """What has arrived, at most ``max_bytes``."""
        while True:
            await self._wait(anyio.wait_readable)
            try:
                data = self.raw.recv(max_bytes)
            except BlockingIOError:
                continue
            except OSError as error:
                raise anyio.BrokenResourceError from error
            if not data:
                raise anyio.EndOfStream
            return data

    async def send(self, item: bytes) -> None:
        """Send all of ``item``."""
        view = memoryview(item)
        while view:
            await self._wait(anyio.wait_writable)
            try:
                view = view[self.raw.send(view) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise anyio.BrokenResourceError from error

    async def send_eof(self) -> None:
        """No more is sent."""
        self.raw.shutdown(socket.SHUT_WR)

    async def aclose(self) -> None:
        """Close at once."""
        if self.raw.fileno() >= 0:
            anyio.notify_closing(self.raw)
            self.raw.close()

    async def _wait(self, ready: Callable[[socket.socket], object]) -> None:
        if self.raw.fileno() < 0:
            raise anyio.ClosedResourceError
        await ready(self.raw)  # type: ignore[misc]


# ------------------------------------------------------------------------------------------------- when it is ready


async def run_reader(stream: SocketStream, receive: Callable[[], object]) -> None:
    """Call ``receive`` whenever something has arrived, until it raises.

    Raises:
        Exception: what ``receive`` raised.
    """
    if is_trio():
        import trio

        while True:
            await trio.lowlevel.wait_readable(stream.raw)
            receive()
    loop, descriptor = asyncio.get_running_loop(), stream.raw.fileno()
    failed: asyncio.Future[None] = loop.create_future()
    loop.add_reader(descriptor, _guarded, receive, failed)
    try:
        await failed
    finally:
        loop.remove_reader(descriptor)
        _retrieve(failed)


async def run_writer(
    stream: SocketStream, flush: Callable[[], bool], on_next: Callable[[Callable[[], object]], object]
) -> None:
    """Call ``flush`` when there is something to write and room for it, until it raises.

    Args:
        stream: where to.
        flush: writes, and says whether everything was written.
        on_next: what it is given is called once, when there is something to write again.

    Raises:
        Exception: what ``flush`` raised.
    """
    if is_trio():
        import trio

        new_signal = running_loop().new_signal
        while True:
            if flush():
                arrival = new_signal()
                on_next(arrival.set)
                await arrival.wait()
            else:
                await trio.lowlevel.wait_writable(stream.raw)
    writer = _AsyncioWriter(stream, flush, on_next)
    try:
        writer.on_ready()
        await writer.failed
    finally:
        writer.stop()
        _retrieve(writer.failed)


class _AsyncioWriter:
    """Writes in callbacks of the event loop. All that is queued in one turn of it leaves in one write."""

    def __init__(
        self, stream: SocketStream, flush: Callable[[], bool], on_next: Callable[[Callable[[], object]], object]
    ) -> None:
        self._loop, self._descriptor = asyncio.get_running_loop(), stream.raw.fileno()
        self._flush, self._on_next = flush, on_next
        self._is_waiting = self._is_stopped = False
        self.failed: asyncio.Future[None] = self._loop.create_future()

    def on_ready(self) -> None:
        """There is room, or something to write."""
        if self._is_stopped:
            return
        try:
            is_done = self._flush()
        except Exception as error:  # noqa: BLE001 - raised by the task that waits for it
            if not self.failed.done():
                self.failed.set_exception(error)
            self.stop()
            return
        if is_done:
            self._wait_for_room(is_needed=False)
            self._on_next(self._on_arrival)
        else:
            self._wait_for_room(is_needed=True)

    def stop(self) -> None:
        """Write no more."""
        self._is_stopped = True
        self._wait_for_room(is_needed=False)

    def _on_arrival(self) -> None:
        self._loop.call_soon(self.on_ready)

    def _wait_for_room(self, *, is_needed: bool) -> None:
        if is_needed is self._is_waiting:
            return
        self._is_waiting = is_needed
        if is_needed:
            self._loop.add_writer(self._descriptor, self.on_ready)
        else:
            self._loop.remove_writer(self._descriptor)


def _retrieve(failed: asyncio.Future[None]) -> None:
    """Its waiter may have been cancelled in the same moment; then the error is no news."""
    if failed.done() and not failed.cancelled():
        failed.exception()


def _guarded(act: Callable[[], object], failed: asyncio.Future[None]) -> None:
    """In a callback nobody would hear of an error."""
    if failed.done():
        return
    try:
        act()
    except Exception as error:  # noqa: BLE001 - raised by the task that waits for it
        failed.set_exception(error)


# ------------------------------------------------------------------------------------------------- where they come from


async def accept(listening: socket.socket) -> SocketStream:
    """Wait for the next connection. One that is broken already is nobody's, nor is a lack of descriptors its end."""
    is_told = False
    while True:
        await anyio.wait_readable(listening)
        try:
            return SocketStream(listening.accept()[0])
        except (BlockingIOError, ConnectionError):
            continue
        except OSError as error:
            if error.errno not in _EXHAUSTED:
                raise
            if not is_told:
                logger.warning("connections wait: %s; raise the limit of open files (ulimit -n)", error.strerror)
            is_told = True
            await anyio.sleep(_EXHAUSTED_SECONDS)


async def dial_unix(path: Path) -> SocketStream:
    """Connect to a unix socket.

    Raises:
        OSError: nobody listens there.
    """
    return await _connected(socket.AF_UNIX, str(path))


async def dial_tcp(host: str, port: int) -> SocketStream:
    """Connect to the first address of ``host`` that answers.

    Raises:
        OSError: none does.
    """
    failure = OSError(f"{host} has no address")
    found = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for number, (family, _, _, _, address) in enumerate(found, start=1):
        try:
            with anyio.move_on_after(math.inf if number == len(found) else _NEXT_ADDRESS_SECONDS):
                return await _connected(family, address)
            failure = OSError(f"{address[0]} does not answer")
        except OSError as error:
            failure = error
    raise failure


async def _connected(family: int, address: str | tuple[str, int]) -> SocketStream:
    raw = socket.socket(family, socket.SOCK_STREAM)
    try:
        raw.setblocking(False)
        code = raw.connect_ex(address)
        while code == errno.EAGAIN:  # a unix socket whose queue is full
            await anyio.sleep(_RETRY_SECONDS)
            code = raw.connect_ex(address)
        if code == errno.EINPROGRESS:
            await anyio.wait_writable(raw)
            code = raw.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    except BaseException:
        raw.close()
        raise
    if code:
        raw.close()
        raise OSError(code, os.strerror(code))
    return SocketStream(raw)
