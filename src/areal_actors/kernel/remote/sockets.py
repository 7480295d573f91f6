"""Addresses, and socket I/O without an intermediate layer: received bytes go directly to their destination.

A portable stream returns new bytes for every receive and takes one bytes object for every send, each with a turn of the
event loop; for small messages that is half of their cost, and for arrays most of it. Here a socket is read and written
when it is ready: on asyncio in callbacks of the event loop, as its transports do, on trio in a task. ``frames`` defines
the bytes, and ``connection`` interprets them.

An address is ``unix:/run/areal/sessions.sock`` or ``tcp://10.0.0.7:4321``. The directory of a unix socket must be
accessible to its owner only; TCP listens on the named interface, never on all of them.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import math
import os
import socket
import stat
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import anyio
from anyio.abc import ByteStream

from areal_actors.errors import ConfigError
from areal_actors.kernel.remote.frames import Buffer
from areal_actors.lib.loops import is_trio, running_loop
from areal_actors.lib.telemetry import get_logger

__all__ = [
    "SocketStream",
    "accept",
    "check_directory",
    "dial_tcp",
    "dial_unix",
    "is_loopback",
    "own_address",
    "parse_address",
    "run_reader",
    "run_writer",
]

_DISCARD = 9
"""The discard port (RFC 863), used for a look-up that sends nothing."""
# The size of ``sun_path`` without the terminating zero byte.
_MAX_PATH_BYTES = 107 if sys.platform == "linux" else 103


def parse_address(address: str) -> tuple[Path | None, str, int]:
    """Return the path of a unix socket, or ``None``, and the host and the port.

    Raises:
        ConfigError: the address is neither, or names every interface, or has a path that is too long for a socket.
    """
    if address.startswith("unix:"):
        path = Path(address.removeprefix("unix:"))
        if not path.is_absolute():
            raise ConfigError(f"address {address!r} needs an absolute path, as unix:/run/user/1000/areal/sessions.sock")
        if len(os.fsencode(path)) > _MAX_PATH_BYTES:
            raise ConfigError(
                f"address {address!r} is too long for a socket (its path has at most {_MAX_PATH_BYTES} bytes); give a "
                "shorter one, or set TMPDIR to a directory that lies less deep if it begins there"
            )
        return path, "", 0
    try:
        parts = urlsplit(address)
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise ConfigError(f"address {address!r} cannot be read: {error}") from None
    if parts.scheme != "tcp" or not host or port is None:
        raise ConfigError(f"address {address!r} is neither unix:PATH nor tcp://HOST:PORT")
    try:
        is_wildcard = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        is_wildcard = host == "*"
    if is_wildcard:
        raise ConfigError(f"address {address!r} names every interface; name one, as tcp://127.0.0.1:0")
    return None, host, port


def is_loopback(host: str) -> bool:
    """Return whether ``host`` can be reached only from this machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def own_address(host: str) -> str:
    """Return the address of this machine from which it reaches ``host``, and under which ``host`` reaches it.

    Nothing is sent: connecting a datagram socket only selects a route.

    Raises:
        OSError: there is no route to it.
    """
    family, *_, address = socket.getaddrinfo(host, _DISCARD, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def check_directory(directory: Path) -> None:
    """Create the directory of a socket, or check that only its owner can enter it.

    Raises:
        ConfigError: other users can enter it.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    # ``mkdir`` does not change the mode of a directory that exists.
    status = directory.stat()
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(
            f"others can enter {directory}, where a socket is to lie; make a directory of its own for it: "
            f"mkdir -m 700 {directory}/sockets"
        )


_log = get_logger(__name__)

_BUFFER_BYTES = 1048576
"""Send buffer of a unix socket.

The kernel's default of 208 KiB is smaller than a chunk, so that each would be split.
"""

_RETRY_SECONDS = 0.01

_NEXT_ADDRESS_SECONDS = 3.0
"""Time after which an address that does not answer is given up for the next one; the last one has no limit."""

_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_EXHAUSTED_SECONDS = 0.1
"""Delay before accepting again when resources are exhausted; clients wait in the backlog meanwhile."""


class SocketStream(ByteStream):
    """A connected socket.

    ``receive_into`` and ``send_some`` never wait; the other methods are those of a ``ByteStream``.
    """

    def __init__(self, raw: socket.socket) -> None:
        raw.setblocking(False)
        if raw.family == socket.AF_UNIX:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        else:
            # Frames are joined before they are written; Nagle's algorithm would only delay the last one.
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.raw = raw

    def receive_into(self, targets: Sequence[memoryview]) -> int:
        """Fill ``targets`` with the bytes that have arrived, and return their number.

        Raises:
            BlockingIOError: nothing has arrived.
            EndOfStream: the other side has closed the connection.
            OSError: the connection is lost.
        """
        raw = self.raw
        num_bytes = raw.recv_into(targets[0]) if len(targets) == 1 else raw.recvmsg_into(targets)[0]
        if not num_bytes:
            raise anyio.EndOfStream
        return num_bytes

    def send_some(self, buffers: Sequence[Buffer]) -> int:
        """Send the beginning of ``buffers``, and return the number of bytes sent.

        Raises:
            BlockingIOError: there is no room.
            OSError: the connection is lost.
        """
        return self.raw.send(buffers[0]) if len(buffers) == 1 else self.raw.sendmsg(buffers)

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """Wait for data, and return at most ``max_bytes`` of it."""
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
        """Shut down the sending direction."""
        self.raw.shutdown(socket.SHUT_WR)

    async def aclose(self) -> None:
        """Close the socket at once."""
        if self.raw.fileno() >= 0:
            anyio.notify_closing(self.raw)
            self.raw.close()

    async def _wait(self, ready: Callable[[socket.socket], object]) -> None:
        if self.raw.fileno() < 0:
            raise anyio.ClosedResourceError
        await ready(self.raw)  # type: ignore[misc]


# ------------------------------------------------------------------------------------------------- when it is ready


async def run_reader(stream: SocketStream, receive: Callable[[], object]) -> None:
    """Call ``receive`` whenever data has arrived, until it raises.

    Raises:
        Exception: the error that ``receive`` raised.
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
    """Call ``flush`` when there is data to write and room for it, until it raises.

    Args:
        stream: the socket to write to.
        flush: writes, and returns whether everything was written.
        on_next: registers a callback, which is called once when there is data to write again.

    Raises:
        Exception: the error that ``flush`` raised.
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
    """Writes in callbacks of the event loop. Everything that is queued in one turn of the loop leaves in one write."""

    def __init__(
        self, stream: SocketStream, flush: Callable[[], bool], on_next: Callable[[Callable[[], object]], object]
    ) -> None:
        self._loop, self._descriptor = asyncio.get_running_loop(), stream.raw.fileno()
        self._flush, self._on_next = flush, on_next
        self._is_waiting = self._is_stopped = False
        self.failed: asyncio.Future[None] = self._loop.create_future()

    def on_ready(self) -> None:
        """Write, because there is room or data."""
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
        """Stop writing."""
        self._is_stopped = True
        self._wait_for_room(is_needed=False)

    def _on_arrival(self) -> None:
        # Not called directly, so that everything queued in this turn of the loop leaves in one write.
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
    """Mark the error as retrieved."""
    # If its waiter was cancelled at the same moment, asyncio would log it as never retrieved.
    if failed.done() and not failed.cancelled():
        failed.exception()


def _guarded(act: Callable[[], object], failed: asyncio.Future[None]) -> None:
    """Call ``act`` and pass its error to ``failed``, because the event loop would only log it."""
    if failed.done():
        return
    try:
        act()
    except Exception as error:  # noqa: BLE001 - raised by the task that waits for it
        failed.set_exception(error)


# ------------------------------------------------------------------------------------------------- where they come from


async def accept(listening: socket.socket) -> SocketStream:
    """Wait for the next connection.

    A connection that is already broken is skipped. When descriptors or memory are exhausted, accepting is retried after
    a delay, and a warning is logged once.
    """
    is_told = False
    while True:
        await anyio.wait_readable(listening)
        try:
            return SocketStream(listening.accept()[0])
        except (BlockingIOError, ConnectionError):
            continue
        except OSError as error:
            # A lack of descriptors is temporary and must not end the listener.
            if error.errno not in _EXHAUSTED:
                raise
            if not is_told:
                remedy = "raise the limit of open files (ulimit -n)"
                _log.warning("connections_wait", reason=error.strerror, remedy=remedy)
            is_told = True
            await anyio.sleep(_EXHAUSTED_SECONDS)


async def dial_unix(path: Path) -> SocketStream:
    """Connect to a unix socket.

    Raises:
        OSError: there is no listener.
    """
    return await _connected(socket.AF_UNIX, str(path))


async def dial_tcp(host: str, port: int) -> SocketStream:
    """Connect to the first address of ``host`` that answers.

    Raises:
        OSError: no address answers.
    """
    failure = OSError(f"{host} has no address")
    found = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for number, (family, _, _, _, address) in enumerate(found, start=1):
        try:
            # A host may have addresses that drop packets silently; without a limit, the first would use up the caller's
            # deadline.
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
        # The backlog of a unix socket is full, and there is no event to wait for.
        while code == errno.EAGAIN:
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
