"""Responses as the ``openai`` SDK sees them, over a real socket, on both event loops."""

from __future__ import annotations

from contextlib import asynccontextmanager

import anyio
import openai
import pytest
from pydantic import BaseModel

from areal_actors import errors
from areal_actors.client import OpenAIProxyClient, create_http_client
from areal_actors.domain import ChatMessage, ReasoningDelta, TextDelta, ToolArgumentsDelta, ToolCallStarted
from areal_actors.messages import CollectSession
from areal_actors.models.built_in import create_tiny_tokenizer
from areal_actors.rendering import RendererConfig, create_renderer
from areal_actors.rollouts.staleness import CapacityLimits
from areal_actors.run.inference import InferenceConfig, open_actors
from areal_actors.testing.engines import EchoEngine, script_answers
from areal_actors_testing.serving import echo_script, open_scripted_proxy

pytestmark = [
    pytest.mark.anyio,
    # The SDK leaves its generators to the garbage collector, of which trio warns.
    pytest.mark.filterwarnings("ignore:Async generator '(httpx|openai|httpcore):ResourceWarning"),
]

QUESTION = {"role": "user", "content": "What is 12 times 34?"}
TOOL = {"type": "function", "name": "multiply", "parameters": {"type": "object", "properties": {}}, "strict": False}
CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 12, "b": %d}}\n</tool_call>'


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
    """An SDK client of a session in front of a script."""
    async with open_scripted_proxy(script) as proxy, proxy.open_session() as session, create_http_client() as http:
        client = openai.AsyncOpenAI(
            base_url=session.base_url, api_key=session.api_key, http_client=http, max_retries=0, **options
        )
        yield client, session, proxy


# -------------------------------------------------------------------------------------------- against a script


async def test_an_answer():
    """The typed object holds what was said, and its id can be rewarded."""
    async with connected() as (client, session, _):
        answer = await client.responses.create(
            model="m", input="one two three", max_output_tokens=2, include=["message.output_text.logprobs"]
        )
        await session.set_reward(answer.id, 1.0)

    assert answer.output_text == "one two "
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert [entry.logprob for entry in answer.output[0].content[0].logprobs] == [-0.5, -0.5]
    assert answer.usage.output_tokens == 2


@pytest.mark.parametrize("base", ["/", "/v1/", "/v1/v1/"])
async def test_the_key_alone_opens_the_route(base):
    """Without a session in the URL, under every spelling of the path."""
    async with connected() as (client, session, proxy):
        by_key = client.with_options(base_url=proxy.url + base, api_key=session.api_key)
        answer = await by_key.responses.create(model="m", input="hi")

    assert answer.output_text == "hi "


async def test_a_stream_with_the_sdks_own_accumulator():
    """The final response is what the JSON answer would have been."""
    async with connected(call_script) as (client, session, _):
        async with client.responses.stream(model="m", input="add", tools=[TOOL]) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        await session.set_reward(final.id, 1.0)
        whole = await client.responses.create(model="m", input="add", tools=[TOOL])

    reasoning, call = final.output
    assert "response.function_call_arguments.done" in kinds
    assert reasoning.content[0].text == "Let me add."
    assert (call.call_id, call.arguments) == (whole.output[1].call_id, whole.output[1].arguments)
    assert final.usage == whole.usage


async def test_a_conversation_with_a_tool():
    """The items themselves are sent back, as most agents do, and are understood."""
    async with connected(call_script) as (client, _, proxy):
        first = await client.responses.create(model="m", input="add", tools=[TOOL])
        result = {"type": "function_call_output", "call_id": "call_7", "output": "4"}
        items = [{"role": "user", "content": "add"}, *first.output, result]
        second = await client.responses.create(model="m", input=items, tools=[TOOL])

    assert second.output_text == "It is 4."
    assert proxy.sessions.requests[-1].messages[1].reasoning == "Let me add."


class Sum(BaseModel):
    """A form that an answer takes."""

    total: int


