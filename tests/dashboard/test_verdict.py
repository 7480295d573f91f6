"""The verdict on a run that does not learn: which cause is named, and that runs that learn have none."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.dashboard.verdict import NUM_JUDGED_STEPS, find_verdict

STEP: dict[str, Any] = {
    "reward": 0.5,
    "groups": 8,
    "zero_variance_groups": 1,
    "episodes": 64,
    "failed_episodes": 0,
    "trained_tokens": 640,
    "greedy_tokens": 0,
    "drawn_turns_mean": None,
    "trained_episodes": 64,
    "trained_turns_mean": 1.0,
    "truncated_turns": 0,
}

CAUSES = [
    ({"zero_variance_groups": 6}, 8, "48 of 64 groups had equal rewards in the last 8 steps: nothing to learn"),
    ({"zero_variance_groups": 8, "reward": 0.5}, 2, "16 of 16 groups had equal rewards in the last 2 steps"),
    ({"zero_variance_groups": 8, "reward": 0.0}, 1, "No episode was rewarded: use easier problems"),
    ({"zero_variance_groups": 8, "reward": 1.0}, 2, "check that the reward depends on the answer"),
    ({"failed_episodes": 40}, 1, "40 of 64 episodes failed in the last step; failures.jsonl"),
    (
        {"trained_tokens": 0, "greedy_tokens": 640},
        1,
        "640 of 640 tokens in the last step were sampled",
    ),
    ({"truncated_turns": 60}, 1, "60 of 64 answers in the last step were cut at their limit of tokens"),
]


@pytest.mark.parametrize(("change", "num_steps", "words"), CAUSES, ids=lambda value: str(value)[:30])
def test_verdict_names_the_cause_with_numbers(change: dict[str, Any], num_steps: int, words: str):
    """One sentence, about the latest steps."""
    assert words in (find_verdict([STEP | change] * num_steps) or "")


def test_verdict_names_several_causes():
    """Failures first; cut answers are often why the rewards of a group are equal."""
    step = STEP | {"failed_episodes": 40, "zero_variance_groups": 8, "reward": 0.0, "truncated_turns": 60}

    verdict = find_verdict([step] * 2) or ""

    assert verdict.startswith(
        "80 of 128 episodes failed in the last 2 steps; failures.jsonl has their tracebacks. Also: "
    )
    assert "Also: 16 of 16 groups had equal rewards" in verdict
    assert verdict.endswith(
        "Also: 120 of 128 answers in the last 2 steps were cut at their limit of tokens: raise max_tokens."
    )


def test_verdict_of_few_steps_needs_all_groups_equal():
    """A job that later learned had 30 of 40 equal groups in its first five steps."""
    assert find_verdict([STEP | {"zero_variance_groups": 6}] * 5) is None


def test_verdict_is_absent_for_healthy_steps():
    """Rewards that differ are enough; whether they rise is decided later."""
    assert find_verdict([]) is None
    assert find_verdict([STEP] * 20) is None


def test_verdict_is_absent_when_rewards_rise_to_the_top():
    """Its reward rose until most groups were solved by all members."""
    rising = [STEP | {"reward": step / 20, "zero_variance_groups": min(step, 8)} for step in range(20)]

    assert find_verdict(rising) is None


def test_verdict_ignores_supervised_steps():
    """They come first in a warm start."""
    assert find_verdict([{"phase": "sft", "reward": None}] * 5) is None


@given(st.lists(st.dictionaries(st.sampled_from(sorted(STEP)), st.none() | st.floats(0, 100)), max_size=20))
def test_verdict_ignores_missing_numbers(steps: list[dict[str, Any]]):
    """Records of other phases and of earlier versions lack some of them."""
    verdict = find_verdict(steps)

    assert verdict is None or verdict.endswith(".")
    assert find_verdict(steps) == find_verdict(steps), NUM_JUDGED_STEPS


def test_verdict_names_a_source_whose_groups_are_replaced():
    """It has no trained groups at all."""
    steps = [
        STEP
        | {"reward": index / 10}
        | {"source/bad/reward": 0.0, "source/bad/groups": 0, "source/bad/replaced_groups": 2, "source/bad/episodes": 16}
        for index in range(NUM_JUDGED_STEPS)
    ]

    assert (find_verdict(steps) or "").startswith("Source bad: 16 of 16 groups had equal rewards in the last 8 steps")


def test_verdict_names_a_source_whose_episodes_fail():
    """It has no reward; those that a workflow rejected on purpose are not blamed on it."""
    bad = {"source/bad/reward": None, "source/bad/episodes": 8, "source/bad/failed_episodes": 8}
    steps = [STEP | {"reward": index / 10} | bad for index in range(NUM_JUDGED_STEPS)]
    rejected = [step | {"source/bad/rejected_episodes": 8} for step in steps]

    assert (find_verdict(steps) or "").startswith("Source bad: 64 of 64 episodes failed in the last 8 steps")
    assert find_verdict(rejected) is None


def test_verdict_names_a_source_without_signal_in_a_learning_run():
    """The mean of all sources rises; one of them was never rewarded."""
    steps = [
        STEP
        | {
            "reward": index / 10,
            "source/good/reward": index / 5,
            "source/good/groups": 4,
            "source/good/equal_groups": 0,
        }
        | {"source/bad/reward": 0.0, "source/bad/groups": 2, "source/bad/equal_groups": 2, "source/bad/episodes": 16}
        for index in range(NUM_JUDGED_STEPS)
    ]

    assert find_verdict(steps) == (
        "Source bad: 16 of 16 groups had equal rewards in the last 8 steps: nothing to learn from them. "
        "No episode was rewarded: use easier problems, or show the model answers first (docs/guides/warm_start.md)."
    )
    assert find_verdict(steps[:-1]) is None
