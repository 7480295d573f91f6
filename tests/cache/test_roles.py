"""Roles that are not trained take no part in rewards, and their tokens are only context."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.cache.export import STYLES, export_trajectories
from areal_actors.cache.roles import role_of, select_roles
from areal_actors.cache.session import Session, SessionStore
from areal_actors.cache.tree import ConversationTree
from areal_actors.domain import Credential, SessionRecord, UntrainedReason
from areal_actors.errors import Forbidden
from areal_actors.testing.strategies import session_records

ROLES = ("agent", "user", "judge")


@st.composite
def attributed(draw: st.DrawFn) -> SessionRecord:
    """Any session, each of whose turns has some role."""
    record = draw(session_records())
    tags = st.sampled_from([None, "user", "judge"])
    return evolve(record, interactions=tuple(evolve(turn, tag=draw(tags)) for turn in record.interactions))


@given(attributed(), st.sets(st.sampled_from(ROLES), min_size=1), st.sampled_from(sorted(STYLES)))
def test_tokens_of_trained_roles_are_trained_once(record, roles, style):
    """Tokens of other roles are listed with that reason."""
    exported = export_trajectories(record, discount=1.0, style=style, train_roles=tuple(roles))
    trained = Counter()
    for row in exported.trajectories:
        for place, turn in enumerate(row.interactions):
            trained[turn] += int(((row.turns == place) & (row.loss_mask == 1)).sum())
    reasons = {entry.interaction: entry.reason for entry in exported.untrained}

    for turn in record.interactions:
        sampled = 0 if turn.completion is None else len(turn.completion.token_ids)
        if role_of(turn) not in roles:
            assert 0 == trained[turn.id]
            assert not sampled or reasons[turn.id] is UntrainedReason.OTHER_ROLE
        else:
            assert trained[turn.id] == (0 if turn.id in reasons else sampled)


@given(attributed(), st.sampled_from(sorted(STYLES)))
def test_all_roles_train_as_without_the_setting(record, style):
    named = export_trajectories(record, discount=0.9, style=style, train_roles=ROLES)

    assert named == export_trajectories(record, discount=0.9, style=style)


@given(attributed(), st.sets(st.sampled_from(ROLES), min_size=1))
def test_outcome_moves_to_the_last_answer_of_the_kept_roles(record, roles):
    """It is neither lost nor doubled."""
    selected = select_roles(record, roles)
    completed = [turn for turn in selected.interactions if turn.completed_order is not None]
    outcome = record.outcome

    assert all(role_of(turn) in roles for turn in selected.interactions)
    if outcome is not None and completed:
        own = {turn.id: turn.reward or 0.0 for turn in record.interactions}
        moved = {turn.id: (turn.reward or 0.0) - own[turn.id] for turn in selected.interactions}
        expected = 0.0 if role_of(outcome) in roles else outcome.reward
        assert abs(sum(moved.values()) - expected) <= 1e-6 * max(1.0, abs(expected))


def test_role_keys_survive_a_restart():
    """Only their digests are in the metadata."""
    tokens = iter(["the-session-key", "the-id", "the-completion-key", "the-key-of-the-judge"])
    store = SessionStore(token_factory=lambda: next(tokens))
    issued = store.create("task", now=0.0, roles=("judge",))
    before = store.get(issued.id)
    stored = json.loads(json.dumps(dict(before.tree.metadata)))
    after = SessionStore(token_factory=lambda: next(tokens))
    after.restore(
        Session(
            id=issued.id,
            tree=ConversationTree(issued.id, metadata=stored),
            key_digest=before.key_digest,
            completion_digest=before.completion_digest,
            last_used_at=0.0,
        )
    )
    found = after.resolve(Credential(key=issued.role_keys["judge"]))

    assert "the-key-of-the-judge" not in json.dumps(stored)
    assert ("judge", None, None) == tuple(
        found.role_of_key(key) for key in (issued.role_keys["judge"], issued.key, issued.completion_key)
    )
    with pytest.raises(Forbidden):
        after.resolve_control(Credential(key=issued.role_keys["judge"]))
