"""The public strategies: what they draw is valid, and reaches the cases that matter."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from areal_actors.cache import RewardTree, full_history, full_ids, lookup_in
from areal_actors.domain import ChatMessage, InteractionStatus, SessionRecord
from areal_actors.testing.strategies import (
    ECHO_STYLES,
    chat_messages,
    conversations,
    reward_trees,
    session_records,
)

GENERATE = settings(  # any example will do, not the smallest
    phases=[Phase.generate], max_examples=1000, database=None, report_multiple_bugs=False
)


@given(session_records())
def test_sessions_are_whole(record: SessionRecord) -> None:
    """Parents exist and precede, prompts have the length that was recorded, only completed turns are continued."""
    lookup = lookup_in(record)
    for turn in record.interactions:
        assert len(full_ids(turn, lookup)) == turn.num_prompt_tokens + (
            0 if turn.completion is None else len(turn.completion.token_ids)
        )
        assert full_history(turn, lookup)
        for parent in (turn.parent, turn.token_parent):
            assert parent is None or lookup(parent).status is InteractionStatus.COMPLETED


@given(reward_trees())
def test_reward_trees_are_forests(tree: RewardTree) -> None:
    """Parents come before their children, and every interaction has a reward of its own."""
    assert len(tree.ids) == len(set(tree.ids)) == len(tree.parents) == len(tree.rewards)
    assert all(parent is None or parent < position for position, parent in enumerate(tree.parents))


@given(conversations())
def test_every_call_in_a_conversation_has_its_result(messages: tuple[ChatMessage, ...]) -> None:
    """A chat template would take it."""
    calls = [call.id for message in messages for call in message.tool_calls]

    assert calls == [message.tool_call_id for message in messages if message.role == "tool"]
    assert messages[-1].role in {"user", "tool"}


@pytest.mark.parametrize(
    ("strategy", "condition"),
    [
        (session_records(), lambda r: any(t.parent and t.token_parent is None for t in r.interactions)),
        (session_records(), lambda r: any(t.token_parent not in {None, t.parent} for t in r.interactions)),
        (session_records(), lambda r: len({t.parent for t in r.interactions}) + 1 < len(r.interactions)),
        (session_records(), lambda r: any(not t.is_stored for t in r.interactions)),
        (reward_trees(), lambda t: t.parents.count(0) > 1 and t.parents.count(None) > 1),
        (chat_messages("assistant"), lambda m: m.content and m.tool_calls and m.reasoning),
    ],
)
def test_the_cases_that_matter_are_reached(strategy: st.SearchStrategy[Any], condition: Any) -> None:
    """Forks, earlier token parents, siblings, unstored turns, several roots, answers with everything."""
    assert condition(find(strategy, condition, settings=GENERATE))


@pytest.mark.parametrize("style", sorted(set(ECHO_STYLES) - {"exact"}))
def test_every_echo_style_changes_something(style: str) -> None:
    """A style that is exact would test nothing."""
    echo = ECHO_STYLES[style]

    found = find(chat_messages("assistant"), lambda message: echo(message) != message, settings=GENERATE)
    assert found != echo(found)
