"""Connections of clients of a proxy: kept, bounded, and not used again after a failed request."""

from __future__ import annotations

from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
import httpx
import pytest
from anyio.abc import SocketAttribute
from attrs import define, field

from areal_actors.client.http import create_http_client

pytestmark = pytest.mark.anyio

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


@define
class Server:
    """Answers ``ok``, on ``/held`` when it is released, on ``/last`` before it hangs up."""

    url: str = ""
    num_connections: int = 0
    num_open: int = 0
    requests: list[bytes] = field(factory=list)
    release: anyio.Event = field(factory=anyio.Event)

    async def serve(self, stream):
        self.num_connections += 1
        self.num_open += 1
        try:
            async with stream:
                while True:
                    await self._answer(stream, await stream.receive())
        except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass
        finally:
            self.num_open -= 1

    async def _answer(self, stream, request):
        path = request.split(b" ", 2)[1]
        self.requests.append(path)
        if path == b"/held":
            await self.release.wait()
        await stream.send(ANSWER)
        if path == b"/last":
            await stream.aclose()


@asynccontextmanager
async def connected(**limits):
    """A server, and a client of it."""
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    server = Server()
    server.url = f"http://127.0.0.1:{listener.extra(SocketAttribute.local_port)}"
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, server.serve)
        async with create_http_client(**limits) as client:
            client.base_url = server.url
            yield server, client
        tasks.cancel_scope.cancel()


async def _wait_for(condition):
    """Run the event loop until sockets have delivered what the condition waits for."""
    with anyio.fail_after(5):
        while not condition():
            await anyio.lowlevel.checkpoint()


async def test_connection_is_shared_by_successive_requests():
    """Requests that do not overlap need one connection."""
    async with connected() as (server, client):
        texts = [(await client.get("/")).text for _ in range(5)]

    assert texts == ["ok"] * 5
    assert server.num_connections == 1


async def test_connections_of_simultaneous_requests_are_used_again():
    """Requests that overlap have a connection each; afterwards these are used again, none is opened."""
    async with connected() as (server, client):
        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(client.get, "/held")
            await _wait_for(lambda: len(server.requests) == 4)
            server.release.set()
        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(client.get, "/held")

        assert server.num_connections == 4
        assert server.num_open == 4

    assert len(server.requests) == 8


async def test_connections_are_bounded_and_further_requests_wait():
    """No more than ``max_connections`` are open; further requests wait, as long as the pool timeout allows."""
    async with connected(max_connections=1) as (server, client), anyio.create_task_group() as tasks:
        tasks.start_soon(client.get, "/held")
        await _wait_for(lambda: server.requests)
        with pytest.raises(httpx.PoolTimeout):
            await client.get("/", timeout=httpx.Timeout(5, pool=0))
        tasks.start_soon(client.get, "/held")
        server.release.set()

    assert server.num_connections == 1
    assert server.requests == [b"/held", b"/held"]


async def test_connection_of_a_cancelled_request_is_closed():
    """A cancelled request occupies no place, and the answer that is still due is not read as another one."""
    async with connected(max_connections=1) as (server, client):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.get, "/held")
            await _wait_for(lambda: server.requests)
            tasks.cancel_scope.cancel()
        server.release.set()
        text = (await client.get("/")).text

        assert text == "ok"
        assert server.num_connections == 2


async def test_connection_with_an_unread_body_is_closed():
    """What is left of a body would be read as the next answer."""
    async with connected() as (server, client):
        async with client.stream("GET", "/"):
            pass
        text = (await client.get("/")).text

        assert text == "ok"
        assert server.num_connections == 2


async def test_connection_closed_by_the_server_is_replaced():
    """A connection that was closed while it was idle costs a new one, not a request."""
    async with connected() as (server, client):
        await client.get("/last")
        await _wait_for(lambda: server.num_open == 0)
        text = (await client.get("/")).text

        assert text == "ok"
        assert server.num_connections == 2


async def test_refused_connection_raises_connect_error():
    """A refused connection is raised as httpx raises it, each time."""
    async with connected(max_connections=1) as (_, client):
        for _ in range(2):
            with pytest.raises(httpx.ConnectError):
                await client.get("http://127.0.0.1:1/")
