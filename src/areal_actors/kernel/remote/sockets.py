"""Addresses of connections, and the streams of unix sockets.

An address is ``unix:/run/areal/sessions.sock`` or ``tcp://10.0.0.7:4321``. The directory of a unix socket must be
accessible to its owner only; TCP listens on the named interface, never on all of them.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
import sys
from pathlib import Path
from urllib.parse import urlsplit

import anyio
from anyio.abc import ByteStream

from areal_actors.errors import ConfigError

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


class UnixStream(ByteStream):
    """A connected unix socket.

    Not anyio's: on asyncio, a ``receive`` of that which is cancelled at the moment at which data arrives raises
    ``InvalidStateError`` in a callback of the event loop.
    """

    def __init__(self, raw: socket.socket) -> None:
        raw.setblocking(False)
        self._raw = raw

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """Wait for data, and return at most ``max_bytes`` of it."""
        while True:
            self._check_open()
            # Also if there is data already: a sender that never pauses must not keep other tasks waiting.
            await anyio.wait_readable(self._raw)
            try:
                data = self._raw.recv(max_bytes)
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
            self._check_open()
            try:
                view = view[self._raw.send(view) :]
            except BlockingIOError:
                await anyio.wait_writable(self._raw)
            except OSError as error:
                raise anyio.BrokenResourceError from error

    async def send_eof(self) -> None:
        """Shut down the sending direction."""
        self._raw.shutdown(socket.SHUT_WR)

    async def aclose(self) -> None:
        """Close the socket at once."""
        if self._raw.fileno() >= 0:
            anyio.notify_closing(self._raw)
            self._raw.close()

    def _check_open(self) -> None:
        if self._raw.fileno() < 0:
            raise anyio.ClosedResourceError
