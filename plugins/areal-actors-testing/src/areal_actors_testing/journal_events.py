"""Hypothesis strategies for the events of a journal, with all texts and numbers that JSON or a client can send."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from areal_actors.domain import (
    Attempt,
    ChatMessage,
    Completion,
    FinishReason,
    ForkReason,
    GroupConsumed,
    GroupId,
    GroupQueued,
    Interaction,
    InteractionId,
    InteractionStatus,
    JournalEvent,
    RewardScope,
    RewardSet,
    SampleKey,
    SessionEnded,
    SessionForgotten,
    SessionId,
    SessionStarted,
    StepLeased,
    ToolCall,
    TopLogprob,
    TurnEnded,
    VersionSaved,
)
from areal_actors.testing.strategies import sampling_distributions

_FLOAT32 = st.floats(width=32)


def any_texts() -> st.SearchStrategy[str]:
    """Return texts with anything that Python text can hold: NUL, lone surrogates, and pairs of them."""
    return st.text(st.characters(), max_size=8) | st.sampled_from(["", "\0", "\ud83d", "\ud83d\ude00", "é漢🙂", "'"])


def json_values() -> st.SearchStrategy[Any]:
    """Return JSON as Python reads it: integers of any size, NaN, any text."""
    leaves = st.none() | st.booleans() | st.integers() | st.integers(10**30, 10**40) | st.floats() | any_texts()
    return st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(any_texts(), inner, max_size=3),
        max_leaves=6,
    )


def _objects() -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(any_texts(), json_values(), max_size=3)


def _optional_texts() -> st.SearchStrategy[str | None]:
    return st.none() | any_texts()


def _messages() -> st.SearchStrategy[ChatMessage]:
    calls = st.builds(ToolCall, id=any_texts(), name=any_texts(), arguments=any_texts())
    return st.builds(
        ChatMessage,
        role=any_texts(),
        content=_optional_texts(),
        tool_calls=st.lists(calls, max_size=2).map(tuple),
        tool_call_id=_optional_texts(),
        name=_optional_texts(),
        reasoning=_optional_texts(),
    )


@st.composite
def _completions(draw: st.DrawFn) -> Completion:
    size = draw(st.integers(0, 5))
    logprobs = draw(st.lists(_FLOAT32, min_size=size, max_size=size))
    raw_logprobs = draw(st.just(logprobs) | st.lists(_FLOAT32, min_size=size, max_size=size))
    versions = st.integers(-1, 3).map(lambda version: [version] * size)
    alternatives = st.lists(st.builds(TopLogprob, token_id=st.integers(0, 99), logprob=st.floats()), max_size=2)
    return Completion(
        token_ids=draw(st.lists(st.integers(0, 2**31 - 1), min_size=size, max_size=size)),
        logprobs=logprobs,
        raw_logprobs=raw_logprobs,
        versions=draw(versions | st.lists(st.integers(-1, 3), min_size=size, max_size=size)),
        finish=draw(st.sampled_from(FinishReason)),
        top_logprobs=draw(st.just(()) | st.lists(alternatives.map(tuple), min_size=size, max_size=size).map(tuple)),
    )


def _interactions() -> st.SearchStrategy[Interaction]:
    ids = any_texts().map(InteractionId)
    return st.builds(
        Interaction,
        id=ids,
        order=st.integers(0, 99),
        parent=st.none() | ids,
        token_parent=st.none() | ids,
        fork=st.none() | st.sampled_from(ForkReason),
        messages=st.lists(_messages(), max_size=2).map(tuple),
        num_instructions=st.none() | st.integers(0, 3),
        num_kept=st.none() | st.integers(0, 3),
        has_instructions=st.booleans(),
        prompt_suffix=st.lists(st.integers(0, 2**31 - 1), max_size=4).map(lambda ids: np.array(ids, np.int32)),
        num_prompt_tokens=st.integers(0, 2**40),
        completion=st.none() | _completions(),
        output=st.none() | _messages(),
        status=st.sampled_from(InteractionStatus),
        completed_order=st.none() | st.integers(0, 99),
        reward=st.none() | st.floats(),
        reward_scope=st.sampled_from(RewardScope),
        is_stored=st.booleans(),
        tag=_optional_texts(),
        failure=_optional_texts(),
        sampling=st.none() | sampling_distributions(),
        digest=st.none()
        | st.binary(min_size=1, max_size=8).map(lambda part: f"{part.hex()}:{part.hex()}:{part.hex()}"),
    )


def _sessions() -> st.SearchStrategy[SessionId]:
    return any_texts().map(SessionId)


def _groups() -> st.SearchStrategy[GroupId]:
    return any_texts().map(GroupId)


def sessions_started() -> st.SearchStrategy[SessionStarted]:
    """Return starts of sessions with any metadata and sample keys of any size."""
    paths = st.lists(st.integers() | any_texts(), max_size=3).map(tuple)
    return st.builds(
        SessionStarted,
        session=_sessions(),
        key_digest=st.binary(max_size=32),
        sample_key=st.builds(SampleKey, seed=st.integers(-(10**30), 10**30), path=paths),
        started_at=st.floats(),
        group=st.none() | _groups(),
        user=_optional_texts(),
        metadata=_objects(),
    )


def turns_ended() -> st.SearchStrategy[TurnEnded]:
    """Return ended turns of any status, with and without sampled tokens."""
    digests = st.binary(max_size=32)
    attempts = st.builds(
        Attempt, fingerprint=any_texts(), number=st.integers(0, 10**30), idempotency_key=_optional_texts()
    )
    return st.builds(
        TurnEnded,
        session=_sessions(),
        interaction=_interactions(),
        frame=st.none() | st.tuples(digests, digests, digests),
        ended_at=st.floats(),
        attempt=st.none() | attempts,
        siblings=st.lists(any_texts().map(InteractionId), max_size=3).map(tuple),
        num_cached_tokens=st.integers(0, 2**40),
        stop_sequence=_optional_texts(),
        prompt_digest=st.none() | digests,
        asked=st.none() | st.tuples(any_texts(), st.integers(0, 2**40)),
    )


def events() -> st.SearchStrategy[JournalEvent]:
    """Return any single event."""
    versions = st.integers(-1, 2**40)
    ids = any_texts().map(InteractionId)
    return st.one_of(
        sessions_started(),
        turns_ended(),
        st.builds(
            RewardSet, session=_sessions(), interaction=ids, reward=st.floats(), scope=st.sampled_from(RewardScope)
        ),
        st.builds(SessionEnded, session=_sessions(), ended_at=st.floats(), is_final=st.booleans()),
        st.builds(SessionForgotten, session=_sessions()),
        st.builds(
            GroupQueued,
            group=_groups(),
            position=st.integers(0, 2**40),
            sessions=st.lists(_sessions(), max_size=3).map(tuple),
            data=_objects(),
            content=st.none() | st.binary(max_size=8),
        ),
        st.builds(
            StepLeased,
            version=versions,
            groups=st.lists(_groups(), max_size=3).map(tuple),
            content=st.binary(max_size=8),
        ),
        st.builds(GroupConsumed, group=_groups(), version=versions, is_trained=st.booleans()),
        st.builds(VersionSaved, version=versions),
    )
