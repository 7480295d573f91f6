"""Every server on every loop: framing of requests, attacks on it, clients that leave, and the end of a server."""

from __future__ import annotations

import gc
import itertools
import os
import random
import sys
from contextlib import asynccontextmanager
from functools import partial

import anyio
import h11
import httpx
import orjson
import pytest
from anyio.streams.buffered import BufferedByteReceiveStream

from areal_actors.proxy import ProxyConfig
from areal_actors.proxy.config import HttpServer
from areal_actors.proxy.server import bind, serve, url_of

pytestmark = pytest.mark.anyio

SERVERS = {
    "uvicorn-asyncio": ("asyncio", {}, HttpServer.UVICORN),
    "uvicorn-uvloop": ("asyncio", {"use_uvloop": True}, HttpServer.UVICORN),
    "hypercorn-asyncio": ("asyncio", {}, HttpServer.HYPERCORN),
    "hypercorn-trio": ("trio", {}, HttpServer.HYPERCORN),
}


@pytest.fixture(params=SERVERS)
def server_name(request: pytest.FixtureRequest) -> str:
    """Return the name of a server and its loop."""
    return str(request.param)


@pytest.fixture
def anyio_backend(server_name: str) -> tuple[str, dict[str, bool]]:
    """Return the loop of the server."""
    backend, options, _ = SERVERS[server_name]
    if options:
        pytest.importorskip("uvloop", reason='pip install "areal_actors[uvloop]"')
    return backend, options


@pytest.fixture
def served(server_name: str):
    """Return a context manager that serves an application and yields its port."""

    @asynccontextmanager
    async def open_server(app, **settings):
        listener, stopping = bind(ProxyConfig()), anyio.Event()
        port = httpx.URL(url_of(listener)).port
        run = partial(serve, app, listener, shutdown=stopping.wait, server=SERVERS[server_name][2], **settings)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            yield port
            stopping.set()

    return open_server


async def connect(port):
    """Open a connection."""
    return await anyio.connect_tcp("127.0.0.1", port)


async def receive_all(stream):
    """Return the bytes up to the end of a connection."""
    received = b""
    with anyio.fail_after(10):
        while True:
            try:
                received += await stream.receive()
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                return received


async def exchange(port, *pieces):
    """Send bytes, and return what comes back up to the end of the connection."""
    async with await connect(port) as stream:
        for piece in pieces:
            await stream.send(piece)
        return await receive_all(stream)


async def echo(scope, receive, send):
    """Answer with the request, in one part, in two or without reading the body."""
    if scope["path"] == "/fail":
        raise RuntimeError("the application fails")
    body, is_more = b"", scope["path"] != "/unread"
    while is_more:
        message = await receive()
        body, is_more = body + message["body"], message["more_body"]
    said = orjson.dumps([scope["method"], scope["path"], scope["query_string"].decode(), body.decode()])
    headers = [(b"content-length", b"%d" % len(said))] if scope["path"] == "/whole" else []
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    if scope["path"] == "/parts":
        await send({"type": "http.response.body", "body": said[:5], "more_body": True})
        said = said[5:]
    await send({"type": "http.response.body", "body": said})


# ------------------------------------------------------------------------------------------------------------ framing


def create_request(numbers):
    """Return a request and its expected answer."""
    path, size = numbers.choice(["/whole", "/parts", "/a%20b?c=d"]), numbers.choice([0, 1, 70_000, 200_000])
    text = "x" * size
    fields = {
        "length": f"content-length: {size}\r\n\r\n{text}",
        "chunks": f"transfer-encoding: chunked\r\n\r\n{size:x}\r\n{text}\r\n0\r\n\r\n" if size else "\r\n",
    }
    raw, _, query = path.partition("?")
    said = ["POST", raw.replace("%20", " "), query, text]
    return f"POST {path} HTTP/1.1\r\nhost: x\r\n{fields[numbers.choice(list(fields))]}".encode(), said


