"""Connections: common requests are read as h11 reads them, others by Hypercorn, and nothing is kept of closed ones."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import sys

import anyio
import h11
import httpx
import orjson
import pytest
from anyio.streams.buffered import BufferedByteReceiveStream
from benchmarks.connections import GATE, LOOPS, measure
from benchmarks.floors import serve_as_the_proxy, served
from hypothesis import example, given
from hypothesis import strategies as st
from tests.proxy.plain import connect

from areal_actors.proxy.connections import read_head
from areal_actors.testing.serving import open_scripted_proxy


@pytest.fixture(params=["asyncio", "uvloop", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    """Every loop: on uvloop, a request may have arrived before its connection is served."""
    if request.param != "uvloop":
        return request.param, {}
    pytest.importorskip("uvloop", reason='pip install "areal_actors[uvloop]"')
    return "asyncio", {"use_uvloop": True}


@pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors in /proc")
@pytest.mark.parametrize("loop", LOOPS)
def test_closed_connections_leave_no_descriptors(loop):
    """A server that may open 256 files answers 1,000 short-lived clients, and holds no more than before them."""
    outcome = asyncio.run(measure(loop, 1_000))

    assert outcome.num_unanswered == 0
    assert outcome.num_held <= GATE


@pytest.mark.anyio
async def test_an_idle_client_is_kept_and_answered_again():
    """Closing belongs to the client: a connection that it keeps serves its next request."""
    async with open_scripted_proxy() as proxy, httpx.AsyncClient(base_url=proxy.url) as http:
        async with await connect(proxy):
            pass
        answers = [await http.get("/health") for _ in range(3)]
        ports = {answer.extensions["network_stream"].get_extra_info("client_addr") for answer in answers}

    assert [answer.status_code for answer in answers] == [200, 200, 200]
    assert len(ports) == 1


@pytest.mark.anyio
async def test_a_client_that_leaves_at_once_is_noticed():
    """The server ends its side soon after, though it waits 75 seconds for the next request of one that stays."""
    async with open_scripted_proxy() as proxy:
        stream = await connect(proxy)
        await stream.send_eof()
        with anyio.fail_after(10), pytest.raises(anyio.EndOfStream):
            await stream.receive()
        await stream.aclose()


# ------------------------------------------------------------------------------------------------ reading like h11

NAMES = ["content-length", "Content-Length", "host", "Host", "connection", "transfer-encoding", "expect", "x-a", "é"]
VALUES = [
    "",
    "0",
    "3",
    "+3",
    " 3",
    "3,3",
    "0x3",
    "keep-alive",
    "Keep-Alive",
    "close",
    "chunked",
    "100-continue",
    "a\tb",
]
LINES = st.one_of(
    st.tuples(st.sampled_from(NAMES), st.sampled_from([":", ": ", " : ", ":\t", ":  "]), st.sampled_from(VALUES)).map(
        "".join
    ),
    st.text(alphabet=st.characters(max_codepoint=255), max_size=12),
    st.sampled_from(["", " folded", "\tfolded", "host: x\nhost: y", "a: b\rc", "a: b\n", "a: b\n\nGET /b HTTP/1.1"]),
)
STARTS = st.one_of(
    st.tuples(
        st.sampled_from(["GET", "POST", "DELETE", "get", "PUT", ""]),
        st.sampled_from([" ", "  ", "\t"]),
        st.sampled_from(["/", "/a?b=%20c", "*", "http://x/", "/é", "/a b", "//"]),
        st.sampled_from([" HTTP/1.1", " HTTP/1.0", " HTTP/1.1 ", " HTTP/2.0", " HTTP/01.1", ""]),
    ).map("".join),
    st.text(alphabet=st.characters(max_codepoint=255), max_size=12),
)


@given(start=STARTS | st.just("POST /v1 HTTP/1.1"), lines=st.lists(LINES, max_size=4), has_host=st.booleans())
@example(start="POST / HTTP/1.1", lines=["content-length: 3", "X-A:  b  "], has_host=True)
@example(start="GET /a?b HTTP/1.1", lines=["connection: keep-alive"], has_host=True)
@example(start="GET /a HTTP/1.1", lines=["a: b\n\nGET /b HTTP/1.1", "host: y"], has_host=True)
@example(start="\r\nGET /a HTTP/1.1", lines=[], has_host=True)
def test_a_head_in_the_common_form_is_read_as_h11_reads_it(start, lines, has_host):
    """Whatever ``read_head`` reads has the same method, target, headers and length of its body for h11."""
    head = "\r\n".join([start, *(["host: x"] if has_host else []), *lines]).encode("latin-1")
    assert b"\r\n\r\n" not in head or read_head(head) is None
    found = read_head(head)
    if found is None:
        return
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(head + b"\r\n\r\n" + b"x" * found.length + b"GET /next HTTP/1.1\r\n")

    request = connection.next_event()
    body = b"".join(bytes(event.data) for event in iter(connection.next_event, h11.EndOfMessage()))

    assert (found.method.encode(), found.target, found.headers) == (
        request.method,
        request.target,
        list(request.headers),
    )
    assert request.http_version == b"1.1"
    assert len(body) == found.length
    assert not connection.they_are_waiting_for_100_continue


@given(lengths=st.lists(st.from_regex(r"[0-9]{1,15}", fullmatch=True), min_size=2, max_size=4))
def test_a_head_that_is_sent_again_has_its_own_length_and_headers(lengths):
    """Heads that differ in the length of the body only are read alike, and share no list that a reader may change."""
    for length in lengths:
        head = read_head(b"POST /v1 HTTP/1.1\r\nhost: x\r\nContent-Length: %b\r\na: b" % length.encode())
        assert head is not None
        assert head.length == int(length)
        assert head.headers == [(b"host", b"x"), (b"content-length", length.encode()), (b"a", b"b")]
        head.headers.clear()


def test_what_clients_send_is_in_the_common_form():
    """The rule is not so narrow that real requests miss it."""
    head = (
        b"POST /s/v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:80\r\nConnection: keep-alive\r\nX-Stainless-Os: Linux"
    )
    found = read_head(head + b"\r\ncontent-length: 12\r\nUser-Agent:x \r\nempty:")

    assert found is not None
    assert found.length == 12
    assert found.headers[-2:] == [(b"user-agent", b"x"), (b"empty", b"")]


# ------------------------------------------------------------------------------------------------------- over sockets


async def echo(scope, receive, send):
    """Answer with what was asked, in one part, in two or without reading the body."""
    if scope["type"] == "lifespan":
        for _ in range(2):
            message = await receive()
            await send({"type": f"{message['type']}.complete"})
        return
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


def create_request(numbers):
    """Return a request and its expected answer; some are not in the common form."""
    path, size = numbers.choice(["/whole", "/parts", "/a%20b?c=d"]), numbers.choice([0, 1, 70_000, 200_000])
    text = "x" * size
    fields = {
        "common": f"content-length: {size}\r\n\r\n{text}",
        "chunked": f"transfer-encoding: chunked\r\n\r\n{size:x}\r\n{text}\r\n0\r\n\r\n" if size else "\r\n",
        "slow": f"x-folded: a\r\n b\r\ncontent-length: {size}\r\n\r\n{text}",
    }
    kind = numbers.choice(["common", "common", "common", "chunked", "slow"])
    raw, _, query = path.partition("?")
    said = ["POST", raw.replace("%20", " "), query, text]
    return f"POST {path} HTTP/1.1\r\nhost: x\r\n{fields[kind]}".encode(), said


async def converse(url, pieces, num_answers):
    """Send these bytes, in these pieces, and return the bodies of the answers."""
    connection, bodies = h11.Connection(h11.CLIENT), []
    async with await anyio.connect_tcp("127.0.0.1", int(url.rsplit(":", 1)[1])) as stream:

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


@pytest.mark.anyio
async def test_requests_in_any_form_and_any_pieces_are_answered_in_order():
    """Pipelined, cut anywhere, and with requests between them that Hypercorn has to read."""
    numbers = random.Random(7)
    async with served(echo, serve_as_the_proxy) as url:
        for _ in range(25):
            requests = [create_request(numbers) for _ in range(numbers.randint(1, 4))]
            data = b"".join(raw for raw, _ in requests)
            cuts = sorted(numbers.sample(range(len(data)), numbers.randint(0, 5)))
            pieces = [data[a:b] for a, b in itertools.pairwise([0, *cuts, len(data)])]
            with anyio.fail_after(20):
                answers = await converse(url, pieces, len(requests))
            assert answers == [said for _, said in requests]


@pytest.mark.anyio
async def test_a_body_that_the_application_does_not_read_is_no_part_of_the_next_request():
    """It is left out, and the connection continues."""
    body = "GET / HTTP/1.1\r\nhost: other\r\n\r\n"
    request = f"HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n{body}"
    data = f"POST /unread {request}POST /whole {request}".encode()
    async with served(echo, serve_as_the_proxy) as url:
        answers = await converse(url, [data], 2)

    assert answers == [["POST", "/unread", "", ""], ["POST", "/whole", "", body]]


@pytest.mark.anyio
@pytest.mark.parametrize("uncommon", [b"", b"x-name: \xe9\r\n"], ids=["common", "uncommon"])
async def test_a_client_that_still_sends_an_unwanted_body_gets_its_answer(uncommon):
    """The rest is read and left out, and the connection continues. A reset would take the answer from the client."""
    body = b"x" * 1_000_000
    head = b"POST /unread HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n" + uncommon + b"\r\n"
    async with (
        served(echo, serve_as_the_proxy) as url,
        await anyio.connect_tcp("127.0.0.1", int(url.rsplit(":", 1)[1])) as stream,
    ):
        answers = BufferedByteReceiveStream(stream)
        await stream.send(head + body[:10])
        with anyio.fail_after(10):
            await answers.receive_until(b'["POST","/unread","",""]', 10_000)
            await stream.send(body[10:] + b"GET /whole HTTP/1.1\r\nhost: x\r\n\r\n")
            await answers.receive_until(b'["GET","/whole","",""]', 10_000)


@pytest.mark.anyio
async def test_an_application_that_fails_answers_500_and_ends_its_connection(caplog):
    """The other connections go on."""
    async with served(echo, serve_as_the_proxy) as url, httpx.AsyncClient(base_url=url) as http:
        failed = await http.post("/fail", json={})
        answered = await http.post("/whole", content=b"x")

    assert (failed.status_code, failed.headers["connection"]) == (500, "close")
    assert answered.json() == ["POST", "/whole", "", "x"]
    assert "the application fails" in caplog.text


@pytest.mark.anyio
async def test_a_client_may_close_its_side_behind_its_request():
    """It is answered, and then the connection ends."""
    async with (
        served(echo, serve_as_the_proxy) as url,
        await anyio.connect_tcp("127.0.0.1", int(url.rsplit(":", 1)[1])) as stream,
    ):
        await stream.send(b"GET /whole HTTP/1.1\r\nhost: x\r\n\r\n")
        await stream.send_eof()
        received = b""
        with anyio.fail_after(10), pytest.raises(anyio.EndOfStream):
            while True:
                received += await stream.receive()

    assert received.startswith(b"HTTP/1.1 200 ")
    assert received.endswith(b'["GET","/whole","",""]')


@pytest.mark.anyio
async def test_a_server_that_stops_ends_idle_connections_at_once():
    """Clients with open connections do not delay it."""
    with anyio.fail_after(10):
        async with served(echo, serve_as_the_proxy) as url, httpx.AsyncClient(base_url=url) as http:
            await http.post("/whole", content=b"x")
            started = anyio.current_time()
        assert anyio.current_time() - started < 5


@pytest.mark.anyio
@pytest.mark.parametrize("path", [None, "/whole", "/endless"])
async def test_a_server_that_stops_closes_every_connection(path):
    """New and idle ones, and those whose request is not answered in time: no client waits for a server that is gone."""
    begun = anyio.Event()

    async def app(scope, receive, send):
        if scope.get("path") != "/endless":
            await echo(scope, receive, send)
            return
        begun.set()
        await anyio.sleep_forever()

    with anyio.fail_after(10):
        async with served(app, serve_as_the_proxy) as url:
            stream = await anyio.connect_tcp("127.0.0.1", int(url.rsplit(":", 1)[1]))
            if path is not None:
                await stream.send(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
            if path == "/whole":
                assert (await stream.receive()).startswith(b"HTTP/1.1 200 ")
            elif path == "/endless":
                await begun.wait()
        async with stream:
            with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                await stream.receive()
    # A connection that was left open would warn here.
    gc.collect()
