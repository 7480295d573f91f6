"""Handover of connections between the processes of a service, so that each request arrives at its session's process.

All processes listen on one port, and the kernel gives a new connection to any of them (``SO_REUSEPORT``). The process
that accepts it looks at the head of its first request without reading it (``MSG_PEEK``). If the path or the key names a
session of another process (``cache.session``), it passes the descriptor to that process, which serves the connection as
if it had accepted it. That costs one message on a unix socket for each connection, and nothing for its later requests.

A client that sends requests for several processes over one connection, such as a reverse proxy, is answered as well:
the process that has the connection asks the session's process (``sessions.shards``).
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import anyio
from anyio.abc import TaskGroup
from attrs import evolve, frozen

from areal_actors.cache.session import process_of
from areal_actors.lib.scratch import scratch_directory
from areal_actors.lib.telemetry import get_logger

__all__ = ["Handover", "ServeConnection", "find_process", "open_handover", "serve_connections"]

_log = get_logger(__name__)

_HEAD_BYTES = 16 * 1024
"""A head without an end in so many bytes is served where it is; real ones have a few hundred."""
_HEAD_SECONDS = 60.0
_GIVE_SECONDS = 5.0
_PAUSE_SECONDS = 0.01
_MAX_PAUSE_SECONDS = 0.5
_FULL_SECONDS = 0.5
"""How long to wait for free descriptors when the process has none left."""

ServeConnection = Callable[[socket.socket], Coroutine[Any, Any, None]]
"""Serves a connection to its end, and closes it."""


@frozen(kw_only=True)
class Handover:
    """The unix sockets in ``directory`` at which the ``num_processes`` processes of a service receive connections."""

    directory: Path
    num_processes: int
    process: int = 0
    """The number of this process."""

    def of_process(self, process: int) -> Handover:
        """Return the handover as process ``process`` uses it."""
        return evolve(self, process=process)

    def _address(self, process: int) -> str:
        return str(self.directory / f"http-{process}.sock")

    def open_inbox(self) -> socket.socket:
        """Return the socket at which this process receives connections. It replaces that of an earlier process."""
        with suppress(FileNotFoundError):
            Path(self._address(self.process)).unlink()
        inbox = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        inbox.bind(self._address(self.process))
        inbox.setblocking(False)
        return inbox

    async def give(self, connection: socket.socket, process: int) -> bool:
        """Pass the connection to ``process``; return whether it is there to take it."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, anyio.move_on_after(_GIVE_SECONDS):
            sender.setblocking(False)
            try:
                sender.connect(self._address(process))
                while True:
                    try:
                        socket.send_fds(sender, [b"\0"], [connection.fileno()])
                    except BlockingIOError:  # it has as many waiting as the kernel keeps
                        await anyio.wait_writable(sender)
                    else:
                        return True
            except OSError:
                return False
        return False


@asynccontextmanager
async def open_handover(num_processes: int) -> AsyncIterator[Handover | None]:
    """Make the directory of a service's sockets for the block; ``None`` for a service with one process."""
    if num_processes == 1:
        yield None
        return
    # A temporary path, since the run's may exceed the length limit of socket names (about 100 bytes).
    with scratch_directory() as directory:
        yield Handover(directory=directory, num_processes=num_processes)


def find_process(head: bytes) -> int:
    """Return the number of the process that the head of a request names; 0 if it names none.

    A session is named by the path, by the query or by a key, in this order.
    """
    lines = head.decode("latin-1").split("\r\n")
    words = lines[0].split(" ")
    path, _, query = (words[1] if len(words) > 1 else "").partition("?")
    named = [*path.split("/"), *parse_qs(query).get("session_id", ())]
    for line in lines[1:]:
        name, _, value = line.partition(":")
        if name.lower() in ("authorization", "x-api-key"):
            named.append(value.strip().rpartition(" ")[2])
    return next((process for process in map(process_of, named) if process), 0)


async def serve_connections(
    listener: socket.socket,
    handover: Handover,
    serve: ServeConnection,
    *,
    shutdown: Callable[[], Awaitable[None]],
    grace_seconds: float,
) -> None:
    """Accept connections, and serve those that belong to this process, until ``shutdown`` returns.

    Connections may then continue for ``grace_seconds``. One that fails is logged and closed.
    """

    async def serve_one(connection: socket.socket) -> None:
        try:
            await serve(connection)
        except Exception:  # noqa: BLE001 - a fault with one connection must not end the others
            _log.exception("connection_failed")
            connection.close()

    with handover.open_inbox() as inbox, listener:
        async with anyio.create_task_group() as connections:
            async with anyio.create_task_group() as accepting:
                accepting.start_soon(_accept, listener, handover, serve_one, connections)
                accepting.start_soon(_receive, inbox, serve_one, connections)
                await shutdown()
                accepting.cancel_scope.cancel()
            connections.cancel_scope.deadline = anyio.current_time() + grace_seconds


async def _accept(listener: socket.socket, handover: Handover, serve: ServeConnection, connections: TaskGroup) -> None:
    while True:
        await anyio.wait_readable(listener)
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            continue
        except OSError as error:
            _log.warning("no_connection_accepted", reason=str(error))
            await anyio.sleep(_FULL_SECONDS)
            continue
        connection.setblocking(False)
        connections.start_soon(_hand_over_connection, connection, handover, serve)


async def _hand_over_connection(connection: socket.socket, handover: Handover, serve: ServeConnection) -> None:
    try:
        process = await _peek_process(connection)
        is_known = process < handover.num_processes
        if process != handover.process and is_known and await handover.give(connection, process):
            connection.close()
            return
    except OSError:  # the client has gone
        connection.close()
        return
    except BaseException:
        connection.close()
        raise
    await serve(connection)


async def _peek_process(connection: socket.socket) -> int:
    """Wait for the head of the first request, and return the number of the process that it belongs to."""
    head, pause = b"", _PAUSE_SECONDS
    with anyio.move_on_after(_HEAD_SECONDS):
        while b"\r\n\r\n" not in head and len(head) < _HEAD_BYTES:
            await anyio.wait_readable(connection)
            peeked = connection.recv(_HEAD_BYTES, socket.MSG_PEEK)
            if len(peeked) == len(head):
                if not peeked:
                    break  # closed
                # The kernel reports a connection as readable as long as what was seen is not read.
                await anyio.sleep(pause)
                pause = min(pause * 2, _MAX_PAUSE_SECONDS)
            head = peeked
    return find_process(head)


async def _receive(inbox: socket.socket, serve: ServeConnection, connections: TaskGroup) -> None:
    flags = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
    while True:
        await anyio.wait_readable(inbox)
        with suppress(BlockingIOError):
            _, descriptors, _, _ = socket.recv_fds(inbox, 1, 1, flags)
            for descriptor in descriptors:
                connection = socket.socket(fileno=descriptor)
                connection.setblocking(False)
                connections.start_soon(serve, connection)
