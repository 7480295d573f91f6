"""Plain completions: their bodies, their wording, and what the ``openai`` SDK makes of them."""

from __future__ import annotations

from contextlib import asynccontextmanager

import openai
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion as SdkCompletion
from tests.proxy.stack import open_stack, renderer, sampled

from areal_actors.client import create_http_client
from areal_actors.domain import (
    Answer,
    AnswerStarted,
    ChatMessage,
    Completion,
    FinishReason,
    InteractionId,
    TextDelta,
    TopLogprob,
    Usage,
)
from areal_actors.errors import InvalidRequest, Unavailable, UnsupportedParameter
from areal_actors.proxy.dialects.completions import CompletionsDialect
from areal_actors.rendering import join_deltas
from areal_actors.testing.engines import echo_logprob
from areal_actors_testing.serving import open_scripted_proxy

# At [DONE] the SDK leaves its generators to the garbage collector, of which trio warns.
pytestmark = pytest.mark.filterwarnings("ignore:Async generator '(httpx2?|openai|httpcore2?):ResourceWarning")

_OF_THE_SDK_ALONE = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
DIALECT = CompletionsDialect(
    model="policy", clock=lambda: 1700000000.5, token_bytes=lambda ids, **_: [b"abc"[i : i + 1] for i in ids]
)


# ---------------------------------------------------------------------------------------------------- requests


@pytest.mark.parametrize(
    ("prompt", "text", "ids"),
    [("a", "a", ()), (["a"], "a", ()), ([1, 2], None, (1, 2)), ([[1, 2]], None, (1, 2))],
)
def test_completions_prompt_is_text_or_ids(prompt, text, ids):
    """Either may stand alone in a list."""
    request = CompletionsDialect().parse({"prompt": prompt}).request

    assert (request.prompt, request.prompt_ids, request.messages) == (text, ids, ())
    assert (request.sampling.max_new_tokens, request.id_prefix) == (16, "cmpl-")


@pytest.mark.parametrize("prompt", [None, "", [], [[]], [""], {}, 7, [1, "a"], [-1], [True], [1.5], [None]])
def test_invalid_completions_prompt_is_refused(prompt):
    """The error says which field."""
    with pytest.raises(InvalidRequest) as caught:
        CompletionsDialect().parse({"prompt": prompt})

    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"echo": True}, "echo"),
        ({"suffix": "."}, "suffix"),
        ({"best_of": 2}, "best_of"),
    ],
)
def test_unsupported_completions_field_is_refused(fields, param):
    """Before anything is sampled."""
    with pytest.raises(UnsupportedParameter) as caught:
        CompletionsDialect().parse({"prompt": "a"} | fields)

    assert caught.value.param == param


def test_completions_fields_are_parsed():
    """Sampling, alternatives and names end up where they belong."""
    parsed = CompletionsDialect().parse(
        {
            "prompt": "a",
            "model": "m",
            "max_tokens": 7,
            "n": 2,
            "logprobs": 3,
            "stop": "x",
            "seed": 5,
            "stream": True,
            "stream_options": {"include_usage": True},
            "metadata": {"agent": "planner"},
        }
    )
    sampling = parsed.request.sampling

    assert (sampling.max_new_tokens, sampling.top_logprobs, sampling.stop) == (7, 3, ("x",))
    assert (parsed.request.num_choices, parsed.request.seed, parsed.request.tag) == (2, 5, "planner")
    assert (parsed.model, parsed.is_stream, parsed.include_usage, parsed.has_logprobs) == ("m", True, True, True)


# ----------------------------------------------------------------------------------------------------- wording


def _answer(text, *, name="cmpl-1", finish=FinishReason.STOP, tops=()):
    completion = Completion(
        token_ids=[0, 1], logprobs=[-0.5, 0.0], raw_logprobs=[-1, -1], versions=[3, 3], finish=finish, top_logprobs=tops
    )
    usage = Usage(prompt_tokens=5, completion_tokens=2, cached_tokens=4)
    message = ChatMessage(role="assistant", content=text)
    return Answer(interaction=InteractionId(name), message=message, completion=completion, usage=usage)


