"""The proxy over real sockets: bodies that come, or do not, and answers that leave while they are sampled."""

from __future__ import annotations

import re
from contextlib import suppress

import anyio
import httpx
import orjson
import pytest
from anyio.abc import SocketAttribute
from tests.proxy.plain import BODY, CHAT, bearer, connect, start

from areal_actors.domain import TextDelta
from areal_actors.errors import CapacityExhausted
from areal_actors.proxy import ProxyConfig
from areal_actors_testing.serving import open_scripted_proxy

pytestmark = pytest.mark.anyio


# -------------------------------------------------------------------------------------------------------- bodies


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"", {}, 400),
        (b"{", {}, 400),
        (b"\xff\xfe", {}, 400),
        (b"[1]", {}, 400),
        (b"[" * 100_000, {}, 400),
        (b'{"messages": "\\ud800"}', {}, 400),
        (orjson.dumps(BODY), {"content-type": "text/plain"}, 200),
        (orjson.dumps(BODY), {"content-encoding": "gzip"}, 400),
        (b" " * 200_001, {}, 413),
    ],
    ids=["empty", "cut", "binary", "list", "deep", "surrogate", "text/plain", "gzip", "large"],
)
async def test_invalid_body_is_400(content, headers, status):
    """Malformed and oversized bodies get an error body of their status; a wrong content type does not matter."""
    config = ProxyConfig(max_body_bytes=200_000)
    async with open_scripted_proxy(config=config) as proxy, httpx.AsyncClient(base_url=proxy.url) as http:
        session = (await start(http, proxy))["session_id"]
        response = await http.post(f"/{session}{CHAT}", content=content, headers=headers)

    assert response.status_code == status
    assert status == 200 or set(response.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize(("depth", "status"), [(100, 200), (140, 400)])
async def test_deeply_nested_body_is_400(path, depth, status):
    """They are refused in every dialect before anything is sampled; what is accepted can be repeated in the answer."""
    schema = {"type": "object"}
    function = {"name": "f", "parameters": schema}
    body = {
        CHAT: BODY | {"tools": [{"type": "function", "function": function}]},
        "/v1/responses": {"input": "one", "tools": [{"type": "function", **function}]},
        "/v1/messages": BODY | {"tools": [{"name": "f", "input_schema": schema}]},
    }[path]
    content = orjson.dumps(body).replace(orjson.dumps(schema), b'{"a":' * depth + b"1" + b"}" * depth)
    async with open_scripted_proxy() as proxy, httpx.AsyncClient(base_url=proxy.url) as http:
        started = await start(http, proxy)
        response = await http.post(f"/{started['session_id']}{path}", content=content)
        ended = await http.post("/rl/end_session", headers=bearer(started["api_key"]))

    assert response.status_code == status
    assert ended.json()["interaction_count"] == (status == 200)


async def test_endless_body_is_413():
    """A client that sends on and on is answered and cut off, and the server lives."""
    config = ProxyConfig(max_body_bytes=100_000)
    async with open_scripted_proxy(config=config) as proxy, await connect(proxy) as stream:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_send_for_ever, stream)
            with anyio.fail_after(10):
                answer = await stream.receive()
            tasks.cancel_scope.cancel()
        async with proxy.open_session() as session, httpx.AsyncClient() as http:
            healthy = await http.post(f"{session.base_url}/chat/completions", json=BODY)

    assert answer.startswith(b"HTTP/1.1 413")
    assert healthy.status_code == 200


