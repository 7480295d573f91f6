"""One listening socket for all proxies of a machine, held at home and handed to each.

While a proxy is replaced, or before the first one has come, connections wait in the socket's backlog: agents see an
answer that takes longer, and not a refusal. The socket travels over a unix socket in the private directory of the run.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from socket import socket

import anyio
from anyio.abc import SocketStream, UNIXSocketStream

__all__ = ["fetch_listener", "handing_out"]


@asynccontextmanager
async def handing_out(listener: socket, path: Path) -> AsyncIterator[None]:
    """Hand ``listener`` to whoever connects to ``path``, while the block lasts."""

    async def hand(stream: SocketStream) -> None:
        assert isinstance(stream, UNIXSocketStream)
        with suppress(OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):  # it was killed as it came
            async with stream:
                await stream.send_fds(b"\n", [listener.fileno()])

    async with await anyio.create_unix_listener(path, mode=0o600) as door, anyio.create_task_group() as tasks:
        tasks.start_soon(door.serve, hand)
        yield
        tasks.cancel_scope.cancel()


async def fetch_listener(path: Path) -> socket:
    """The socket that is handed out at ``path``. Raises ``OSError`` where nobody is, or nobody any more."""
    try:
        async with await anyio.connect_unix(path) as stream:
            _, descriptors = await stream.receive_fds(1, 1)
    except (anyio.EndOfStream, anyio.BrokenResourceError) as error:
        raise ConnectionResetError(f"whoever hands out the socket at {path} has left") from error
    listener = socket(fileno=descriptors[0])
    listener.setblocking(False)
    return listener
