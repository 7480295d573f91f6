"""Bytes to messages and back, whatever the pieces, and whatever a peer sends."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from itertools import pairwise

import anyio
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.errors import ProtocolError
from areal_actors.kernel.remote.frames import Frame, FrameReader, Kind, Outgoing

pytestmark = pytest.mark.anyio

LARGE = bytes(range(256)) * 1030
parts = st.lists(st.binary(max_size=40) | st.just(LARGE), min_size=1, max_size=4)
messages = st.lists(st.tuples(st.sampled_from([Kind.ASK, Kind.REPLY, Kind.ITEM]), parts), max_size=5)


async def read_all(pieces: Iterable[bytes], *, max_message_bytes: int = 1 << 30) -> list[Frame]:
    """Return the messages in ``pieces``."""
    arriving = iter(pieces)

    async def receive() -> bytes:
        data = next(arriving, None)
        if data is None:
            raise anyio.EndOfStream
        return data

    reader, frames = FrameReader(receive, max_message_bytes), []
    while True:
        try:
            frames.append(await reader.read())
        except anyio.EndOfStream:
            return frames


@given(messages, st.lists(st.integers(min_value=1, max_value=500_000), min_size=1, max_size=30))
async def test_frames_survive_any_cut_of_their_bytes(program, sizes):
    """Messages with and without buffers arrive whole, and in order."""
    written = b"".join(
        part
        for number, (kind, content) in enumerate(program)
        for part in Outgoing(kind, number, content, 1.5).frame(number)
    )
    ends = [0, *(sum(sizes[: n + 1]) for n in range(len(sizes))), len(written)]
    frames = await read_all(written[start:end] for start, end in pairwise(ends))

    received = [(frame.id, frame.kind, [bytes(part) for part in frame.parts], frame.seconds) for frame in frames]
    assert [(number, kind, content, 1.5) for number, (kind, content) in enumerate(program)] == received


@given(st.binary(min_size=9, max_size=400))
async def test_frames_of_garbage_are_refused_or_wait_for_more(data):
    """Garbage never becomes memory that was not sent."""
    try:
        frames = await read_all([data], max_message_bytes=1 << 20)
    except ProtocolError:
        return
    assert sum(len(part) for frame in frames for part in frame.parts) <= len(data)


def envelope(lengths: list[int], body: bytes = b"") -> bytes:
    return msgspec.msgpack.encode((Kind.ASK, 1, math.inf, lengths, body))


@pytest.mark.parametrize(
    ("frames", "complaint"),
    [
        ([(1, envelope([]))], "frame 0 is due"),
        ([(0, envelope([])), (0, envelope([]))], "frame 1 is due"),
        ([(0, b"\x01")], "no message"),
        ([(0, envelope([1 << 60]))], "too large; at most 1024"),
        ([(0, envelope([-1]))], "wrong numbers"),
    ],
)
async def test_frames_that_break_the_protocol_are_refused(frames, complaint):
    """Before memory is allocated for them."""
    data = b"".join(struct.pack("<II", number, len(one)) + one for number, one in frames)
    with pytest.raises(ProtocolError, match=complaint):
        await read_all([data], max_message_bytes=1024)


async def test_frame_larger_than_the_limit_is_refused_by_its_head():
    """Its bytes are not waited for."""
    with pytest.raises(ProtocolError, match="too large"):
        await read_all([struct.pack("<II", 0, 5000)], max_message_bytes=1024)
