"""Bytes to messages and back, whatever the pieces, and whatever a peer sends."""

from __future__ import annotations

import math
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.errors import ProtocolError
from areal_actors.kernel.remote.frames import CHUNK_BYTES, Assembler, Kind, Outbox, Outgoing

LARGE = bytes(range(256)) * (CHUNK_BYTES // 256 + 3)

parts = st.lists(st.binary(max_size=40) | st.just(LARGE), min_size=1, max_size=4)
messages = st.lists(st.tuples(st.sampled_from([Kind.ASK, Kind.REPLY, Kind.ITEM]), parts, st.booleans()), max_size=5)


def drained(outbox: Outbox) -> bytes:
    written = b""
    while data := outbox.take():
        written += data
    return written


@given(messages, st.lists(st.integers(min_value=1, max_value=CHUNK_BYTES * 2), min_size=1, max_size=30))
def test_frames_survive_any_cut_of_their_bytes(program, sizes):
    """Messages with and without buffers arrive whole; those of the data lane in order."""
    outbox = Outbox()
    for number, (kind, content, is_ahead) in enumerate(program):
        outbox.put(Outgoing(kind, number, content, 1.5), is_ahead=is_ahead)
    written, start, frames, assembler = drained(outbox), 0, [], Assembler(1 << 30)
    for size in (*sizes, len(written)):
        frames += assembler.feed(written[start : start + size])
        start += size

    received = {frame.id: (frame.kind, [bytes(part) for part in frame.parts], frame.seconds) for frame in frames}
    assert {n: (kind, content, 1.5) for n, (kind, content, _) in enumerate(program)} == received
    in_order = [n for n, (_, _, is_ahead) in enumerate(program) if not is_ahead]
    assert in_order == [frame.id for frame in frames if frame.id in in_order]
    assert not outbox


def test_frames_of_the_control_lane_pass_between_chunks():
    """A cancellation does not wait for a gigabyte."""
    outbox, assembler = Outbox(), Assembler(1 << 30)
    outbox.put(Outgoing(Kind.ASK, 1, [b"", LARGE * 4]))
    frames = assembler.feed(outbox.take())
    outbox.put(Outgoing(Kind.CANCEL, 1), is_ahead=True)
    frames += assembler.feed(outbox.take())

    assert [Kind.CANCEL] == [frame.kind for frame in frames]
    assert [Kind.ASK] == [frame.kind for frame in assembler.feed(drained(outbox))]


def test_outbox_withdraws_only_what_was_not_written():
    """The other side may have a message whose first bytes have left."""
    outbox = Outbox()
    first, second = Outgoing(Kind.ASK, 1, [b"", LARGE * 2]), Outgoing(Kind.TELL, 2, [b"x"])
    outbox.put(first)
    outbox.put(second)
    outbox.take()

    assert not outbox.withdraw(first)
    assert outbox.withdraw(second)
    assert (first.is_sent, second.is_sent) == (True, False)
    drained(outbox)
    assert not outbox


@given(st.binary(min_size=9, max_size=400))
def test_frames_of_garbage_are_refused_or_wait_for_more(data):
    """Garbage never becomes memory that was not sent."""
    try:
        frames = Assembler(1 << 20).feed(data)
    except ProtocolError:
        return
    assert sum(len(part) for frame in frames for part in frame.parts) <= len(data)


def envelope(lengths: list[int], body: bytes = b"") -> bytes:
    return msgspec.msgpack.encode((Kind.ASK, 1, math.inf, lengths, body))


@pytest.mark.parametrize(
    ("heads", "complaint"),
    [
        ([(2, 0, b"")], "frame 0 is due"),
        ([(0, 1, b"")], "frame 0 is due"),
        ([(0, 0, envelope([])), (0, 0, envelope([]))], "frame 1 is due"),
        ([(0, 0, b"\x01")], "no message"),
        ([(0, 0, envelope([1 << 60]))], "too large; at most 1024"),
        ([(0, 0, envelope([-1]))], "wrong numbers"),
        ([(0, 0, envelope([8])), (0, 1, envelope([8]))], "within another one"),
        ([(0, 0, envelope([8])), (1, 1, b"123456789")], "belongs to no message"),
        ([(1, 0, b"1234")], "belongs to no message"),
    ],
)
def test_frames_that_break_the_protocol_are_refused(heads, complaint):
    """Before memory is allocated for them."""
    data = b"".join(struct.pack("<BII", is_chunk, number, len(one)) + one for is_chunk, number, one in heads)
    with pytest.raises(ProtocolError, match=complaint):
        Assembler(1024).feed(data)


def test_frame_larger_than_the_limit_is_refused_by_its_head():
    """Its bytes are not waited for."""
    with pytest.raises(ProtocolError, match="too large"):
        Assembler(1024).feed(struct.pack("<BII", 0, 0, 5000))
