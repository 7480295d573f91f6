"""The transport into an application: like a connection, for httpx and for httpx2."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import anyio
import httpx
import httpx2
import pytest

from areal_actors.direct.in_process import create_http_client

pytestmark = pytest.mark.anyio

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


@pytest.fixture(params=[httpx, httpx2], ids=["httpx", "httpx2"])
def library(request: pytest.FixtureRequest) -> Any:
    """Both libraries have the same classes."""
    return request.param


async def respond(send: Send, *parts: bytes, status: int = 200) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"x-kind", b"test")]})
    for number, part in enumerate(parts, 1):
        await send({"type": "http.response.body", "body": part, "more_body": number < len(parts)})


async def test_a_request_arrives_whole(library: Any) -> None:
    """Method, path, query, headers and body; status, headers and body come back."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        headers = dict(scope["headers"])
        seen = (scope["method"], scope["path"], scope["query_string"], headers[b"x-word"], message["body"])
        await respond(send, repr(seen).encode(), status=201)

    async with create_http_client(app, library) as client:
        answer = await client.post("http://direct/a/b?c=d", content=b"body", headers={"X-Word": "w"})
    assert (answer.status_code, answer.headers["x-kind"]) == (201, "test")
    assert answer.text == repr(("POST", "/a/b", b"c=d", b"w", b"body"))


async def test_parts_arrive_as_they_are_sent(library: Any) -> None:
    """The second part is sent only after the first was read."""
    was_read = anyio.Event()

    async def app(_: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        await was_read.wait()
        await send({"type": "http.response.body", "body": b"two", "more_body": False})

    parts = []
    with anyio.fail_after(5):
        async with create_http_client(app, library) as client, client.stream("GET", "http://direct/") as answer:
            async for part in answer.aiter_raw():
                parts.append(part)
                was_read.set()
    assert parts == [b"one", b"two"]


async def test_leaving_early_is_a_disconnect(library: Any) -> None:
    """The application is told, and has ended when the block has been left."""
    told: list[str] = []

    async def app(_: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        told.append((await receive())["type"])

    with anyio.fail_after(5):
        async with create_http_client(app, library) as client:
            async with client.stream("GET", "http://direct/"):
                pass
            assert told == ["http.disconnect"]


async def test_a_cancelled_request_is_a_disconnect(library: Any) -> None:
    """Also before anything was answered."""
    told: list[str] = []

    async def app(_: Scope, receive: Receive, __: Send) -> None:
        await receive()
        told.append((await receive())["type"])

    async with create_http_client(app, library) as client:
        with anyio.move_on_after(0.01):
            await client.get("http://direct/")
    assert told == ["http.disconnect"]


async def test_a_writer_waits_for_its_reader(library: Any) -> None:
    """An application cannot run ahead of a slow reader without bound."""
    sent: list[int] = []

    async def app(_: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for number in range(100):
            await send({"type": "http.response.body", "body": b"x", "more_body": number < 99})
            sent.append(number)

    async with create_http_client(app, library) as client, client.stream("GET", "http://direct/") as answer:
        await anyio.wait_all_tasks_blocked()
        assert len(sent) < 20
        assert len(await answer.aread()) == 100


async def test_an_application_that_fails_is_a_read_error(library: Any) -> None:
    """At once, before and within the body."""

    async def before(_: Scope, receive: Receive, __: Send) -> None:
        await receive()
        raise RuntimeError("no answer")

    async def within(_: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        raise RuntimeError("no end")

    for app, word in ((before, "no answer"), (within, "no end")):
        async with create_http_client(app, library) as client:
            with pytest.raises(library.ReadError, match=word):
                await client.get("http://direct/")


async def test_a_silent_application_is_a_read_timeout(library: Any) -> None:
    """After the client's own time-out, before and within the body."""

    async def before(_: Scope, receive: Receive, __: Send) -> None:
        await receive()
        await receive()  # the hang-up

    async def within(_: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await receive()  # the hang-up

    for app in (before, within):
        async with create_http_client(app, library) as client:
            with pytest.raises(library.ReadTimeout):
                await client.get("http://direct/", timeout=0.01)