async def converse(port, pieces, num_answers):
    """Send bytes in these pieces, and return the bodies of the answers."""
    connection, bodies = h11.Connection(h11.CLIENT), []
    async with await connect(port) as stream:

        async def send():
            for piece in pieces:
                await stream.send(piece)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send)
            for _ in range(num_answers):
                connection.send(h11.Request(method="GET", target="/", headers=[("host", "x")]))
                connection.send(h11.EndOfMessage())
                body = b""
                while not isinstance(event := connection.next_event(), h11.EndOfMessage):
                    if event is h11.NEED_DATA:
                        connection.receive_data(await stream.receive())
                    elif isinstance(event, h11.Data):
                        body += event.data
                bodies.append(orjson.loads(body))
                connection.start_next_cycle()
    return bodies


async def test_pipelined_requests_in_any_pieces_are_answered_in_order(served):
    """Bodies with a length and in chunks, cut anywhere."""
    numbers = random.Random(7)
    async with served(echo) as port:
        for _ in range(15):
            requests = [create_request(numbers) for _ in range(numbers.randint(1, 4))]
            data = b"".join(raw for raw, _ in requests)
            cuts = sorted(numbers.sample(range(len(data)), numbers.randint(0, 5)))
            pieces = [data[a:b] for a, b in itertools.pairwise([0, *cuts, len(data)])]
            with anyio.fail_after(20):
                answers = await converse(port, pieces, len(requests))
            assert answers == [said for _, said in requests]


async def test_request_inside_an_unread_body_is_not_executed(served):
    """The body is skipped, and the connection continues."""
    body = "GET / HTTP/1.1\r\nhost: other\r\n\r\n"
    request = f"HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n{body}"
    data = f"POST /unread {request}POST /whole {request}".encode()
    async with served(echo) as port:
        answers = await converse(port, [data], 2)

    assert answers == [["POST", "/unread", "", ""], ["POST", "/whole", "", body]]


async def test_answer_reaches_a_client_that_still_sends_its_body(served):
    """The rest of the body is skipped. A reset would take the answer from the client."""
    body = b"x" * 1_000_000
    head = b"POST /unread HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n"
    async with served(echo) as port, await connect(port) as stream:
        answers = BufferedByteReceiveStream(stream)
        await stream.send(head + body[:10])
        with anyio.fail_after(10):
            await answers.receive_until(b'["POST","/unread","",""]', 10_000)
            await stream.send(body[10:] + b"GET /whole HTTP/1.1\r\nhost: x\r\n\r\n")
            await answers.receive_until(b'["GET","/whole","",""]', 10_000)


SMUGGLED = b"GET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.mark.parametrize(
    "fields",
    [
        b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"content-length: 0\r\ncontent-length: 36\r\n\r\n",
        b"content-length: +0\r\n\r\n",
        b"content-length : 0\r\n\r\n",
        b"content-length: 0x0\r\n\r\n",
        b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
        b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        b"transfer-encoding: chunked\r\n\r\n0_2\r\nab\r\n0\r\n\r\n",
        b"transfer-encoding: chunked\r\n\r\n-1\r\n\r\n0\r\n\r\n",
        b"transfer-encoding: chunked\r\n\r\n2\r\nabc\r\n0\r\n\r\n",
        b"a\x00b: c\r\n\r\n",
        b": c\r\n\r\n",
    ],
)
async def test_ambiguous_framing_ends_the_connection(served, fields):
    """Two readings of where a request ends would let one client speak for another behind a proxy."""
    async with served(echo) as port:
        received = await exchange(port, b"POST /whole HTTP/1.1\r\nhost: x\r\n" + fields + SMUGGLED)

    assert b"smuggled" not in received
    last = received.rpartition(b"HTTP/1.1 ")[2]
    assert not last or last.startswith((b"4", b"5"))


async def test_endless_and_slow_heads_end_the_connection(served):
    """In one header or in many, before a request, in trailers or in the extension of a chunk; and heads without end."""
    body = b"POST /unread HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    endless = [
        (b"GET / HTTP/1.1\r\na: ", b"x" * 1000),
        (b"GET / HTTP/1.1\r\n", b"name: value\r\n" * 100),
        (b"GET /", b"x" * 1000),
        (b"", b"\r\n" * 500),
        (body + b"0\r\n", b"name: value\r\n" * 100),
        (body + b"1;", b"x" * 1000),
    ]
    async with served(echo, idle_seconds=1.0) as port:
        for start, more in endless:
            async with await connect(port) as stream:
                with anyio.fail_after(10), pytest.raises((anyio.BrokenResourceError, anyio.EndOfStream)):
                    await stream.send(start)
                    for _ in range(100_000):
                        await stream.send(more)
        for start in (b"", b"GET /", b"GET / HTTP/1.1\r\nhost: x\r\n"):
            assert b" 200 " not in await exchange(port, start)


