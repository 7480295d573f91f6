"""Forms of HTTP requests that mean the same: methods, targets, names and values of headers, encodings of bodies."""

from __future__ import annotations

import gzip
import json
import zlib
from http import HTTPStatus

import anyio
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.proxy import ProxyConfig
from areal_actors.proxy.exchange import Exchange, Meter, Operation, Operations, Traffic, path_of
from areal_actors_testing.serving import open_scripted_proxy

pytestmark = pytest.mark.anyio

BODY = {"messages": [{"role": "user", "content": "Grüße"}], "max_tokens": 64}
READ_ONLY = ["/", "/docs", "/health", "/livez", "/metrics", "/openapi.json", "/v1/models", "/v1/models/any"]


async def _nothing(exchange):
    pass


OPERATIONS = Operations(
    {
        "responses": Operation(handle=_nothing, has_session=True),
        "models/{id}": Operation(handle=_nothing, has_session=True),
        "responses/{id}/input_items": Operation(handle=_nothing, has_session=True),
    },
    Traffic(),
    Meter(),
)


async def exchange_bytes(url: str, request: bytes) -> bytes:
    """What a server sends for raw bytes, up to the end of the connection."""
    parts = httpx.URL(url)
    received = b""
    async with await anyio.connect_tcp(parts.host, parts.port) as stream:
        await stream.send(request)
        with anyio.fail_after(10):
            while True:
                try:
                    received += await stream.receive()
                except anyio.EndOfStream:
                    return received


# ----------------------------------------------------------------------------------------------------------- targets


@given(
    session=st.sampled_from([None, "task-0-x"]),
    name=st.sampled_from(["responses", "models/{id}", "responses/{id}/input_items"]),
    item=st.text(min_size=1, max_size=8),
    seams=st.lists(st.sampled_from(["/", "//", "/v1/", "//v1/"]), min_size=6, max_size=6),
    end=st.sampled_from(["", "/", "//"]),
    host=st.sampled_from(["", "http://host:80", "HTTP://user@[::1]:1"]),
)
def test_every_form_of_a_target_finds_its_operation(session, name, item, *, seams, end, host):
    """Slashes, ``/v1``, percent-encoded ids and the absolute form change neither operation nor item."""
    encoded = "".join(f"%{byte:02X}" for byte in item.encode())
    parts = [*([session] if session else []), *(encoded if part == "{id}" else part for part in name.split("/"))]
    target = host + "".join(seam + part for seam, part in zip(seams, parts, strict=False)) + end
    decoded = target.replace(encoded, item) if "{id}" in name else target
    path = path_of({"path": decoded, "raw_path": target.encode()})
    expected = (name, session)
    if item == "v1" and "{id}" in name:
        return

    assert OPERATIONS.find(path) == expected


async def test_targets_in_absolute_form_are_answered():
    """As proxies send them; the host is not a session."""
    async with open_scripted_proxy() as proxy, proxy.open_session() as session:
        body = json.dumps(BODY).encode()
        head = f"POST {session.base_url}/chat/completions?x=1 HTTP/1.1\r\nhost: h\r\nconnection: close\r\n"
        asked = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
        answered = await exchange_bytes(proxy.url, asked)
        head = f"GET {proxy.url}/v1/models HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n"
        listed = await exchange_bytes(proxy.url, head.encode())

    assert b"chat.completion" in answered
    assert b'"object":"list"' in listed


# ----------------------------------------------------------------------------------------------------------- methods


async def test_head_is_answered_as_get_without_the_body():
    """Load balancers and monitors ask so. A route whose ``GET`` changes something has no ``HEAD``."""
    async with open_scripted_proxy() as proxy, httpx.AsyncClient(base_url=proxy.url) as http:
        for path in READ_ONLY:
            got, head = await http.get(path), await http.head(path)

            assert (head.status_code, head.content) == (got.status_code, b""), path
            assert head.headers["content-type"] == got.headers["content-type"]
        missing = await http.head("/no/such/path")
        starting = await http.head("/rl/start_session", headers=proxy.admin_headers)

    assert missing.status_code == 404
    assert starting.status_code == 405


