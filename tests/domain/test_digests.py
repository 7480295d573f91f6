"""Digests of turns: every column is bound, and ids can be checked wherever the turns begin."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.domain import (
    Completion,
    FinishReason,
    InteractionId,
    create_token_hash,
    digest_tokens,
    digest_turn,
    is_turn_digest,
    restate_digest,
)

NAME = InteractionId("turn")
FLOATS = st.lists(st.floats(-50, 0, width=32), min_size=1, max_size=6)


def completion_of(logprobs: list[float], version: int) -> Completion:
    """Return an answer with one token for each log-probability."""
    return Completion(
        token_ids=range(len(logprobs)),
        logprobs=logprobs,
        raw_logprobs=[value - 1 for value in logprobs],
        versions=[version] * len(logprobs),
        finish=FinishReason.STOP,
    )


@given(st.lists(st.integers(0, 2**31 - 1)), st.integers(0, 20))
def test_digest_of_ids_does_not_depend_on_where_turns_begin(ids: list[int], cut: int):
    """A row checks ids that it holds as context."""
    digest = create_token_hash()
    digest.update(np.array(ids[:cut], np.int32))
    follower = digest.copy()
    follower.update(np.array(ids[cut:], np.int32))

    assert follower.hexdigest() == digest_tokens(np.array(ids, np.int32))
    assert digest.hexdigest() == digest_tokens(np.array(ids[:cut], np.int32))


@given(FLOATS, st.integers(0, 9), st.data())
def test_any_change_of_a_turn_is_found(logprobs: list[float], version: int, data: st.DataObject):
    """One number, or the name, differs from the recorded one."""
    answer = completion_of(logprobs, version)
    digest = digest_turn(NAME, "00", answer)
    columns = {"logprobs": answer.logprobs, "versions": answer.versions, "raw_logprobs": answer.raw_logprobs}
    assert is_turn_digest(digest, NAME, **columns)
    assert not is_turn_digest(digest, InteractionId("other"), **columns)

    column = data.draw(st.sampled_from(sorted(columns)))
    changed = columns[column].copy()
    changed[data.draw(st.integers(0, len(changed) - 1))] += 1
    assert not is_turn_digest(digest, NAME, **(columns | {column: changed}))
    assert not is_turn_digest(digest, NAME, **{name: values[:-1] for name, values in columns.items()})


@given(FLOATS, st.integers(2, 9))
def test_restated_turn_still_binds_what_the_engine_reported(logprobs: list[float], version: int):
    """The new part covers the new versions and the part before it."""
    reported, known = completion_of(logprobs, version), completion_of(logprobs, 1)
    digest = restate_digest(before := digest_turn(NAME, "00", reported), NAME, known)

    assert digest.startswith(before)
    assert is_turn_digest(digest, NAME, logprobs=known.logprobs, versions=known.versions)
    assert not is_turn_digest(digest, NAME, logprobs=known.logprobs, versions=reported.versions)
    forged = digest.replace(before.rsplit(":", 1)[1], "0" * 64)
    assert not is_turn_digest(forged, NAME, logprobs=known.logprobs, versions=known.versions)
