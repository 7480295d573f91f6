"""Exported trajectories as JSON."""

from __future__ import annotations

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from areal_actors.client import format_episode, parse_episode
from areal_actors.domain import (
    Episode,
    FinishReason,
    InteractionId,
    SessionId,
    Trajectory,
    TurnInfo,
    Untrained,
    UntrainedReason,
)
from areal_actors.errors import ExportError
from areal_actors.testing.strategies import sampling_distributions

int32 = st.integers(-(2**31), 2**31 - 1)
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
identifiers = st.text(max_size=12).map(InteractionId)

turn_infos = st.builds(
    TurnInfo,
    depth=st.integers(0, 99),
    tag=st.none() | st.text(max_size=5),
    finish=st.none() | st.sampled_from(FinishReason),
    sampling=st.none() | sampling_distributions(),
)


@st.composite
def _trajectories(draw):
    length = draw(st.integers(0, 6))
    ints = npst.arrays(np.int32, length, elements=int32)
    floats = npst.arrays(np.float32, length, elements=finite)
    return Trajectory(
        session=SessionId("s"),
        interactions=tuple(draw(st.lists(identifiers, max_size=2))),
        input_ids=draw(ints),
        loss_mask=draw(ints),
        logprobs=draw(floats),
        versions=draw(ints),
        returns=draw(floats),
        turns=draw(ints),
        reward=draw(st.floats(allow_nan=False, allow_infinity=False)),
        tag=draw(st.none() | st.text(max_size=5)),
        predecessors=draw(st.none() | ints),
        raw_logprobs=draw(st.none() | floats),
        turn_infos=draw(st.lists(turn_infos, max_size=2).map(tuple)),
    )


episodes = st.builds(
    Episode,
    session=st.just(SessionId("s")),
    member=st.integers(0, 9),
    reward=st.floats(allow_nan=False, allow_infinity=False),
    trajectories=st.lists(_trajectories(), max_size=3).map(tuple),
    untrained=st.lists(
        st.builds(
            Untrained, interaction=identifiers, num_tokens=st.integers(0, 99), reason=st.sampled_from(UntrainedReason)
        ),
        max_size=2,
    ).map(tuple),
    num_turns=st.integers(0, 9),
    seconds=st.floats(0, 1e6),
    failure=st.none() | st.text(max_size=5),
)


@given(episode=episodes)
def test_episode_document_round_trips_bit_by_bit(episode):
    """What is read back from the JSON text equals what was written: ids, float32 logprobs, returns and all."""
    text = orjson.dumps(format_episode(episode), option=orjson.OPT_SERIALIZE_NUMPY)
    read = parse_episode(orjson.loads(text))

    assert read == episode
    for row, original in zip(read.trajectories, episode.trajectories, strict=True):
        assert row.logprobs.tobytes() == original.logprobs.tobytes()
        assert row.logprobs.dtype == np.float32


@pytest.mark.parametrize(
    "document", [{}, {"version": 2}, {"version": 1}, {"version": 1, "session_id": "s", "member": 0}]
)
def test_foreign_episode_document_is_refused(document):
    """Another version, or something else altogether, is an error that says so."""
    with pytest.raises(ExportError):
        parse_episode(document)