def _document_of(*answers, **fields):
    document = orjson.loads(orjson.dumps(DIALECT.format_answers(DIALECT.parse({"prompt": "a"} | fields), answers)))
    SdkCompletion.model_validate(document, strict=True)
    return document


def test_completions_answer_has_all_keys():
    """In the older form: text instead of a message, four lists of logprobs."""
    tops = ((TopLogprob(token_id=2, logprob=-1.0),), ())
    document = _document_of(_answer("ab", tops=tops), logprobs=1, model="my-model")

    assert document == {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1700000000,
        "model": "my-model",
        "choices": [
            {
                "index": 0,
                "text": "ab",
                "logprobs": {
                    "tokens": ["a", "b"],
                    "token_logprobs": [-0.5, 0.0],
                    "top_logprobs": [{"c": -1.0, "a": -0.5}, {"b": 0.0}],
                    "text_offset": [0, 1],
                },
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": 2,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 4},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }
    assert _document_of(_answer("ab"), logprobs=0)["choices"][0]["logprobs"]["top_logprobs"] is None


def test_completions_choices_have_their_finish_reasons():
    """Each choice names its interaction; an aborted one is not an answer."""
    first, second = _answer("a"), _answer("b", name="cmpl-1-1", finish=FinishReason.LENGTH)
    choices = _document_of(first, second, n=2)["choices"]

    assert [choice["interaction_id"] for choice in choices] == ["cmpl-1", "cmpl-1-1"]
    assert [choice["finish_reason"] for choice in choices] == ["stop", "length"]
    with pytest.raises(Unavailable):
        _document_of(_answer("a", finish=FinishReason.ABORT))


@given(st.lists(st.text(min_size=1, max_size=3)), st.booleans())
def test_completions_stream_adds_up_to_the_answer(pieces, include_usage):
    """The chunks join to what JSON would have said, and usage comes last where it was asked for."""
    deltas = [TextDelta(text=piece) for piece in pieces]
    answer = _answer(join_deltas(deltas).content)
    fields = {"stream": True, "stream_options": {"include_usage": include_usage}}
    stream = DIALECT.open_stream(DIALECT.parse({"prompt": "a"} | fields))
    items = [AnswerStarted(interaction=InteractionId("cmpl-1")), *deltas, answer]
    *events, done, rest = b"".join([*(stream.feed(item) for item in items), stream.finish()]).split(b"\n\n")
    chunks = [orjson.loads(event.removeprefix(b"data: ")) for event in events]
    whole = _document_of(answer)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]

    assert (done, rest) == (b"data: [DONE]", b"")
    assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
    assert [choice["finish_reason"] for choice in choices] == [None] * len(pieces) + ["stop"]
    assert ["usage" in chunk for chunk in chunks] == [include_usage] * len(chunks)
    assert ([chunk["usage"] for chunk in chunks if chunk.get("usage")] == [whole["usage"]]) is include_usage
    assert {chunk["id"] for chunk in chunks} == {"cmpl-1"}


# ----------------------------------------------------------------------------------------------------- the SDK


@pytest.mark.anyio
async def test_completions_sdk_is_answered():
    """Over a real socket; the id is one that can be rewarded."""
    async with open_scripted_proxy() as proxy, proxy.open_session() as session, create_http_client() as http:
        client = openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, http_client=http)
        whole = await client.completions.create(model="m", prompt="one two three", max_tokens=2, logprobs=0)
        stream = await client.completions.create(model="m", prompt=[1, 2], stream=True)
        chunks = [chunk async for chunk in stream]
        await session.set_reward(whole.id, 1.0)
        with pytest.raises(openai.BadRequestError) as refused:
            await client.completions.create(model="m", prompt=["a", "b"])

    assert (whole.choices[0].text, whole.choices[0].finish_reason) == ("one two ", "length")
    assert whole.choices[0].logprobs.token_logprobs == [-0.5, -0.5]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "1 2 "
    assert refused.value.code == "unsupported_parameter"


@asynccontextmanager
async def _stack(*answers):
    """A client of a session of the whole stack, whose engine samples ``answers`` one after another."""
    async with open_stack(*answers) as stack, create_http_client() as http:
        base_url, api_key = stack.session.base_url, stack.session.api_key
        yield openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http), stack


