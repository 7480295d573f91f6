"""The proxy in front of the real sessions, renderer and generation; only the engine is scripted."""

from __future__ import annotations

from contextlib import asynccontextmanager

import openai
import pytest

from areal_actors.client import OpenAIProxyClient, create_http_client
from areal_actors.domain import ChatMessage
from areal_actors.models.built_in import create_tiny_tokenizer
from areal_actors.rendering import create_renderer
from areal_actors.rollouts.staleness import CapacityLimits
from areal_actors.run.inference import InferenceConfig, open_actors
from areal_actors.testing.engines import EchoEngine, echo_logprob, script_answers

pytestmark = [
    pytest.mark.anyio,
    # At [DONE] the SDK leaves its generators to the garbage collector, of which trio warns.
    pytest.mark.filterwarnings("ignore:Async generator '(httpx|openai|httpcore):ResourceWarning"),
]

QUESTION = {"role": "user", "content": "What is 12 times 34?"}
TOOL = {"type": "function", "function": {"name": "multiply", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 12, "b": 34}}\n</tool_call>'


@pytest.fixture(scope="module")
def renderer():
    """Rendering has no state worth resetting."""
    return create_renderer(create_tiny_tokenizer())


def _ids(renderer, text):
    """What a model samples to say ``text``, end of turn included."""
    empty = renderer.render((ChatMessage(role="user", content=""),))
    full = renderer.render((ChatMessage(role="user", content=text),))
    start = next(i for i, (a, b) in enumerate(zip(empty, full, strict=False)) if a != b)
    return [*full[start : start + len(full) - len(empty)].tolist(), renderer.stop_token_ids[0]]


@asynccontextmanager
async def _stack(renderer, *texts, is_gated=False):
    """A session of the whole stack, whose engine says ``texts`` one after another."""
    script = script_answers(*(_ids(renderer, text) for text in texts))
    engine = EchoEngine(script, is_gated=is_gated, vocab_size=renderer.vocab_size)
    config = InferenceConfig(limits=CapacityLimits(max_concurrent=4, batch_size=4))
    opening = open_actors(config, engine=engine, renderer=renderer)
    async with opening as inference, create_http_client() as http:
        endpoint = inference.endpoint
        async with OpenAIProxyClient(endpoint.url, admin_key=endpoint.admin_key) as session:
            client = openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, http_client=http)
            yield client, session, engine


async def test_what_was_sampled_is_what_is_exported(renderer):
    """Two turns with a tool: the ids and logprobs of the rows are the engine's, and the SDK's echo finds its parent."""
    async with _stack(renderer, CALL, "It is 408.") as (client, session, _):
        first = await client.chat.completions.create(model="m", messages=[QUESTION], tools=[TOOL], logprobs=True)
        call = first.choices[0].message.tool_calls[0]
        history = [QUESTION, first.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "408"}]
        second = await client.chat.completions.create(model="m", messages=history, tools=[TOOL])
        await session.set_last_reward(1.0)
        await session.end_session()
        (row,) = (await session.export_episode(discount=0.9, style="concat")).trajectories
        models = [model.id async for model in client.models.list()]

    sampled = [*_ids(renderer, CALL), *_ids(renderer, "It is 408.")]
    assert (call.function.name, call.function.arguments) == ("multiply", '{"a": 12, "b": 34}')
    assert second.choices[0].message.content == "It is 408."
    assert row.interactions == (first.id, second.id)
    assert row.input_ids[row.loss_mask == 1].tolist() == sampled
    assert row.logprobs[row.loss_mask == 1].tolist() == [echo_logprob(token) for token in sampled]
    assert sorted(set(row.returns[row.loss_mask == 1].tolist())) == pytest.approx([0.9, 1.0])
    assert "".join(entry.token for entry in first.choices[0].logprobs.content).startswith("<tool_call>")
    assert models == ["echo"]


