"""The proxy as the ``openai`` SDK sees it, on both event loops."""

from __future__ import annotations

from contextlib import asynccontextmanager

import httpx
import openai
import pytest

from areal_actors import errors
from areal_actors.client import create_http_client
from areal_actors.domain import ReasoningDelta, TextDelta, ToolArgumentsDelta, ToolCallStarted
from areal_actors_testing.serving import echo_script, open_scripted_proxy

pytestmark = [
    pytest.mark.anyio,
    # At [DONE] the SDK leaves its generators to the garbage collector, of which trio warns.
    pytest.mark.filterwarnings("ignore:Async generator '(httpx|openai|httpcore):ResourceWarning"),
]

MESSAGES = [{"role": "user", "content": "one two three"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


async def call_script(request):
    """A turn with a tool call, then one that reads its result."""
    if request.messages[-1].role == "tool":
        yield TextDelta(text=f"It is {request.messages[-1].content}.")
        return
    yield ReasoningDelta(text="Let me add.")
    yield ToolCallStarted(index=0, id="call_7", name="add")
    for piece in ('{"a":', " 1}"):
        yield ToolArgumentsDelta(index=0, text=piece)


@asynccontextmanager
async def connected(script=echo_script, **options):
    """An SDK client of a session, and the statuses of what it was answered."""
    statuses = []

    async def note(response: httpx.Response) -> None:
        statuses.append(response.status_code)

    async with open_scripted_proxy(script) as proxy, proxy.open_session() as session, create_http_client() as http:
        http.event_hooks["response"].append(note)
        client = openai.AsyncOpenAI(
            base_url=session.base_url, api_key=options.pop("api_key", session.api_key), http_client=http, **options
        )
        yield client, session, statuses


async def test_chat_sdk_reads_an_answer():
    """The typed object holds what was said, and its id can be rewarded."""
    async with connected() as (client, session, _):
        answer = await client.chat.completions.create(model="m", messages=MESSAGES, logprobs=True, max_tokens=2)
        await session.set_reward(answer.id, 1.0)

    assert answer.choices[0].message.content == "one two "
    assert answer.choices[0].finish_reason == "length"
    assert [entry.logprob for entry in answer.choices[0].logprobs.content] == [-0.5, -0.5]
    assert answer.usage.completion_tokens == 2


async def test_chat_sdk_runs_a_tool():
    """The message object itself is sent back, as most agents do, and is understood."""
    async with connected(call_script) as (client, _, _):
        first = await client.chat.completions.create(model="m", messages=MESSAGES, tools=[TOOL])
        message = first.choices[0].message
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "4"}
        second = await client.chat.completions.create(model="m", messages=[*MESSAGES, message, result], tools=[TOOL])

    assert first.choices[0].finish_reason == "tool_calls"
    assert message.content is None
    assert (message.tool_calls[0].function.name, message.tool_calls[0].function.arguments) == ("add", '{"a": 1}')
    assert second.choices[0].message.content == "It is 4."


async def test_chat_sdk_accumulates_a_stream():
    """The helper joins the chunks to the message that the JSON answer would have held."""
    async with connected(call_script) as (client, _, _):
        async with client.chat.completions.stream(
            model="m", messages=MESSAGES, tools=[TOOL], stream_options={"include_usage": True}
        ) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_completion()
        message = final.choices[0].message

    assert "tool_calls.function.arguments.done" in kinds
    assert (message.tool_calls[0].id, message.tool_calls[0].function.arguments) == ("call_7", '{"a": 1}')
    assert message.role == "assistant"
    assert final.choices[0].finish_reason == "tool_calls"
    assert final.usage.completion_tokens == 4


@pytest.mark.parametrize(
    ("error", "expected", "status"),
    [
        (errors.InvalidRequest("x"), openai.BadRequestError, 400),
        (errors.SessionEnded("x"), openai.APIStatusError, 410),
        (RuntimeError("x"), openai.InternalServerError, 500),
    ],
)
async def test_permanent_error_is_not_retried_by_the_chat_sdk(error, expected, status):
    """The SDK raises its class for the status, after one request, although it may retry five times."""

    async def script(request):
        raise error
        yield

    async with connected(script, max_retries=5) as (client, _, statuses):
        with pytest.raises(expected) as caught:
            await client.chat.completions.create(model="m", messages=MESSAGES)

    assert statuses == [status]
    assert caught.value.code == (getattr(error, "code", None) or {500: "internal_error"}.get(status)) or status == 500


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (errors.Unavailable("x"), openai.InternalServerError),
        (errors.CapacityExhausted("x"), openai.RateLimitError),
    ],
)
async def test_temporary_error_says_when_to_retry_chat(error, expected):
    """With its retries spent, the SDK raises; the answer had told it how long to wait."""

    async def script(request):
        raise error
        yield

    async with connected(script, max_retries=0) as (client, _, _):
        with pytest.raises(expected) as caught:
            await client.chat.completions.create(model="m", messages=MESSAGES)

    assert caught.value.response.headers["retry-after"] == "1"
    assert "x-should-retry" not in caught.value.response.headers


async def test_stream_error_is_raised_by_the_chat_sdk():
    """The SDK turns the error event into an exception that has our code."""

    async def script(request):
        yield TextDelta(text="a")
        raise errors.Unavailable("gone")

    async with connected(script) as (client, _, _):
        stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError, match="gone") as caught:
            [chunk async for chunk in stream]

    assert caught.value.code == "unavailable"
