"""Versions of tokens: whatever a server streams, and whenever weights are loaded, each token has its own."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.domain import FinishReason
from areal_actors.errors import EngineError
from areal_actors.generation.servers.dialect import Attribution, Delta, VersionSpan


def delta(ids, *, finish=None, spans=(), label=None) -> Delta:
    values = -np.asarray(ids, dtype=np.float32)
    return Delta(token_ids=ids, logprobs=values, raw_logprobs=values, finish=finish, spans=spans, server_version=label)


def spans_of(versions) -> tuple[VersionSpan, ...]:
    return tuple(VersionSpan(version=str(v), start=i, end=i + 1) for i, v in enumerate(versions))


@given(
    counts=st.lists(st.integers(0, 4), min_size=1, max_size=8),
    num_old=st.integers(0, 40),
    num_late=st.integers(0, 4),
)
def test_every_token_gets_the_version_that_sampled_it(counts, num_old, num_late):
    """Held back from the first delta that may hold a token of other weights, and all there at the end."""
    total = sum(counts)
    versions = [4 if i < num_old else 5 for i in range(total)]
    bounds = np.cumsum([0, *counts])
    settled_until = next((i for i, end in enumerate(bounds[1:]) if end > num_old), len(counts)) - num_late
    attribution, chunks = Attribution(4), []
    for index, (start, end) in enumerate(pairwise(bounds)):
        is_last = index == len(counts) - 1
        is_settled = index < settled_until
        finish = FinishReason.STOP if is_last else None
        piece = delta(range(start, end), finish=finish, spans=spans_of(versions) if is_last else ())
        chunks += attribution.take(piece, is_settled=is_settled)

    assert [int(i) for chunk in chunks for i in chunk.token_ids] == list(range(total))
    assert [chunk.version for chunk in chunks for _ in chunk.token_ids] == versions
    assert [chunk.finish for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish is FinishReason.STOP
    assert all(len(chunk.token_ids) for chunk in chunks[:-1])


@pytest.mark.parametrize(
    "last",
    [
        delta([9], finish=FinishReason.STOP),
        delta([9], finish=FinishReason.STOP, spans=spans_of([4, 4])),
        delta([9], finish=FinishReason.STOP, spans=spans_of([5, 4, 5])),
        delta([9], finish=FinishReason.STOP, spans=(VersionSpan(version="default", start=0, end=3),)),
    ],
)
def test_tokens_of_unknown_weights_are_refused(last):
    """No spans, too few, spans that contradict what was passed on, labels that are none of ours."""
    attribution = Attribution(4)
    assert len(attribution.take(delta([7]), is_settled=True)) == 1
    assert not attribution.take(delta([8]), is_settled=False)
    with pytest.raises(EngineError, match="names the weights"):
        attribution.take(last, is_settled=False)


def test_unknown_label_is_detected_at_once():
    """A server that was started again says so with its first token."""
    with pytest.raises(EngineError, match="started again"):
        Attribution(4).take(delta([7], label="default"), is_settled=True)
