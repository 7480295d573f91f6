"""Connections that are passed between the processes of a service, over real sockets."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import anyio
import pytest

from areal_actors.proxy.handover import Handover, open_handover, serve_connections

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def _open_process(handover: Handover) -> AsyncIterator[int]:
    """Serve as one process, and yield its port. Each connection is answered with the number of the process."""

    async def serve(connection: socket.socket) -> None:
        with connection:
            await anyio.wait_readable(connection)
            if b"/fault" in connection.recv(4096):
                raise RuntimeError("a fault with this connection")
            connection.send(b"%d" % handover.process)

    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    stopping = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(
            partial(serve_connections, listener, handover, serve, shutdown=stopping.wait, grace_seconds=5.0)
        )
        yield listener.getsockname()[1]
        stopping.set()


async def _ask(port: int, *parts: bytes) -> bytes:
    """Send the parts of a head one after the other, and return what is answered until the connection is closed."""
    async with await anyio.connect_tcp("127.0.0.1", port) as stream:
        for part in parts:
            await stream.send(part)
            await anyio.wait_all_tasks_blocked()
        answer = b""
        try:
            while True:
                answer += await stream.receive()
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            return answer


async def test_a_connection_is_served_by_the_process_that_it_names() -> None:
    """Wherever it arrives, and however its head is cut; a process that is not there is stood in for."""
    async with open_handover(3) as handover:
        assert handover is not None
        with anyio.fail_after(20):
            async with _open_process(handover) as first, _open_process(handover.of_process(1)) as second:
                named = b"GET /task-abcdefghijklmnopqrstuv.1/v1/models HTTP/1.1\r\n"
                assert await _ask(first, named, b"host: x\r\n", b"\r\n") == b"1"
                assert await _ask(second, b"GET / HTTP/1.1\r\nauthorization: Bearer sk-abc\r\n\r\n") == b"0"
                assert await _ask(first, b"GET /task-abcdefghijklmnopqrstuv.2/v1/models HTTP/1.1\r\n\r\n") == b"0"


async def test_a_connection_that_fails_does_not_end_the_others() -> None:
    """It is closed, and the next one is served: the process has the connections of all other agents, too."""
    async with open_handover(2) as handover:
        assert handover is not None
        with anyio.fail_after(20):
            async with _open_process(handover) as port:
                assert await _ask(port, b"GET /fault HTTP/1.1\r\n\r\n") == b""
                assert await _ask(port, b"GET / HTTP/1.1\r\n\r\n") == b"0"
