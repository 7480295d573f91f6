"""Streams of events, cut anywhere, whatever text is in them."""

from __future__ import annotations

import json
from itertools import pairwise

import anyio
import pytest
from anyio.abc import SocketStream
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.generation.servers.http import Answer, Lines, create_client, open_events

SEPARATORS = "\u2028\u2029\u0085\x0b\x0c\x1c\x1d\x1e"
"""What ends a line of text, and no line of a stream."""

texts = st.text(st.sampled_from([*SEPARATORS, *'ä€😀a":{']), max_size=20)


@given(st.lists(texts, max_size=5), st.sampled_from(["\n", "\r\n", "\r"]), st.lists(st.integers(0, 400), max_size=8))
def test_lines_do_not_depend_on_chunks(said: list[str], end: str, cuts: list[int]) -> None:
    """Those that were sent, in their order, each once; empty ones do not count."""
    lines = [f"data: {text}" for text in said]
    sent = "".join(line + end for line in lines).encode()
    bounds = [0, *sorted(min(cut, len(sent)) for cut in cuts), len(sent)]
    reader = Lines()
    found = [line for start, stop in pairwise(bounds) for line in reader.feed(sent[start:stop])]

    assert [line.encode() for line in lines] == [line for line in found if line]


def test_incomplete_line_is_discarded() -> None:
    """A stream that breaks in the middle of an event has not said it."""
    assert [b"a"] == list(Lines().feed(b"a\nb"))


@pytest.mark.anyio
@pytest.mark.parametrize("size", [1, 7, 1 << 20])
async def test_unicode_separators_do_not_end_lines(size: int) -> None:
    """A server repeats in each event what it said so far, unescaped; that text is the model's."""
    events = [{"text": SEPARATORS[:1] * 3 + "ü", "n": 1}, {"text": SEPARATORS[:3], "n": 2}]
    body = b"".join(f"data: {json.dumps(event, ensure_ascii=False)}\n\n".encode() for event in events)
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
    sent = head + body + b"data: [DONE]\n\n"

    async def answer(stream: SocketStream) -> None:
        async with stream:
            await stream.receive()
            for start in range(0, len(sent), size):
                await stream.send(sent[start : start + size])

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, answer)
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        client = create_client(f"http://127.0.0.1:{port}", api_key=None, read_timeout_seconds=5)
        async with client, open_events(client, "/generate", {}) as found:
            assert not isinstance(found, Answer)
            heard = [event async for event in found]
        tasks.cancel_scope.cancel()

    assert events == heard
