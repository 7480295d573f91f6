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


async def test_an_answer():
    """The typed object holds what was said, and its id can be rewarded."""
    async with connected() as (client, session, _):
        answer = await client.chat.completions.create(model="m", messages=MESSAGES, logprobs=True, max_tokens=2)
        await session.set_reward(answer.id, 1.0)

    assert answer.choices[0].message.content == "one two "
    assert answer.choices[0].finish_reason == "length"
    assert [entry.logprob for entry in answer.choices[0].logprobs.content] == [-0.5, -0.5]
    assert answer.usage.completion_tokens == 2


async def test_several_choices():
    """``n=2`` gives two, by index."""
    async with connected() as (client, _, _):
        answer = await client.chat.completions.create(model="m", messages=MESSAGES, n=2)

    assert [choice.index for choice in answer.choices] == [0, 1]


async def test_a_conversation_with_a_tool():
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


async def test_a_stream_with_the_sdks_own_accumulator():
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


async def test_text_streams():
    """Plain iteration over chunks; all have the id by which the answer is rewarded."""
    async with connected() as (client, session, _):
        stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        chunks = [chunk async for chunk in stream]
        await session.set_reward(chunks[0].id, 1.0)

    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "one two three "
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize(
    ("error", "expected", "status"),
    [
        (errors.InvalidRequest("x"), openai.BadRequestError, 400),
        (errors.ContextLengthExceeded(num_tokens=9, max_tokens=8), openai.BadRequestError, 400),
        (errors.Conflict("x"), openai.ConflictError, 409),
        (errors.SessionEnded("x"), openai.APIStatusError, 410),
        (errors.Unprocessable("x"), openai.UnprocessableEntityError, 422),
        (errors.CaptureViolation("x"), openai.InternalServerError, 500),
        (RuntimeError("x"), openai.InternalServerError, 500),
    ],
)
async def test_what_is_not_worth_retrying_is_asked_once(error, expected, status):
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
async def test_what_is_worth_retrying_says_when(error, expected):
    """With its retries spent, the SDK raises; the answer had told it how long to wait."""

    async def script(request):
        raise error
        yield

    async with connected(script, max_retries=0) as (client, _, _):
        with pytest.raises(expected) as caught:
            await client.chat.completions.create(model="m", messages=MESSAGES)

    assert caught.value.response.headers["retry-after"] == "1"
    assert "x-should-retry" not in caught.value.response.headers


async def test_a_wrong_key_and_a_lost_session():
    """401 and 404 are classes of their own, too."""
    async with connected() as (client, _, _):
        by_key = client.with_options(base_url=str(client.base_url).replace(client.base_url.path, "/v1/"))
        with pytest.raises(openai.AuthenticationError):
            await by_key.with_options(api_key="sk-wrong").chat.completions.create(model="m", messages=MESSAGES)
        lost = client.with_options(base_url=str(client.base_url).replace(client.base_url.path, "/nobody/v1/"))
        with pytest.raises(openai.NotFoundError):
            await lost.with_options(api_key="DUMMY").chat.completions.create(model="m", messages=MESSAGES)


async def test_an_error_within_a_stream_is_raised():
    """The SDK turns the error event into an exception that has our code."""

    async def script(request):
        yield TextDelta(text="a")
        raise errors.Unavailable("gone")

    async with connected(script) as (client, _, _):
        stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError, match="gone") as caught:
            [chunk async for chunk in stream]

    assert caught.value.code == "unavailable"


async def test_models_are_listed():
    """``client.models.list()`` works, on a session's URL as well."""
    async with connected() as (client, _, _):
        models = [model.id async for model in client.models.list()]

    assert models == ["policy"]
