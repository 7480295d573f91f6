"""The proxy as the ``anthropic`` SDK sees it, on both event loops."""

from __future__ import annotations

from contextlib import asynccontextmanager

import anthropic
import anyio
import httpx2
import pytest

from areal_actors import errors
from areal_actors.domain import ReasoningDelta, TextDelta, ToolArgumentsDelta, ToolCallStarted
from areal_actors.proxy import ProxyConfig
from areal_actors_testing.serving import echo_script, open_scripted_proxy

pytestmark = [
    pytest.mark.anyio,
    # At its end the SDK leaves a stream's generators to the garbage collector, of which trio warns.
    pytest.mark.filterwarnings("ignore:Async generator '(httpx2|anthropic|httpcore2?):ResourceWarning"),
]

MESSAGES = [{"role": "user", "content": "one two three"}]
TOOL = {"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {}}}
ASK = {"model": "m", "messages": MESSAGES, "max_tokens": 64}


async def call_script(request):
    """A turn with two tool calls, then one that reads their results."""
    results = [message.content for message in request.messages if message.role == "tool"]
    if results:
        yield TextDelta(text=f"It is {' and '.join(results)}.")
        return
    yield ReasoningDelta(text="Let me ")
    yield ReasoningDelta(text="add.")
    yield TextDelta(text="One moment.")
    for index, pieces in enumerate((('{"a":', " 1}"), ("{}",))):
        yield ToolCallStarted(index=index, id=f"call_{index}", name="add")
        for piece in pieces:
            yield ToolArgumentsDelta(index=index, text=piece)


@asynccontextmanager
async def connected(script=echo_script, **options):
    """An SDK client of a session, and the statuses of what it was answered."""
    statuses = []

    async def note(response: httpx2.Response) -> None:
        statuses.append(response.status_code)

    config = options.pop("config", None)
    async with (
        open_scripted_proxy(script, config=config) as proxy,
        proxy.open_session() as session,
        httpx2.AsyncClient(event_hooks={"response": [note]}) as http,
    ):
        base_url = session.base_url.removesuffix("/v1")
        client = anthropic.AsyncAnthropic(base_url=base_url, api_key=session.api_key, http_client=http, **options)
        yield client, session, statuses, proxy


async def test_messages_sdk_reads_an_answer():
    """The typed object holds what was said, and its id can be rewarded."""
    async with connected() as (client, session, _, proxy):
        answer = await client.messages.create(
            **ASK | {"max_tokens": 2}, system="Echo.", extra_body={"temperature": 0.5}
        )
        await session.set_reward(answer.id, 1.0)

    assert answer.id.startswith("msg_")
    assert [(block.type, block.text) for block in answer.content] == [("text", "one two ")]
    assert (answer.stop_reason, answer.stop_sequence, answer.model) == ("max_tokens", None, "m")
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (2, 2)
    assert answer._request_id.startswith("req_")
    assert proxy.sessions.requests[0].messages[0].role == "system"
    assert proxy.sessions.requests[0].sampling.temperature == 0.5


@pytest.mark.parametrize("is_stream", [False, True])
async def test_messages_sdk_runs_parallel_tools(is_stream):
    """The blocks are sent back as they came, thinking included, and two results in one turn are two messages."""
    async with connected(call_script) as (client, _, _, proxy):
        ask = ASK | {"tools": [TOOL]}
        if is_stream:
            async with client.messages.stream(**ask) as stream:
                first = await stream.get_final_message()
        else:
            first = await client.messages.create(**ask)
        calls = [block for block in first.content if block.type == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": str(n)} for n, call in enumerate(calls)]
        history = [*MESSAGES, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
        second = await client.messages.create(**ask | {"messages": history})

    assert [block.type for block in first.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert [call.input for call in calls] == [{"a": 1}, {}]
    assert first.stop_reason == "tool_use"
    assert second.content[0].text == "It is 0 and 1."
    echoed = proxy.sessions.requests[1].messages[1]
    assert (echoed.reasoning, echoed.content) == ("Let me add.", "One moment.")
    assert [call.arguments for call in echoed.tool_calls] == ['{"a":1}', "{}"]


async def test_messages_sdk_streams_text():
    """Plain iteration over events; the answer's id comes first, and usage at both ends."""
    async with connected() as (client, session, _, _):
        events = [event async for event in await client.messages.create(**ASK, stream=True)]
        await session.set_reward(events[0].message.id, 1.0)

    assert [event.type for event in events] == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * 3,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert "".join(event.delta.text for event in events[2:5]) == "one two three "
    assert events[0].message.usage.input_tokens == events[-2].usage.input_tokens == 1
    assert (events[-2].delta.stop_reason, events[-2].usage.output_tokens) == ("end_turn", 3)


async def test_silent_messages_stream_sends_pings():
    """Anthropic's own keep-alive, also before the first event; the SDK skips it, a watchdog sees it."""
    gate = anyio.Event()

    async def script(request):
        await gate.wait()
        yield TextDelta(text="late")

    config = ProxyConfig(keep_alive_seconds=0.01)
    async with connected(script, config=config) as (client, session, _, _), httpx2.AsyncClient() as http:
        async with http.stream("POST", f"{session.base_url}/messages", json=ASK | {"stream": True}) as response:
            lines = response.aiter_lines()
            with anyio.fail_after(10):
                while await anext(lines) != "event: ping":
                    pass
                payload = await anext(lines)
                gate.set()
                rest = [line async for line in lines]
        whole = await client.messages.create(**ASK)

    assert payload == 'data: {"type":"ping"}'
    assert "event: message_stop" in rest
    assert whole.content[0].text == "late"


@pytest.mark.parametrize("is_by_header", [False, True])
async def test_messages_key_names_its_session(is_by_header):
    """Newer SDKs send it as a bearer, older ones and Claude Code as ``x-api-key``; ``?beta=true`` changes nothing."""
    async with connected() as (client, session, _, proxy):
        plain = client.with_options(base_url=proxy.url)
        if is_by_header:
            plain = plain.with_options(
                api_key="", default_headers={"x-api-key": session.api_key, "authorization": anthropic.Omit()}
            )
        answer = await plain.beta.messages.create(**ASK, betas=["x"], context_management={"edits": []})

    assert answer.content[0].text == "one two three "


async def test_token_count_records_nothing():
    """The count is that of the answer's usage, and there is no turn to reward."""
    async with connected() as (client, _, _, proxy):
        count = await client.messages.count_tokens(model="m", messages=MESSAGES, system="Echo.", tools=[TOOL])
        beta = await client.beta.messages.count_tokens(model="m", messages=MESSAGES)
        number = len(proxy.sessions.requests)
        answer = await client.messages.create(**ASK, system="Echo.", tools=[TOOL])

    assert count.input_tokens == answer.usage.input_tokens == 2
    assert (beta.input_tokens, number) == (1, 0)


@pytest.mark.parametrize(
    ("error", "expected", "status", "kind"),
    [
        (errors.InvalidRequest("x"), anthropic.BadRequestError, 400, "invalid_request_error"),
        (errors.SessionEnded("x"), anthropic.APIStatusError, 410, "invalid_request_error"),
        (errors.PayloadTooLarge("x"), anthropic.RequestTooLargeError, 413, "request_too_large"),
        (RuntimeError("x"), anthropic.InternalServerError, 500, "api_error"),
    ],
)
async def test_permanent_error_is_not_retried_by_the_messages_sdk(error, expected, status, kind):
    """The SDK raises its class for the status, after one request, although it may retry five times."""

    async def script(request):
        raise error
        yield

    async with connected(script, max_retries=5) as (client, _, statuses, _):
        with pytest.raises(expected) as caught:
            await client.messages.create(**ASK)

    assert statuses == [status]
    assert (caught.value.body["type"], caught.value.body["error"]["type"]) == ("error", kind)
    assert caught.value.request_id == caught.value.body["request_id"]


@pytest.mark.parametrize(
    ("error", "expected", "kind"),
    [
        (errors.Unavailable("x"), anthropic.InternalServerError, "overloaded_error"),
        (errors.CapacityExhausted("x"), anthropic.RateLimitError, "rate_limit_error"),
    ],
)
async def test_temporary_error_says_when_to_retry_messages(error, expected, kind):
    """With its retries spent, the SDK raises; the answer had told it how long to wait."""

    async def script(request):
        raise error
        yield

    async with connected(script, max_retries=0) as (client, _, _, _):
        with pytest.raises(expected) as caught:
            await client.messages.create(**ASK)

    assert caught.value.response.headers["retry-after"] == "1"
    assert "x-should-retry" not in caught.value.response.headers
    assert caught.value.body["error"]["type"] == kind


async def test_wrong_key_and_unknown_session_are_messages_errors():
    """401 and 404 have their own classes; so has an unknown path."""
    async with connected() as (client, _, _, proxy):
        with pytest.raises(anthropic.AuthenticationError):
            await client.with_options(base_url=proxy.url, api_key="sk-wrong").messages.create(**ASK)
        with pytest.raises(anthropic.NotFoundError):
            await client.with_options(base_url=f"{proxy.url}/nobody", api_key="DUMMY").messages.create(**ASK)
        with pytest.raises(anthropic.NotFoundError) as unrouted:
            await client.messages.batches.list()

    assert unrouted.value.body["error"]["type"] == "not_found_error"


async def test_stream_error_is_raised_by_the_messages_sdk():
    """The SDK turns the error event into an exception that has its type."""

    async def script(request):
        yield TextDelta(text="a")
        raise errors.Unavailable("gone")

    async with connected(script) as (client, _, _, _):
        with pytest.raises(anthropic.APIStatusError, match="gone") as caught:
            async with client.messages.stream(**ASK) as stream:
                await stream.get_final_message()

    assert caught.value.body["error"]["type"] == "overloaded_error"
