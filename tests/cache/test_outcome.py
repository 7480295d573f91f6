"""The outcome of an episode: which reward it is, and which conversations inherit it."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.cache import STYLES, RewardTree, Unrewarded, backpropagate, export_trajectories, total_reward
from areal_actors.cache.rewards import credits_of
from areal_actors.domain import (
    ChatMessage,
    Credit,
    Interaction,
    InteractionId,
    InteractionStatus,
    RewardScope,
    RewardSet,
    SessionId,
    SessionRecord,
    UntrainedReason,
)
from areal_actors.errors import ExportError
from areal_actors.journal import recover
from areal_actors.testing.strategies import session_records
from areal_actors_testing.journal_contract import create_start, create_turn


def record_of(
    parents: list[int | None],
    rewards: dict[int, tuple[float, RewardScope]],
    *,
    unstored: frozenset[int] = frozenset(),
) -> SessionRecord:
    """A session of completed turns named by their numbers, without tokens."""
    turns = [
        Interaction(
            id=InteractionId(str(number)),
            order=number,
            parent=None if parent is None else InteractionId(str(parent)),
            prompt_suffix=np.array([1], np.int32),
            num_prompt_tokens=1,
            status=InteractionStatus.COMPLETED,
            completed_order=number,
            reward=rewards[number][0] if number in rewards else None,
            reward_scope=rewards[number][1] if number in rewards else RewardScope.ANSWER,
            is_stored=number not in unstored,
        )
        for number, parent in enumerate(parents)
    ]
    return SessionRecord(id=SessionId("session"), interactions=tuple(turns))


def returns_of(record: SessionRecord, discount: float = 1.0, **options: Any) -> list[float]:
    """The returns in order of request."""
    return [round(value, 6) for value in backpropagate(record, discount, **options).values()]


WHOLE, LAST, ANSWER = RewardScope.EPISODE, RewardScope.LAST, RewardScope.ANSWER


# ------------------------------------------------------------------------------------------------ by example


def test_conversations_without_a_reward_inherit_the_outcome() -> None:
    """A sub-agent and a conversation before a compaction are examples."""
    record = record_of([None, 0, None, None, 3], {4: (1.0, WHOLE)})

    assert [0.9, 1.0, 1.0, 0.9, 1.0] == returns_of(record, 0.9)
    assert [0.0, 0.0, 0.0, 0.9, 1.0] == returns_of(record, 0.9, unrewarded=Unrewarded.ZERO)


def test_answers_after_the_outcome_have_no_reward() -> None:
    """The rewarded answer keeps its number."""
    record = record_of([None, 0, 1, 0], {1: (1.0, WHOLE)})

    assert [0.9, 1.0, 0.0, 1.0] == returns_of(record, 0.9)


def test_only_reward_without_an_id_is_the_outcome() -> None:
    """Another reward makes it a reward of its answer."""
    alone = record_of([None, None, None], {2: (1.0, LAST)})
    dense = record_of([None, None, None], {1: (0.5, LAST), 2: (1.0, LAST)})
    named = record_of([None, None, None], {0: (0.5, ANSWER), 2: (1.0, LAST)})

    assert [1.0, 1.0, 1.0] == returns_of(alone)
    assert [0.0, 0.5, 1.0] == returns_of(dense)
    assert [0.5, 0.0, 1.0] == returns_of(named)


def test_returned_number_is_the_outcome_beside_other_rewards() -> None:
    """The last completed answer holds it."""
    record = record_of([None, None, None, None], {0: (0.5, ANSWER), 1: (0.25, WHOLE), 3: (1.0, WHOLE)})

    assert [0.5, 0.25, 1.0, 1.0] == returns_of(record)


def test_outcome_is_on_the_last_stored_answer() -> None:
    """A later answer was not to be stored."""
    record = record_of([None, 0, 1], {1: (1.0, WHOLE)}, unstored=frozenset({2}))

    assert [0.9, 1.0] == returns_of(record, 0.9)[:2]


def test_creation_order_inherits_nothing() -> None:
    """It pays every reward to all earlier turns."""
    record = record_of([None, None, None], {2: (1.0, WHOLE)})

    assert [0.81, 0.9, 1.0] == returns_of(record, 0.9, rule="creation-order")


def test_rules_see_inherited_rewards_at_the_leaves() -> None:
    """Rules of users need not know outcomes."""
    seen: list[RewardTree] = []

    def rule(tree: RewardTree, _: float) -> tuple[float, ...]:
        seen.append(tree)
        return tree.rewards

    backpropagate(record_of([None, 0, None], {2: (1.0, WHOLE)}), 0.9, rule)

    assert [(0.0, 1.0, 1.0)] == [tree.rewards for tree in seen]
    assert {1} == seen[0].heirs


def test_credits_name_inherited_rewards() -> None:
    """Other turns are rewarded or have none."""
    record = record_of([None, 0, 0, None], {2: (1.0, WHOLE)})
    tree = RewardTree.of(record)

    found = [credits_of(record, tree, "mean")[name] for name in tree.ids]
    assert [Credit.REWARDED, Credit.INHERITED, Credit.REWARDED, Credit.INHERITED] == found
    zero = RewardTree.of(record, unrewarded=Unrewarded.ZERO)
    assert [Credit.REWARDED, Credit.NONE, Credit.REWARDED, Credit.NONE] == list(
        credits_of(record, zero, "mean").values()
    )
    assert [Credit.REWARDED] * 3 + [Credit.NONE] == list(credits_of(record, zero, "creation-order").values())


# --------------------------------------------------------------------------------------- how rewards are set


def user(text: str) -> ChatMessage:
    """A message of the user."""
    return ChatMessage(role="user", content=text)


@pytest.fixture
def two(new_talk: Any) -> Any:
    """A session of two conversations, ``a`` before ``b``."""
    talk = new_talk()
    talk.turn("a", [user("1")], "A")
    talk.turn("b", [user("2")], "B")
    return talk


def outcome_of(talk: Any) -> tuple[str, float | None] | None:
    """The outcome of a session as it stands: the answer that holds it, and its value."""
    found = talk.tree.snapshot().outcome
    return None if found is None else (found.id, found.reward)


def test_second_outcome_replaces_the_first(two: Any) -> None:
    """It may be finalized, returned, or set without an id."""
    two.tree.set_reward(None, 0.5)
    assert ("b", 0.5) == outcome_of(two)
    two.tree.set_reward(None, 1.0, is_outcome=True)
    assert ("b", 1.0) == outcome_of(two)
    two.tree.set_reward(None, 0.25)
    two.tree.set_reward("a", 0.5)
    assert ("b", 0.25) == outcome_of(two)
    assert 0.75 == total_reward(two.tree.snapshot())


def test_reward_by_id_replaces_the_outcome(two: Any) -> None:
    """It belongs to the named answer."""
    two.tree.set_reward(None, 1.0, is_outcome=True)
    two.tree.set_reward("b", 0.5)
    assert outcome_of(two) is None


def test_second_reward_ends_an_outcome_without_an_id(two: Any) -> None:
    """It was a reward of the last answer."""
    two.tree.set_reward(None, 1.0)
    two.tree.set_reward("a", 0.0)
    assert outcome_of(two) is None


@pytest.mark.parametrize("style", sorted(STYLES))
def test_rows_carry_inherited_returns(two: Any, style: str) -> None:
    """The reward of an interaction and the total of the session stay as they were set."""
    two.tree.set_reward(None, 1.0, is_outcome=True)
    record = two.tree.snapshot()

    exported = export_trajectories(record, discount=0.5, style=style)

    returns = {
        row.interactions[turn]: (float(row.returns[row.turns == turn][0]), row.turn_infos[turn].credit)
        for row in exported.trajectories
        for turn in range(len(row.interactions))
    }
    assert {"a": (1.0, Credit.INHERITED), "b": (1.0, Credit.REWARDED)} == returns
    assert [None, 1.0] == [turn.reward for turn in record.interactions]
    assert 1.0 == total_reward(record)


@pytest.mark.parametrize("style", sorted(STYLES))
def test_skipped_conversations_are_listed(two: Any, style: str) -> None:
    """With `zero`, they return 0."""
    two.tree.set_reward(None, 1.0, is_outcome=True)

    skipped = export_trajectories(two.tree.snapshot(), discount=1, style=style, unrewarded=Unrewarded.SKIP)
    zero = export_trajectories(two.tree.snapshot(), discount=1, style=style, unrewarded=Unrewarded.ZERO)

    assert [("a", UntrainedReason.NO_REWARD)] == [(entry.interaction, entry.reason) for entry in skipped.untrained]
    assert {0.0, 1.0} == {float(value) for row in zero.trajectories for value in row.returns[row.loss_mask == 1]}


def test_restart_keeps_the_outcome() -> None:
    """The scope of a reward is in the journal."""
    turns = [create_turn("a", number) for number in range(2)]
    last = turns[-1].interaction.id
    rewarded = RewardSet(session=SessionId("a"), interaction=last, reward=0.5, scope=WHOLE)

    recovered = recover([create_start("a"), *turns, rewarded])[SessionId("a")].tree.snapshot()

    assert recovered.outcome is not None
    assert (last, 0.5) == (recovered.outcome.id, recovered.outcome.reward)


# ------------------------------------------------------------------------------------------------------ laws


def slow_returns(record: SessionRecord, discount: float) -> dict[str, float]:
    """The definition, by recursion."""
    turns = {turn.id: turn for turn in record.interactions if turn.status is InteractionStatus.COMPLETED}

    def root(turn: Interaction) -> str:
        return turn.id if turn.parent is None else root(turns[turn.parent])

    def follows(turn: Interaction, other: Interaction) -> bool:
        return turn.parent is not None and (turn.parent == other.id or follows(turns[turn.parent], other))

    outcome = record.outcome

    def value(turn: Interaction) -> float:
        children = [value(other) for other in turns.values() if other.parent == turn.id]
        if children or turn.reward is not None:
            return (turn.reward or 0.0) + discount * (fmean(children) if children else 0.0)
        mates = [other for other in turns.values() if root(other) == root(turn)]
        is_closed = any(other.reward is not None and other is not outcome for other in mates)
        is_heir = outcome is not None and not is_closed and not follows(turn, outcome)
        return outcome.reward if is_heir else 0.0

    return {name: value(turn) for name, turn in turns.items()}


@given(session_records(max_size=8), st.floats(0, 1))
def test_returns_follow_the_definition(record: SessionRecord, discount: float) -> None:
    """Any answers of any forest are rewarded."""
    expected = slow_returns(record, discount)

    assert backpropagate(record, discount) == pytest.approx(expected, rel=1e-9, abs=1e-6)


@given(session_records(max_size=8), st.floats(0, 1), st.sampled_from(["mean", "sum", "max", "creation-order"]))
def test_inherit_equals_zero_if_all_rewards_have_ids(record: SessionRecord, discount: float, rule: str) -> None:
    """Nothing is inherited."""
    named = evolve(record, interactions=tuple(evolve(t, reward_scope=ANSWER) for t in record.interactions))

    assert backpropagate(named, discount, rule) == backpropagate(record, discount, rule, unrewarded=Unrewarded.ZERO)


@given(session_records(max_size=8), st.floats(-4, 4))
def test_undiscounted_outcome_reaches_every_turn(record: SessionRecord, outcome: float) -> None:
    """The mean of equal numbers is the number."""
    bare = [evolve(turn, reward=None, reward_scope=ANSWER) for turn in record.interactions]
    completed = [turn for turn in bare if turn.status is InteractionStatus.COMPLETED]
    if not completed:
        return
    last = completed[-1]
    turns = tuple(evolve(t, reward=outcome, reward_scope=WHOLE) if t is last else t for t in bare)

    returns = backpropagate(evolve(record, interactions=turns), 1.0)

    assert returns == pytest.approx(dict.fromkeys(returns, outcome))


@given(session_records(max_size=8), st.sampled_from(Unrewarded), st.sampled_from(sorted(STYLES)))
def test_treatment_is_given_by_name(record: SessionRecord, unrewarded: Unrewarded, style: str) -> None:
    """An unknown name is refused."""
    by_name = export_trajectories(record, discount=0.9, style=style, unrewarded=str(unrewarded))

    assert export_trajectories(record, discount=0.9, style=style, unrewarded=unrewarded) == by_name
    with pytest.raises(ExportError, match="choose inherit, skip, zero"):
        export_trajectories(record, discount=0.9, style=style, unrewarded="none")