async def test_a_form_is_asked_for_and_parsed():
    """The SDK's ``parse`` sends its schema, and reads the text into the model."""

    async def script(request):
        for piece in ('{"total"', ": 4}"):
            yield TextDelta(text=piece)

    async with connected(script) as (client, _, proxy):
        answer = await client.responses.parse(model="m", input="2 + 2?", text_format=Sum)
        async with client.responses.stream(model="m", input="2 + 2?", text_format=Sum) as stream:
            streamed = await stream.get_final_response()

    (form,) = {str(request.response_format) for request in proxy.sessions.requests}
    assert "is_strict=True" in form
    assert answer.output_parsed == streamed.output_parsed == Sum(total=4)
    assert answer.text.format.name == "Sum"


async def test_an_error_within_a_stream_is_raised():
    """The SDK shows the failed response, and turns the error event into an exception that has our code."""

    async def script(request):
        yield TextDelta(text="a")
        raise errors.Unavailable("gone")

    async with connected(script) as (client, _, _):
        stream = await client.responses.create(model="m", input="hi", stream=True)
        with pytest.raises(openai.APIError, match="gone") as caught:
            async for event in stream:
                seen = event.type

    assert seen == "response.failed"
    assert caught.value.code == "unavailable"


async def test_errors_are_openais():
    """A refused parameter and a lost session are the SDK's classes."""
    async with connected() as (client, _, _):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(model="m", input="hi", background=True)
        lost = client.with_options(base_url=str(client.base_url).replace(client.base_url.path, "/nobody/v1/"))
        with pytest.raises(openai.NotFoundError):
            await lost.with_options(api_key="DUMMY").responses.create(model="m", input="hi")

    assert (refused.value.code, refused.value.param) == ("unsupported_parameter", "background")


# ------------------------------------------------------------------------------------- against the whole stack


@pytest.fixture(scope="module")
def renderer():
    """Rendering has no state worth resetting."""
    return create_renderer(create_tiny_tokenizer())


@pytest.fixture(scope="module")
def thinker():
    """A renderer that takes thinking apart, around a template that shows none of it."""
    return create_renderer(create_tiny_tokenizer(), config=RendererConfig(reasoning_format="think"))


def _ids(renderer, text):
    """What a model samples to say ``text``, end of turn included."""
    if not text:
        return [renderer.stop_token_ids[0]]
    empty = renderer.render((ChatMessage(role="user", content=""),))
    full = renderer.render((ChatMessage(role="user", content=text),))
    start = next(i for i, (a, b) in enumerate(zip(empty, full, strict=False)) if a != b)
    return [*full[start : start + len(full) - len(empty)].tolist(), renderer.stop_token_ids[0]]


class _Stack:
    """The proxy in front of the real sessions, renderer and generation; only the engine is scripted."""

    def __init__(self, *, client, session, engine, sessions, url, admin_key):
        self.client = client
        self.session = session
        self.engine = engine
        self.url = url
        self.admin_key = admin_key
        self._sessions = sessions

    async def turns(self):
        """The interactions so far, in order of request."""
        return (await self._sessions.ask(CollectSession(session=self.session.session_id))).interactions


@asynccontextmanager
async def _stack(renderer, *texts, is_gated=False):
    """A session whose engine says ``texts`` one after another."""
    script = script_answers(*(_ids(renderer, text) for text in texts))
    engine = EchoEngine(script, is_gated=is_gated, vocab_size=renderer.vocab_size)
    config = InferenceConfig(limits=CapacityLimits(max_concurrent=4, batch_size=4))
    opening = open_actors(config, engine=engine, renderer=renderer)
    async with opening as inference, create_http_client() as http:
        endpoint = inference.endpoint
        async with OpenAIProxyClient(endpoint.url, admin_key=endpoint.admin_key) as session:
            client = openai.AsyncOpenAI(
                base_url=session.base_url, api_key=session.api_key, http_client=http, max_retries=0
            )
            yield _Stack(
                client=client,
                session=session,
                engine=engine,
                sessions=inference.sessions,
                url=endpoint.url,
                admin_key=endpoint.admin_key,
            )


