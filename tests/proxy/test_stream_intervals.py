"""Deltas that are gathered and sent together: the same text, tokens and records, and neither start nor end delayed."""

from __future__ import annotations

import json
from itertools import pairwise

import anyio
import httpx
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.proxy.stack import open_stack, renderer, sampled

from areal_actors.domain import (
    Answer,
    AnswerStarted,
    Chunk,
    Completion,
    FinishReason,
    InteractionId,
    InteractionStatus,
    ReasoningDelta,
    SampledTokens,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallStarted,
    Usage,
)
from areal_actors.proxy import ProxyConfig
from areal_actors.proxy.dialects.base import join_items
from areal_actors.proxy.dialects.chat.answer import ChatDialect
from areal_actors.proxy.dialects.messages.answer import MessagesDialect
from areal_actors.proxy.dialects.responses.answer import ResponsesDialect
from areal_actors.rendering import join_deltas

QUESTION = {"role": "user", "content": "hi"}
DIALECTS = {
    "chat/completions": (ChatDialect(), {"messages": [QUESTION], "logprobs": True}),
    "messages": (MessagesDialect(), {"messages": [QUESTION]}),
    "responses": (ResponsesDialect(), {"input": [QUESTION], "include": ["message.output_text.logprobs"]}),
}
ARGUMENTS = '{"path": "a b", "deep": [1, {"x": null}]}'
TEXTS = st.lists(st.text(min_size=1, max_size=4), max_size=6)


@st.composite
def streams(draw):
    """The items of one answer: reasoning, text and calls in pieces, and the tokens before each piece."""
    deltas = [
        # An empty one means that there was nothing between the tags.
        *(ReasoningDelta(text=text) for text in draw(TEXTS | st.just([""]))),
        *(TextDelta(text=text) for text in draw(TEXTS)),
    ]
    for index in range(draw(st.integers(0, 2))):
        deltas.append(ToolCallStarted(index=index, id=f"call_{index}", name="f"))
        cuts = sorted({0, len(ARGUMENTS), *draw(st.lists(st.integers(0, len(ARGUMENTS)), max_size=6))})
        deltas += [ToolArgumentsDelta(index=index, text=ARGUMENTS[a:b]) for a, b in pairwise(cuts)]
    items, tokens = [], []
    for delta in (*deltas, None):
        for _ in range(draw(st.integers(0, 2))):
            tokens.append(len(tokens))
            one = {"token_ids": tokens[-1:], "logprobs": [-0.5], "raw_logprobs": [-0.5]}
            items.append(SampledTokens(chunk=Chunk(**one, version=0, finish=None)))
        items += [] if delta is None else [delta]
    logprobs = [-0.5] * len(tokens)
    completion = Completion(
        token_ids=tokens, logprobs=logprobs, raw_logprobs=logprobs, versions=[0] * len(tokens), finish=FinishReason.STOP
    )
    name, usage = InteractionId("resp_1"), Usage(prompt_tokens=1, completion_tokens=len(tokens))
    answer = Answer(interaction=name, message=join_deltas(deltas), completion=completion, usage=usage)
    return [AnswerStarted(interaction=name), *items, answer]


def read(data):
    """The payloads of server-sent events."""
    lines = [line.removeprefix(b"data: ") for line in data.splitlines() if line.startswith(b"data: {")]
    return [orjson.loads(line) for line in lines]


def view(operation, events):
    """What a client makes of a stream: its texts, calls, tokens and end, however they were cut."""
    seen = {}

    def note(name, text):
        seen[name] = seen.get(name, "") + text

    tokens = []
    for event in events:
        if operation == "chat/completions":
            for choice in event["choices"]:
                tokens += (choice.get("logprobs") or {}).get("content") or ()
                delta = choice["delta"]
                for call in delta.get("tool_calls", ()):
                    note(("call", call["index"], call.get("id")), call["function"].get("name", ""))
                    note(("arguments", call["index"]), call["function"]["arguments"])
                for name in ("content", "reasoning_content"):
                    note(name, delta.get(name) or "")
                note("end", choice["finish_reason"] or "")
        elif operation == "messages":
            if event["type"] == "content_block_delta":
                kind = event["delta"]["type"]
                texts = [text for name, text in event["delta"].items() if name != "type"]
                note((event["index"], kind), texts[0])
            elif event["type"] != "content_block_stop":
                note(json.dumps(event), ".")
        elif event["type"].endswith(".delta"):
            note((event["type"], event["output_index"]), event["delta"])
            tokens += event.get("logprobs") or ()
        elif event["type"] == "response.completed":
            output = event["response"]["output"]
            note("end", json.dumps(output))
    return seen, tokens


@given(items=streams(), cuts=st.lists(st.integers(0, 40), max_size=6), operation=st.sampled_from(sorted(DIALECTS)))
def test_joined_deltas_give_the_same_answer(items, cuts, operation):
    """Wherever batches are cut: texts, arguments of calls, log-probabilities, and whole answers at the end."""
    dialect, body = DIALECTS[operation]
    parsed = dialect.parse(body | {"stream": True}, tag=None)
    single, joined = dialect.open_stream(parsed), dialect.open_stream(parsed)
    edges = sorted({0, len(items), *(cut for cut in cuts if cut < len(items))})
    batches = [items[a:b] for a, b in pairwise(edges)]
    events = read(b"".join([*map(single.feed, items), single.finish()]))
    fewer = read(b"".join([*(joined.feed(item) for batch in batches for item in join_items(batch)), joined.finish()]))

    assert view(operation, fewer) == view(operation, events)
    assert len(fewer) <= len(events)