async def test_wrong_method_is_told_the_allowed_ones():
    """``Allow`` names the methods in 405, and in the answer to ``OPTIONS``."""
    async with open_scripted_proxy() as proxy, httpx.AsyncClient(base_url=proxy.url) as http:
        refused = [await http.request(method, "/v1/chat/completions") for method in ("GET", "HEAD", "PUT", "PATCH")]
        options = await http.options("/v1/models")

    assert {(answer.status_code, answer.headers["allow"]) for answer in refused} == {(405, "POST")}
    assert (options.status_code, options.headers["allow"], options.content) == (204, "GET, HEAD, OPTIONS", b"")


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_status_line_has_a_reason():
    """Some clients take an answer without one for a failed one. Hypercorn sends none."""
    async with open_scripted_proxy() as proxy:
        for path, status in (("/health", 200), ("/nothing", 404), ("/v1/chat/completions", 405)):
            request = f"GET {path} HTTP/1.1\r\nhost: h\r\n\r\n".encode()
            stream_url = httpx.URL(proxy.url)
            async with await anyio.connect_tcp(stream_url.host, stream_url.port) as stream:
                await stream.send(request)
                received = await stream.receive()

            assert received.startswith(f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n".encode())


# --------------------------------------------------------------------------------------------------- headers, bodies


@pytest.mark.parametrize("scheme", ["Bearer ", "bearer ", "BEARER   ", "bEaReR\t"])
async def test_scheme_of_a_key_is_case_insensitive(scheme):
    """Names of schemes are compared without case, and any white space follows."""
    async with open_scripted_proxy() as proxy, proxy.open_session() as session, httpx.AsyncClient() as http:
        headers = {"AUTHORIZATION": f"{scheme}{session.api_key}"}
        answer = await http.post(f"{proxy.url}/v1/chat/completions", json=BODY, headers=headers)

    assert answer.status_code == 200


def encodings(body: bytes):
    """The body under each accepted encoding, with the header's value."""
    deflated = zlib.compress(body)
    return [("identity", body), ("gzip", gzip.compress(body)), ("x-gzip", gzip.compress(body)), ("deflate", deflated)]


async def test_compressed_bodies_are_read():
    """With gzip and deflate, whatever the case of their names; the limit holds for what they inflate to."""
    config = ProxyConfig(max_body_bytes=10_000)
    async with (
        open_scripted_proxy(config=config) as proxy,
        proxy.open_session() as session,
        httpx.AsyncClient() as http,
    ):

        async def post(body: bytes, encoding: str) -> httpx.Response:
            headers = {"content-encoding": encoding}
            return await http.post(f"{session.base_url}/chat/completions", content=body, headers=headers)

        for name, body in encodings(json.dumps(BODY).encode()):
            for spelling in (name, name.upper(), name.title()):
                assert (await post(body, spelling)).status_code == 200, spelling
        bomb = await post(gzip.compress(b"[" + b" " * 10**6 + b"]"), "gzip")
        cut = await post(gzip.compress(json.dumps(BODY).encode())[:-4], "gzip")
        wrong = await post(b"{}", "gzip")
        unknown = await post(b"{}", "zstd")

    assert bomb.status_code == 413
    assert [cut.status_code, wrong.status_code, unknown.status_code] == [400, 400, 400]
    assert "zstd" in unknown.json()["error"]["message"]


async def test_decoded_body_is_forwarded_with_matching_headers():
    """A gateway forwards headers and body of a request, which must agree."""
    sent = gzip.compress(json.dumps(BODY, ensure_ascii=False).encode())
    headers = [(b"content-encoding", b"GZip"), (b"x", b"y")]

    async def receive():
        return {"type": "http.request", "body": sent}

    exchange = Exchange({"method": "POST", "path": "/", "query_string": b"", "headers": headers}, receive, receive)
    body = await exchange.read_body(max_bytes=1000, timeout_seconds=5)

    assert json.loads(body.decode()) == BODY
    assert exchange.scope["headers"] == [(b"x", b"y")]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("content_type", [None, "text/plain", "application/json; charset=latin-1"])
async def test_body_is_read_as_utf8(content_type, encoding):
    """Whatever its type says, with or without a byte order mark."""
    body = json.dumps(BODY, ensure_ascii=False).encode(encoding)
    async with open_scripted_proxy() as proxy, proxy.open_session() as session, httpx.AsyncClient() as http:
        headers = {} if content_type is None else {"content-type": content_type}
        answer = await http.post(f"{session.base_url}/chat/completions", content=body, headers=headers)

    assert answer.status_code == 200
    assert "Grüße" in answer.json()["choices"][0]["message"]["content"]