def _bare(response):
    """Items without ids and statuses, a message as a plain text, as pydantic-ai sends them."""
    items = []
    for item in response.output:
        raw = item.to_dict()
        if raw["type"] == "message":
            items.append({"role": "assistant", "content": raw["content"][0]["text"]})
        else:
            items.append({key: value for key, value in raw.items() if key not in {"id", "status"}})
    return items


def _emptied(response):
    """Reasoning without what was thought, as inspect sends it."""
    items = [item.to_dict() for item in response.output]
    return [item | {"content": []} if item["type"] == "reasoning" else item for item in items]


def _calls_alone(response):
    """What agno keeps of a turn that calls tools."""
    calls = [item.to_dict() for item in response.output if item.type == "function_call"]
    return [{k: v for k, v in call.items() if k not in {"id", "status"}} for call in calls]


ECHOES = {
    "objects": lambda response: response.output,
    "dictionaries": lambda response: [item.to_dict() for item in response.output],
    "dumped": lambda response: [item.model_dump() for item in response.output],
    "bare": _bare,
    "emptied": _emptied,
    "calls alone": _calls_alone,
}


@pytest.mark.parametrize("style", [*ECHOES, "previous"])
async def test_every_way_to_go_on_extends_the_tokens(renderer, style):
    """Two parallel calls, their results, an answer: by any echo, or by name, the second prompt extends the first."""
    async with _stack(renderer, "Let me see.\n" + CALL % 34 + "\n" + CALL % 35, "Both.") as stack:
        ask = stack.client.responses.create
        first = await ask(model="m", input=[QUESTION], tools=[TOOL], instructions="Be kind.")
        calls = [item for item in first.output if item.type == "function_call"]
        results = [{"type": "function_call_output", "call_id": call.call_id, "output": "408"} for call in calls]
        again = {"model": "m", "tools": [TOOL], "instructions": "Be kind."}
        if style == "previous":
            second = await ask(input=results, previous_response_id=first.id, **again)
        else:
            second = await ask(input=[QUESTION, *ECHOES[style](first), *results], **again)
        await stack.session.set_last_reward(1.0)
        turns = await stack.turns()

    assert [item.type for item in first.output] == ["message", "function_call", "function_call"]
    assert [call.arguments for call in calls] == ['{"a": 12, "b": 34}', '{"a": 12, "b": 35}']
    assert second.output_text == "Both."
    assert (turns[1].parent, turns[1].token_parent, turns[1].fork) == (first.id, first.id, None)
    assert turns[1].messages == tuple(
        ChatMessage(role="tool", content="408", tool_call_id=call.call_id) for call in calls
    )
    assert turns[1].reward == 1.0


@pytest.mark.parametrize("style", [*ECHOES, "previous"])
async def test_thinking_finds_its_parent(thinker, style):
    """Reasoning may come back whole, emptied, or not at all: it is the same answer that is followed."""
    async with _stack(thinker, "<think>\nhm\n</think>\n\nLet me see.\n" + CALL % 34, "Fine.") as stack:
        ask = stack.client.responses.create
        first = await ask(model="m", input=[QUESTION], tools=[TOOL])
        result = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "408"}
        if style == "previous":
            await ask(model="m", input=[result], tools=[TOOL], previous_response_id=first.id)
        else:
            await ask(model="m", input=[QUESTION, *ECHOES[style](first), result], tools=[TOOL])
        turns = await stack.turns()

    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    assert first.output[0].content[0].text == "hm"
    assert first.usage.output_tokens_details.reasoning_tokens > 0
    assert turns[1].parent == first.id
    assert [message.role for message in turns[1].messages] == ["tool"]


async def test_instructions_are_not_carried_over(renderer):
    """What was meant for one response is not read by the next one that names it."""
    async with _stack(renderer, "Yes.", "No.") as stack:
        ask = stack.client.responses.create
        first = await ask(model="m", input="Well?", instructions="Be kind.")
        second = await ask(model="m", input="Sure?", instructions="Be brief.", previous_response_id=first.id)
        prompts = [renderer.decode(request.prompt) for request in stack.engine.requests]

    assert second.previous_response_id == first.id
    assert "Be kind." in prompts[0]
    assert "Be kind." not in prompts[1]
    assert prompts[1].index("Be brief.") < prompts[1].index("Well?") < prompts[1].index("Sure?")