@pytest.mark.anyio
@pytest.mark.parametrize("is_stream", [False, True])
async def test_completions_export_equals_the_sampled_tokens(is_stream):
    """An agent that writes its turns itself: one row of exact tokens, and the reward reaches the first answer."""
    said = [sampled("<think>408?"), sampled("It is 60.")]
    end = renderer().decode(said[0][-1:])

    async def ask(prompt):
        options = {"model": "m", "prompt": prompt, "max_tokens": 64}
        if not is_stream:
            answer = await client.completions.create(**options)
            return answer.id, answer.choices[0].text
        chunks = [chunk async for chunk in await client.completions.create(**options, stream=True)]
        return chunks[0].id, "".join(chunk.choices[0].text for chunk in chunks)

    async with _stack(*said) as (client, stack):
        prompt = "What is 12 times 34?"
        first, text = await ask(prompt)
        second, _ = await ask(f"{prompt}{text}{end}And times 5?")
        await stack.session.set_reward(second, 1.0)
        turns = await stack.record()
        await stack.session.end_session()
        (row,) = (await stack.session.export_episode(discount=0.9, style="concat")).trajectories

    read = [renderer().encode(text, is_start=False).tolist() for text in (prompt, "And times 5?")]
    assert text == "<think>408?"
    assert stack.engine.requests[1].prompt.tolist() == [*read[0], *said[0], *read[1]]
    assert (turns[1].parent, turns[1].token_parent, turns[1].fork) == (first, first, None)
    assert row.input_ids[row.loss_mask == 1].tolist() == [*said[0], *said[1]]
    assert row.logprobs[row.loss_mask == 1].tolist() == [echo_logprob(token) for token in (*said[0], *said[1])]
    assert sorted(set(row.returns[row.loss_mask == 1].tolist())) == pytest.approx([0.9, 1.0])


@pytest.mark.anyio
async def test_completions_chunks_have_the_logprobs_of_their_tokens():
    """Joined, they are those of the answer without a stream: offsets, the end token and alternatives too."""
    ask = {"model": "m", "prompt": "a", "max_tokens": 64, "n": 2, "logprobs": 2}
    async with _stack(*[sampled("<think>408?")] * 4) as (client, _):
        whole = await client.completions.create(**ask)
        chunks = [chunk async for chunk in await client.completions.create(**ask, stream=True)]

    for choice in whole.choices:
        pieces = [found for chunk in chunks for found in chunk.choices if found.index == choice.index]
        streamed = [found.logprobs for found in pieces if found.logprobs is not None]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [each for part in streamed for each in getattr(part, name)] == getattr(choice.logprobs, name)
        assert len(streamed) > 3
        assert all("".join(found.logprobs.tokens) == found.text for found in pieces[:2])


@pytest.mark.anyio
async def test_completions_prompt_ids_are_used_unchanged():
    """The engine reads the very ids; those that no tokenizer knows are refused."""
    async with _stack([5, 6]) as (client, stack):
        await client.completions.create(model="m", prompt=[300, 301], max_tokens=2)
        await client.completions.create(model="m", prompt=[300, 301, 5, 6, 7], max_tokens=2, n=2)
        with pytest.raises(openai.BadRequestError):
            await client.completions.create(model="m", prompt=[10**6])
        turns = await stack.record()

    assert [request.prompt.tolist() for request in stack.engine.requests[:2]] == [[300, 301], [300, 301, 5, 6, 7]]
    assert {turn.token_parent for turn in turns[1:3]} == {turns[0].id}
