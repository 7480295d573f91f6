"""Addresses of connections, and the sockets behind them.

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
from pathlib import Path
from urllib.parse import urlsplit

import anyio
from anyio.abc import ByteStream

from areal_actors.errors import ConfigError
from areal_actors.lib.loops import Signal, is_trio, running_loop
from areal_actors.lib.telemetry import get_logger

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

The default of 208 KiB is smaller than a chunk, so that each would be split.
"""

_RECEIVE_BYTES = 64 * 1024

_RETRY_SECONDS = 0.01

_NEXT_ADDRESS_SECONDS = 3.0
"""Time after which an address that does not answer is given up for the next one; the last one has no limit."""

_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_EXHAUSTED_SECONDS = 0.1
"""Delay before accepting again when resources are exhausted; clients wait in the backlog meanwhile."""


class SocketStream(ByteStream):
    """A connected socket.

    On asyncio it stays registered with the event loop, and is read in its callback. Streams of anyio register for each
    read; an ask between two processes would cost half as much again.
    """

    def __init__(self, raw: socket.socket) -> None:
        raw.setblocking(False)
        if raw.family == socket.AF_UNIX:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        else:
            # Frames are joined before they are written; Nagle's algorithm would only delay the last one.
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.raw = raw
        self._asyncio = None if is_trio() else asyncio.get_running_loop()
        self._new_signal = running_loop().new_signal
        self._is_registered = False
        self._arrival: Signal | None = None
        self._data = b""
        self._end: type[Exception] | None = None

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """Wait for data, and return at most ``max_bytes`` of it."""
        while not self._data:
            if self._end is not None:
                raise self._end
            if self._asyncio is None:
                await anyio.wait_readable(self.raw)
                self._read()
                continue
            self._arrival = self._new_signal()
            if not self._is_registered:
                self._is_registered = True
                self._asyncio.add_reader(self.raw, self._on_readable)
            await self._arrival.wait()
        data, self._data = self._data[:max_bytes], self._data[max_bytes:]
        return data

    async def send(self, item: bytes) -> None:
        """Send all of ``item``."""
        view = memoryview(item)
        while view:
            if self.raw.fileno() < 0:
                raise anyio.ClosedResourceError
            try:
                view = view[self.raw.send(view) :]
            except BlockingIOError:
                await anyio.wait_writable(self.raw)
            except OSError as error:
                raise anyio.BrokenResourceError from error

    async def send_eof(self) -> None:
        """Shut down the sending direction."""
        self.raw.shutdown(socket.SHUT_WR)

    async def aclose(self) -> None:
        """Close the socket at once."""
        if self.raw.fileno() >= 0:
            self._unregister()
            self._data, self._end = b"", anyio.ClosedResourceError
            if self._arrival is not None:
                self._arrival.set()
            anyio.notify_closing(self.raw)
            self.raw.close()

    def _on_readable(self) -> None:
        if self._data or self._end is not None:
            # The reader has not come yet for what arrived before.
            self._unregister()
            return
        self._read()
        if self._arrival is not None:
            self._arrival.set()

    def _read(self) -> None:
        try:
            self._data = self.raw.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            self._end = anyio.BrokenResourceError
            return
        if not self._data:
            self._end = anyio.EndOfStream

    def _unregister(self) -> None:
        if self._is_registered and self._asyncio is not None:
            self._is_registered = False
            self._asyncio.remove_reader(self.raw)


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