@given(items=streams())
def test_joined_tokens_come_before_their_text(items):
    """Joining keeps the order of everything but moves a text behind the tokens that were sampled for its last piece."""
    joined = join_items(items)
    others = [item for item in items if not isinstance(item, TextDelta | ReasoningDelta | ToolArgumentsDelta)]

    def texts_before(stream):
        """How much of each kind of text came by each token."""
        said, seen = {}, []
        for item in stream:
            if isinstance(item, SampledTokens):
                seen.append(dict(said))
            elif isinstance(item, TextDelta | ReasoningDelta | ToolArgumentsDelta):
                key = type(item), getattr(item, "index", 0)
                said[key] = said.get(key, 0) + len(item.text)
        return seen, said

    (later, total), (earlier, same) = texts_before(joined), texts_before(items)
    assert total == same
    assert [item for item in joined if not isinstance(item, TextDelta | ReasoningDelta | ToolArgumentsDelta)] == others
    assert all(
        late.get(key, 0) <= early.get(key, 0) for late, early in zip(later, earlier, strict=True) for key in late
    )


# -------------------------------------------------------------------------------------------------------- over HTTP

NEVER = ProxyConfig(stream_interval_ms=1e12)
BODIES = {
    "chat/completions": {"messages": [QUESTION], "stream": True},
    "completions": {"prompt": "hi", "stream": True},
    "messages": {"messages": [QUESTION], "stream": True},
    "responses": {"input": [QUESTION], "stream": True},
}
TEXT = "one two three four"
TOKENS = [renderer().decode([token]) for token in sampled(TEXT)[:-1]]
PIECE = {
    "chat/completions": lambda event: "".join(c["delta"].get("content") or "" for c in event["choices"]),
    "completions": lambda event: "".join(c["text"] for c in event["choices"]),
    "messages": lambda event: event.get("delta", {}).get("text", ""),
    "responses": lambda event: event["delta"] if event["type"] == "response.output_text.delta" else "",
}


class Reader:
    """The texts of a stream, as they arrive."""

    def __init__(self, operation, response):
        self.pieces = []
        self._read, self._lines = PIECE[operation], response.aiter_lines()

    async def read(self, num_pieces):
        """Read until so many pieces have come, or to the end."""
        with anyio.fail_after(20):
            async for line in self._lines:
                piece = self._read(orjson.loads(line[6:])) if line.startswith("data: {") else ""
                self.pieces += [piece] if piece else []
                if len(self.pieces) == num_pieces:
                    return


@pytest.mark.anyio
@pytest.mark.parametrize("operation", BODIES)
async def test_first_text_and_end_are_not_delayed(operation):
    """The first token is read before the second is sampled, the others as one text, at once when the last is there."""
    async with open_stack(sampled(TEXT), is_gated=True, proxy=NEVER) as stack, httpx.AsyncClient() as http:
        url, headers = f"{stack.session.base_url}/{operation}", {"authorization": f"Bearer {stack.session.api_key}"}
        stack.engine.release(1)
        async with http.stream("POST", url, json=BODIES[operation], headers=headers) as response:
            reader = Reader(operation, response)
            await reader.read(1)
            stack.engine.release(99)
            await reader.read(99)
        (turn,) = await stack.record()

    assert [TOKENS[0], "".join(TOKENS[1:])] == reader.pieces
    assert turn.output.content == TEXT


@pytest.mark.anyio
@pytest.mark.parametrize("operation", BODIES)
@pytest.mark.parametrize("interval", [0.0, 1.0, None])
async def test_delayed_text_does_not_wait_for_the_next_one(operation, interval):
    """What was sampled is sent when the interval is over, though the engine says no more; 0 sends it at once."""
    config = ProxyConfig(stream_interval_ms=interval)
    async with open_stack(sampled(TEXT), is_gated=True, proxy=config) as stack, httpx.AsyncClient() as http:
        url, headers = f"{stack.session.base_url}/{operation}", {"authorization": f"Bearer {stack.session.api_key}"}
        stack.engine.release(1)
        async with http.stream("POST", url, json=BODIES[operation], headers=headers) as response:
            reader = Reader(operation, response)
            for number in range(1, len(TOKENS) + 1):
                await reader.read(number)
                stack.engine.release(1)
            await reader.read(99)

    assert reader.pieces == TOKENS


@pytest.mark.anyio
async def test_cancelled_stream_records_delayed_text():
    """The client leaves while sampled tokens wait to be sent: they are in the record of the session."""
    async with open_stack(sampled(TEXT), is_gated=True, proxy=NEVER) as stack:
        url, body = httpx.URL(stack.session.base_url), orjson.dumps(BODIES["messages"])
        head = f"POST {url.path}/messages HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        stack.engine.release(1)
        async with await anyio.connect_tcp(url.host, url.port) as stream:
            await stream.send(head.encode() + body)
            received = b""
            with anyio.fail_after(10):
                while TOKENS[0].encode() not in received:
                    received += await stream.receive()
                stack.engine.release(2)
                while stack.engine.statistics().sampled_tokens < 3:
                    await anyio.lowlevel.checkpoint()
        with anyio.fail_after(10):
            while (turn := (await stack.record())[0]).status is InteractionStatus.PENDING:
                await anyio.lowlevel.checkpoint()

    assert "".join(TOKENS[1:3]).encode() not in received
    assert turn.status is InteractionStatus.CANCELLED
    assert turn.completion.token_ids.tolist() == sampled(TEXT)[:3]