async def test_names_that_nobody_gave_out_here(renderer):
    """An unknown id, and that of another session, are OpenAI's error; a stranger learns nothing from it."""
    async with _stack(renderer, "Yes.") as stack:
        mine = await stack.client.responses.create(model="m", input="Well?")
        async with OpenAIProxyClient(stack.url, admin_key=stack.admin_key) as other:
            stranger = stack.client.with_options(base_url=other.base_url, api_key=other.api_key)
            for client, name in ((stack.client, "resp_nobody"), (stranger, mine.id)):
                with pytest.raises(openai.BadRequestError) as caught:
                    await client.responses.create(model="m", input="x", previous_response_id=name)

                assert caught.value.code == "previous_response_not_found"
                assert f"Previous response with id '{name}' not found." in caught.value.message


@pytest.mark.parametrize("text", ["Let me see.\n" + CALL % 34, "<think>\nhm\n</think>\n\nYes.", ""])
async def test_a_stream_says_what_the_json_says(thinker, text):
    """Token by token, the events come to the same output, under an id that the session knows."""
    async with _stack(thinker, text) as stack:
        whole = await stack.client.responses.create(model="m", input=[QUESTION], tools=[TOOL])
        async with stack.client.responses.stream(model="m", input=[QUESTION], tools=[TOOL]) as stream:
            joined = await stream.get_final_response()
        await stack.session.set_reward(joined.id, 1.0)

    assert [_said(item) for item in joined.output] == [_said(item) for item in whole.output]
    assert joined.usage == whole.usage


def _said(item):
    raw = item.to_dict()
    return raw["type"], raw.get("arguments"), [part["text"] for part in raw.get("content", ())], raw["status"]


async def test_hanging_up_cancels(renderer):
    """Whoever leaves in mid-stream stops the engine; what was sampled is kept, and cannot be followed."""
    async with _stack(renderer, "one two three four", is_gated=True) as stack:
        stack.engine.release(4)
        stream = await stack.client.responses.create(model="m", input="Well?", stream=True)
        events = aiter(stream)
        created = await anext(events)
        while (await anext(events)).type != "response.output_text.delta":
            pass
        await stream.close()
        with anyio.fail_after(10):
            while (turn := (await stack.turns())[0]).status == "pending":
                await anyio.lowlevel.checkpoint()
        with pytest.raises(openai.BadRequestError, match="was not completed"):
            await stack.client.responses.create(model="m", input="x", previous_response_id=created.response.id)

    assert (turn.id, turn.status) == (created.response.id, "cancelled")
    assert stack.engine.statistics().aborted == 1
    assert 0 < len(turn.completion.token_ids) <= 4


async def namespaced_script(request):
    """Calls the function of a namespace by the name that the model knows."""
    if request.messages[-1].role == "tool":
        yield TextDelta(text=request.messages[-2].tool_calls[0].name)
        return
    yield ToolCallStarted(index=0, id="call_7", name="mcp__files__read")
    yield ToolArgumentsDelta(index=0, text="{}")


@pytest.mark.parametrize("is_stream", [False, True])
async def test_calls_carry_their_namespace(is_stream):
    """Codex routes a call by separate namespace and name, and sends both back."""
    inner = {"type": "function", "name": "read", "parameters": {"type": "object", "properties": {}}, "strict": False}
    tools = [{"type": "namespace", "name": "mcp__files", "description": "Files.", "tools": [inner]}]
    async with connected(namespaced_script) as (client, _, _):
        if is_stream:
            async with client.responses.stream(model="m", input="hi", tools=tools) as stream:
                answer = await stream.get_final_response()
        else:
            answer = await client.responses.create(model="m", input="hi", tools=tools)
        (call,) = answer.output
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "text"}
        history = [{"role": "user", "content": "hi"}, call.model_dump(exclude_none=True), result]
        after = await client.responses.create(model="m", input=history, tools=tools)

    assert (call.namespace, call.name) == ("mcp__files", "read")
    assert after.output_text == "mcp__files__read"