async def test_complete_head_above_the_limit_is_refused(served):
    """The limit does not depend on how the bytes arrive."""
    head = b"GET /whole HTTP/1.1\r\nhost: x\r\na: " + b"x" * 200_000 + b"\r\n\r\n"
    async with served(echo) as port:
        received = await exchange(port, head)

    assert received.startswith(b"HTTP/1.1 4")


# ---------------------------------------------------------------------------------------------- clients that disconnect


@pytest.mark.parametrize("is_half", [False, True], ids=["closed", "half-closed"])
async def test_application_is_told_that_its_client_has_left(served, is_half):
    """A client that closes its side waits for nothing, whether it could still read or not."""
    begun, told = anyio.Event(), anyio.Event()

    async def app(scope, receive, send):
        await receive()
        begun.set()
        assert (await receive())["type"] == "http.disconnect"
        told.set()

    async with served(app) as port:
        stream = await connect(port)
        await stream.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        with anyio.fail_after(10):
            await begun.wait()
            await (stream.send_eof() if is_half else stream.aclose())
            await told.wait()
        await stream.aclose()


@pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors in /proc")
async def test_closed_connections_leave_no_descriptors(served):
    """A client that leaves an idle connection costs nothing until the next one comes."""

    def count():
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names only

    async with served(echo, idle_seconds=0.5) as port:
        before = count()
        for _ in range(200):
            async with await connect(port) as stream:
                await stream.send(b"GET /whole HTTP/1.1\r\nhost: x\r\n\r\n")
                assert (await stream.receive()).startswith(b"HTTP/1.1 200 ")
        async with await connect(port) as stream:
            with anyio.fail_after(10):
                while count() > before + 10:
                    await stream.send(b"GET /whole HTTP/1.1\r\nhost: x\r\n\r\n")
                    await stream.receive()


async def test_malformed_bytes_of_a_client_that_leaves_end_no_other_connection(served):
    """Resets and garbage, behind a request or alone."""
    pieces = [b"\x00", b"GET / HTTP/1.1\r\nhost: x\r\n\r\n\xff\xff\r\n\r\n", b"POST /whole HTTP/1.1\r\nhost: x\r\n"]
    async with served(echo) as port, await connect(port) as kept:
        for number in range(60):
            stream = await connect(port)
            await stream.send(pieces[number % 3] * 3)
            await (stream.send_eof() if number % 2 else stream.aclose())
            await stream.aclose()
        await kept.send(b"GET /whole HTTP/1.1\r\nhost: x\r\n\r\n")
        with anyio.fail_after(10):
            assert (await kept.receive()).startswith(b"HTTP/1.1 200 ")


# --------------------------------------------------------------------------------------------------- ends of the server


async def test_failing_application_answers_500_and_ends_its_connection(served, caplog):
    """The other connections go on."""
    async with served(echo) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
        failed = await http.post("/fail", json={})
        answered = await http.post("/whole", content=b"x")

    assert (failed.status_code, failed.headers["connection"]) == (500, "close")
    assert answered.json() == ["POST", "/whole", "", "x"]
    assert "the application fails" in caplog.text


@pytest.mark.parametrize("path", [None, "/whole", "/endless"])
async def test_stopping_server_closes_every_connection(served, path):
    """New and idle ones, and those whose request is not answered in time: no client waits for a server that is gone."""
    begun = anyio.Event()

    async def app(scope, receive, send):
        if scope["path"] != "/endless":
            await echo(scope, receive, send)
            return
        begun.set()
        await anyio.sleep_forever()

    with anyio.fail_after(10):
        async with served(app) as port:
            stream = await connect(port)
            if path is not None:
                await stream.send(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
            if path == "/whole":
                assert (await stream.receive()).startswith(b"HTTP/1.1 200 ")
            elif path == "/endless":
                await begun.wait()
        async with stream:
            await receive_all(stream)
    # A connection that was left open would warn here.
    gc.collect()