async def _send_for_ever(stream):
    await stream.send(b"POST /x/v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
    with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
        while True:
            await stream.send(b"10000\r\n" + b" " * 65536 + b"\r\n")


async def test_missing_body_is_408():
    """408, so that one slow client holds nothing."""
    config = ProxyConfig(body_timeout_seconds=0.02)
    async with open_scripted_proxy(config=config) as proxy, await connect(proxy) as stream:
        await stream.send(b"POST /x/v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{")

        assert (await stream.receive()).startswith(b"HTTP/1.1 408")


# ------------------------------------------------------------------------------------------------------- answers


class Gate:
    """A script that says one word, and the next when it is opened; it notes when it is cut off."""

    def __init__(self):
        self.started, self.opened, self.cancelled = anyio.Event(), anyio.Event(), anyio.Event()

    async def script(self, request):
        yield TextDelta(text="first ")
        self.started.set()
        try:
            await self.opened.wait()
        except BaseException:
            self.cancelled.set()
            raise
        yield TextDelta(text="second")


async def test_stream_error_is_the_last_event():
    """After the first delta the status is spent: the error is an event, and no ``[DONE]`` follows."""

    async def script(request):
        yield TextDelta(text="a")
        raise ValueError

    async with open_scripted_proxy(script) as proxy, httpx.AsyncClient(base_url=proxy.url) as http:
        session = (await start(http, proxy))["session_id"]
        response = await http.post(f"/{session}{CHAT}", json=BODY | {"stream": True})
    events = response.text.strip().split("\n\n")

    assert response.status_code == 200
    assert orjson.loads(events[-1].removeprefix("data: "))["error"]["code"] == "internal_error"
    assert "data: [DONE]" not in events


async def test_error_before_a_stream_has_its_status():
    """Nothing was said yet, so that clients see what it is and whether to retry."""
    async with open_scripted_proxy() as proxy, httpx.AsyncClient(base_url=proxy.url) as http:
        response = await http.post(f"/nobody{CHAT}", json=BODY | {"stream": True})

    assert response.status_code == 404


async def test_stream_deltas_arrive_while_tokens_are_sampled():
    """The first word is read before the script may say the second."""
    gate = Gate()
    async with open_scripted_proxy(gate.script) as proxy, httpx.AsyncClient(base_url=proxy.url) as http:
        session = (await start(http, proxy))["session_id"]
        async with http.stream("POST", f"/{session}{CHAT}", json=BODY | {"stream": True}) as response:
            lines = response.aiter_lines()
            said = []
            async for line in lines:
                said += re.findall(r'"content":"(\w+) ?"', line)
                if said == ["first"]:
                    gate.opened.set()

    assert said == ["first", "second"]


async def test_silent_stream_sends_comments():
    """A stream whose tokens are long in coming shows that it lives, before and after its first delta."""
    gate = Gate()
    config = ProxyConfig(keep_alive_seconds=0.01)
    async with (
        open_scripted_proxy(gate.script, config=config) as proxy,
        httpx.AsyncClient(base_url=proxy.url) as http,
    ):
        session = (await start(http, proxy))["session_id"]
        async with http.stream("POST", f"/{session}{CHAT}", json=BODY | {"stream": True}) as response:
            lines = [line async for line in _open_on_comment(response, gate)]

    assert ": keep-alive" in lines
    assert lines[-2] == "data: [DONE]"


async def _open_on_comment(response, gate):
    async for line in response.aiter_lines():
        if line == ": keep-alive":
            gate.opened.set()
        yield line


@pytest.mark.parametrize("is_stream", [False, True])
async def test_disconnect_aborts_the_generation(is_stream):
    """Whether or not it was to be streamed: a client that closes its socket cancels what was asked for it."""
    gate = Gate()
    async with open_scripted_proxy(gate.script) as proxy, proxy.open_session() as session:
        body = orjson.dumps(BODY | {"stream": is_stream})
        head = f"POST /{session.session_id}{CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        async with await connect(proxy) as stream:
            await stream.send(head.encode() + body)
            with anyio.fail_after(10):
                await gate.started.wait()
            assert stream.extra(SocketAttribute.remote_port) == int(proxy.url.rsplit(":", 1)[1])
        with anyio.fail_after(10):
            await gate.cancelled.wait()


# ----------------------------------------------------------------------------------------- streams that do not begin


async def refusing_script(_):
    """Has no room, which an engine finds out after the answer was announced."""
    raise CapacityExhausted("There is no room for this request; try again later.", retry_after_seconds=0.0)
    yield TextDelta(text="")


@pytest.mark.parametrize(
    ("path", "body"),
    [(CHAT, BODY), ("/v1/responses", {"input": "one"}), ("/v1/messages", BODY), ("/v1/completions", {"prompt": "one"})],
)
async def test_stream_refused_before_its_first_token_has_a_status(path, body):
    """SDKs retry a status of 429; an error within a stream that has begun ends most agents."""
    async with open_scripted_proxy(refusing_script) as proxy, httpx.AsyncClient(base_url=proxy.url) as http:
        session = (await start(http, proxy))["session_id"]
        response = await http.post(f"/{session}{path}", json=body | {"stream": True})

    assert response.status_code == 429
    assert "no room" in response.json()["error"]["message"]
