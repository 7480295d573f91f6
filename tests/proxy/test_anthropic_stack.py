"""Anthropic's Messages in front of the real sessions, renderer and generation; only the engine is scripted."""

from __future__ import annotations

from contextlib import asynccontextmanager

import anthropic
import anyio
import httpx2
import pytest
from tests.proxy.stack import open_stack, sampled

from areal_actors.testing.engines import echo_logprob

pytestmark = [
    pytest.mark.anyio,
    # At its end the SDK leaves a stream's generators to the garbage collector, of which trio warns.
    pytest.mark.filterwarnings("ignore:Async generator '(httpx2|anthropic|httpcore2?):ResourceWarning"),
]

QUESTION = {"role": "user", "content": "What is 12 times 34?"}
TOOL = {"name": "multiply", "input_schema": {"type": "object", "properties": {}}}
CALLS = "\n".join(
    f'<tool_call>\n{{"name": "multiply", "arguments": {{"a": 12, "b": {b}}}}}\n</tool_call>' for b in (34, 5)
)
ASK = {"model": "m", "max_tokens": 256}
CACHED = {"cache_control": {"type": "ephemeral"}}


@asynccontextmanager
async def _stack(*texts, is_gated=False):
    """A client of a session of the whole stack, whose engine says ``texts`` one after another."""
    answers = [sampled(text) for text in texts]
    async with open_stack(*answers, is_gated=is_gated) as stack, httpx2.AsyncClient() as http:
        base_url = stack.session.base_url.removesuffix("/v1")
        yield anthropic.AsyncAnthropic(base_url=base_url, api_key=stack.session.api_key, http_client=http), stack


async def _ask(client, *, is_stream, **fields):
    if not is_stream:
        return await client.messages.create(**ASK | fields)
    async with client.messages.stream(**ASK | fields) as stream:
        return await stream.get_final_message()


@pytest.mark.parametrize("is_stream", [False, True])
async def test_messages_export_equals_the_sampled_tokens(is_stream):
    """Parallel calls and their results: ids and logprobs of the rows are the engine's, and rewards find their turn."""
    async with _stack("Let me see.\n" + CALLS, "It is 408 and 60.") as (client, stack):
        first = await _ask(client, is_stream=is_stream, messages=[QUESTION], tools=[TOOL])
        calls = [block for block in first.content if block.type == "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": str(12 * call.input["b"])} for call in calls
        ]
        history = [QUESTION, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
        second = await _ask(client, is_stream=is_stream, messages=history, tools=[TOOL])
        await stack.session.set_reward(second.id, 1.0)
        await stack.session.end_session()
        (row,) = (await stack.session.export_episode(discount=0.9, style="concat")).trajectories

    expected = [*sampled("Let me see.\n" + CALLS), *sampled("It is 408 and 60.")]
    assert [call.input for call in calls] == [{"a": 12, "b": 34}, {"a": 12, "b": 5}]
    assert (first.stop_reason, second.stop_reason) == ("tool_use", "end_turn")
    assert second.content[0].text == "It is 408 and 60."
    assert row.interactions == (first.id, second.id)
    assert row.input_ids[row.loss_mask == 1].tolist() == expected
    assert row.logprobs[row.loss_mask == 1].tolist() == [echo_logprob(token) for token in expected]
    assert sorted(set(row.returns[row.loss_mask == 1].tolist())) == pytest.approx([0.9, 1.0])
    assert first.usage.output_tokens + second.usage.output_tokens == len(expected)


def _plain(content):
    return content[0].text


def _moved_mark(content):
    return [{"type": "text", "text": content[0].text, **CACHED}]


def _without_nulls(content):
    return [{key: value for key, value in block.to_dict().items() if value is not None} for block in content]


@pytest.mark.parametrize("echo", [list, _plain, _moved_mark, _without_nulls])
async def test_echoed_message_finds_its_parent(echo):
    """As blocks, as a string, with a mark that moves, without nulls: the turn extends its parent's exact tokens."""
    question = {"role": "user", "content": [{"type": "text", "text": QUESTION["content"], **CACHED}]}
    system = [{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}, {"type": "text", "text": "Hm.", **CACHED}]
    async with _stack("408.", "409.") as (client, stack):
        first = await client.messages.create(**ASK, messages=[question], system=system)
        history = [QUESTION, {"role": "assistant", "content": echo(first.content)}, question]
        second = await client.messages.create(
            **ASK, messages=history, system=[system[0] | {"text": "x-anthropic-billing-header: cch=2;"}, system[1]]
        )
        turns = await stack.record()

    assert [turn.id for turn in turns] == [first.id, second.id]
    assert (turns[1].parent, turns[1].token_parent, turns[1].fork) == (first.id, first.id, None)


async def test_token_count_equals_usage():
    """Of a first turn and of one that extends it; counting adds no turn."""
    async with _stack("408.") as (client, stack):
        ask = {"model": "m", "messages": [QUESTION], "tools": [TOOL], "system": "Be brief."}
        for _ in range(2):
            count = await client.messages.count_tokens(**ask)
            answer = await client.messages.create(**ask, max_tokens=64)
            ask["messages"] = [*ask["messages"], {"role": "assistant", "content": answer.content}, QUESTION]

            assert count.input_tokens == answer.usage.input_tokens
        turns = await stack.record()

    assert len(turns) == 2


async def test_stop_sequence_is_reported():
    """Streamed or not; the text ends before it."""
    async with _stack("one two three") as (client, _):
        answers = [
            await _ask(client, is_stream=is_stream, messages=[QUESTION], stop_sequences=["three", "tw"])
            for is_stream in (False, True)
        ]

    for answer in answers:
        assert (answer.stop_reason, answer.stop_sequence, answer.content[0].text) == ("stop_sequence", "tw", "one ")


async def test_closed_messages_stream_aborts_the_engine():
    """What was sampled by then is kept as a cancelled turn, which is never trained."""
    async with _stack("It is 408.", is_gated=True) as (client, stack):
        stack.engine.release(3)
        with anyio.fail_after(10):
            async with client.messages.stream(**ASK, messages=[QUESTION]) as stream:
                async for event in stream:
                    if event.type == "text":
                        break
            while not stack.engine.statistics().aborted:
                await anyio.lowlevel.checkpoint()
            while (await stack.record())[0].status == "pending":
                await anyio.lowlevel.checkpoint()
        (turn,) = await stack.record()

    assert (turn.status, stack.engine.statistics().running) == ("cancelled", 0)
    assert turn.completion is not None


async def test_messages_context_overflow_has_the_wording_of_anthropic():
    """The SDK sees the wording that agents look for."""
    async with _stack("no") as (client, _):
        long = {"role": "user", "content": "higher lower between " * 20_000}
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long.*maximum context length is"):
            await client.messages.create(**ASK, messages=[long])


async def test_continued_thread_is_refused_so_that_clients_send_the_history():
    """The beta's ``thread``: the SDK begins another thread with the whole history when one is not found."""
    messages = [{"role": "user", "content": "one two"}]
    async with open_stack(sampled("first")) as stack, httpx2.AsyncClient() as http:
        url = f"{stack.session.base_url}/messages"
        base = {"max_tokens": 30, "messages": messages}
        first = await http.post(url, json=base | {"thread": {"type": "create"}})
        thread = {"type": "continue", "previous_message_id": first.json()["id"]}
        second = await http.post(url, json=base | {"thread": thread})

    assert first.status_code == 200
    assert (second.status_code, second.json()["error"]["details"]) == (400, {"error_code": "thread_not_found"})