async def test_each_chunk_of_a_stream_has_the_logprobs_of_its_tokens(renderer):
    """Joined, they are those of the answer without a stream: hidden tokens, the end of turn and alternatives too."""
    ask = {"model": "m", "messages": [QUESTION], "tools": [TOOL], "logprobs": True, "top_logprobs": 2, "n": 2}
    async with _stack(renderer, *["Let me see.\n" + CALL] * 4) as (client, _, _):
        whole = await client.chat.completions.create(**ask)
        chunks = [chunk async for chunk in await client.chat.completions.create(**ask, stream=True)]

    for choice in whole.choices:
        pieces = [found for chunk in chunks for found in chunk.choices if found.index == choice.index]
        logprobs = [found.logprobs.content for found in pieces if found.logprobs is not None]
        assert [entry for content in logprobs for entry in content] == choice.logprobs.content
        assert len(logprobs) > 3
        texts = [(found.delta.content, found.logprobs.content) for found in pieces if found.delta.content]
        assert all("".join(entry.token for entry in content) == text for text, content in texts[:2])


async def test_each_delta_of_a_response_has_the_logprobs_of_its_tokens(renderer):
    """Those of the tokens up to it; the message has all of them in the end, those of the call and alternatives too."""
    tool = {"type": "function", **TOOL["function"]}
    ask = {"model": "m", "input": [QUESTION], "tools": [tool], "top_logprobs": 2}
    async with _stack(renderer, *["Let me see.\n" + CALL] * 2) as (client, _, _):
        whole = await client.responses.create(**ask)
        events = [event async for event in await client.responses.create(**ask, stream=True)]

    expected = [entry.to_dict() for entry in whole.output[0].content[0].logprobs]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    sent = [entry.to_dict() for event in deltas for entry in event.logprobs]
    assert 3 < len(sent) < len(expected)
    assert sent == expected[: len(sent)]
    assert all("".join(entry.token for entry in event.logprobs) == event.delta for event in deltas[:2])
    assert [entry.to_dict() for entry in events[-1].response.output[0].content[0].logprobs] == expected


async def test_a_stream_says_what_the_json_says(renderer):
    """Token by token, the chunks join to the same call, under an id that the session knows."""
    async with _stack(renderer, "Let me see.\n" + CALL) as (client, session, _):
        whole = await client.chat.completions.create(model="m", messages=[QUESTION], tools=[TOOL])
        async with client.chat.completions.stream(model="m", messages=[QUESTION], tools=[TOOL]) as stream:
            joined = await stream.get_final_completion()
        await session.set_reward(joined.id, 1.0)

    ours, theirs = joined.choices[0].message, whole.choices[0].message
    assert ours.content == theirs.content
    assert [call.function.arguments for call in ours.tool_calls] == [c.function.arguments for c in theirs.tool_calls]
    assert joined.choices[0].finish_reason == whole.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("is_stream", [False, True])
async def test_tools_that_may_not_be_called_are_text_and_single_calls_are_single(renderer, is_stream):
    """``tool_choice: none`` gives text, ``parallel_tool_calls: false`` one call of two; streamed or not."""

    async def ask(client, **fields):
        arguments = {"model": "m", "messages": [QUESTION], "tools": [TOOL], **fields}
        if not is_stream:
            return (await client.chat.completions.create(**arguments)).choices[0].message
        async with client.chat.completions.stream(**arguments) as stream:
            return (await stream.get_final_completion()).choices[0].message

    async with _stack(renderer, f"{CALL}\n{CALL}") as (client, _, _):
        none = await ask(client, tool_choice="none")
        single = await ask(client, parallel_tool_calls=False)
        both = await ask(client)

    assert not none.tool_calls
    assert "<tool_call>" in none.content
    assert len(single.tool_calls) == 1
    assert len(both.tool_calls) == 2


async def test_a_conversation_that_does_not_fit_is_worded_for_clients(renderer):
    """The SDK sees the code that agents look for."""
    async with _stack(renderer, "no") as (client, _, engine):
        long = {"role": "user", "content": "higher lower between " * 20_000}
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="m", messages=[long])

    assert caught.value.code == "context_length_exceeded"
    assert engine.statistics().running == 0
