"""The verdict on a run that does not learn: which cause is named, and that runs that learn have none."""

from __future__ import annotations

from functools import reduce
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.dashboard.verdict import NUM_JUDGED_STEPS, append_step, find_causes, find_note, find_verdict

STEP: dict[str, Any] = {
    "reward": 0.5,
    "entropy": 1.5,
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
Steps = list[dict[str, Any]]


def alike(num: int, **changes: Any) -> Steps:
    """That many steps with these numbers."""
    return [STEP | changes] * num


def rising(num: int, **changes: Any) -> Steps:
    """Steps whose reward rises."""
    return [STEP | {"reward": index / num} | changes for index in range(num)]


CUT = {"truncated_turns": 60}
EQUAL = {"zero_variance_groups": 8}
GREEDY = {"trained_tokens": 0, "greedy_tokens": 640}
COLLAPSED = {"reward": 0.01, "entropy": 0.01, **EQUAL, **CUT}

HISTORIES: dict[str, tuple[Steps, list[str], str]] = {
    # what happened: the steps, the causes, words of the verdict
    "nothing": ([], [], ""),
    "healthy": (alike(20), [], ""),
    "supervised": ([{"phase": "sft", "reward": None}] * 9, [], ""),
    "one step, all wrong": (alike(1, **EQUAL, **CUT, reward=0.0, failed_episodes=64), [], ""),
    "cut at first": (alike(7, **CUT), [], ""),
    "cut for long": (alike(12, **CUT), [], ""),
    "many equal groups at first": (alike(5, zero_variance_groups=6), [], ""),
    "all equal at first": (alike(3, **EQUAL, reward=0.2), ["equal_rewards"], "24 of 24 groups had equal rewards"),
    "many equal groups": (alike(8, zero_variance_groups=6), ["equal_rewards"], "48 of 64 groups had equal rewards"),
    "equal and cut": (alike(8, **EQUAL, **CUT), ["equal_rewards"], " Note: 480 of 512 answers in the last 8 steps"),
    "never rewarded": (
        alike(8, **EQUAL, reward=0.0),
        ["equal_rewards"],
        "No episode was rewarded: use easier problems",
    ),
    "always rewarded": (
        alike(4, **EQUAL, reward=1.0),
        ["equal_rewards"],
        "check that the reward depends on the answer",
    ),
    "equal at the top": ([*rising(20), *alike(20, **EQUAL, reward=1.0)], [], ""),
    "half failed at first": (alike(3, failed_episodes=40), [], ""),
    "half failed": (
        alike(8, failed_episodes=40),
        ["failed_episodes"],
        "320 of 512 episodes failed in the last 8 steps;",
    ),
    "all failed": (
        [STEP | {"reward": None, "failed_episodes": 64}] * 3,
        ["failed_episodes"],
        "192 of 192 episodes failed",
    ),
    "rejected": (alike(8, failed_episodes=40, rejected_episodes=30), [], ""),
    "greedy": (alike(3, **GREEDY), ["greedy_tokens"], "1920 of 1920 tokens in the last 3 steps were sampled at temp"),
    "some are greedy": (alike(20, greedy_tokens=100), [], ""),
    "failed and equal": (
        alike(8, failed_episodes=40, **EQUAL),
        ["failed_episodes", "equal_rewards"],
        "; failures.jsonl has their tracebacks. Also: 64 of 64 groups had equal rewards",
    ),
    "collapsed at once": (
        [STEP | {"reward": 0.03, "entropy": 5.0}, *alike(7, **COLLAPSED | {"reward": 0.0, "entropy": 0.0})],
        ["collapse"],
        "the reward fell from 0.03 at its best to 0.0",
    ),
    "collapsed after it rose": (
        [*rising(30), *alike(12, **COLLAPSED)],
        ["collapse"],
        "The policy collapsed: the reward fell from 0.967 at its best to 0.01, and the entropy from 1.5 to 0.01. Lower",
    ),
    "certain and right": ([*rising(30), *alike(12, reward=0.98, entropy=0.01)], [], ""),
    "worse and uncertain": ([*rising(30), *alike(30, reward=0.1)], [], ""),
}


@pytest.mark.parametrize(("steps", "causes", "words"), HISTORIES.values(), ids=HISTORIES)
def test_verdict_of_a_history(steps: Steps, causes: list[str], words: str):
    """The causes by name and in words; none before enough steps, of cut answers alone, or of a run that learns.

    The display, which keeps few numbers of old steps, says the same as the summary.
    """
    verdict = find_verdict(steps)

    assert list(find_causes(steps)) == causes
    assert words in (verdict or "")
    assert (verdict is None) == (not causes)
    assert find_verdict(reduce(append_step, steps, ())) == verdict


def test_note_names_cut_answers_of_a_run_that_does_not_learn():
    """Not before enough steps, and not while the reward rises."""
    assert find_note(alike(7, **CUT)) is None
    assert find_note(rising(20, **CUT)) is None
    assert (find_note(alike(20, **CUT)) or "").startswith("480 of 512 answers in the last 8 steps were cut")


@given(st.lists(st.dictionaries(st.sampled_from(sorted(STEP)), st.none() | st.floats(0, 100)), max_size=40))
def test_verdict_ignores_missing_numbers(steps: Steps):
    """Records of other phases and of earlier versions lack some of them."""
    verdict = find_verdict(steps)

    assert verdict is None or verdict.endswith(".")
    assert find_verdict(reduce(append_step, steps, ())) == verdict
    assert len(reduce(append_step, steps, ())) <= len(steps)


BAD = {
    f"source/bad/{key}": value for key, value in {"reward": 0.0, "groups": 2, "equal_groups": 2, "episodes": 16}.items()
}
GOOD = {"source/good/groups": 4, "source/good/equal_groups": 0}
EQUAL_SOURCE = "Source bad: 16 of 16 groups had equal rewards in the last 8 steps: nothing to learn from them. "
SOURCES: dict[str, tuple[dict[str, Any], str | None]] = {
    # what is reported of a source in each step of a run whose mean reward rises, and how the verdict begins
    "never rewarded": (BAD | GOOD, f"{EQUAL_SOURCE}No episode was rewarded: use easier problems"),
    "all groups replaced": (
        BAD | {"source/bad/equal_groups": 0, "source/bad/groups": 0, "source/bad/replaced_groups": 2},
        EQUAL_SOURCE,
    ),
    "failed": (
        BAD | {"source/bad/reward": None, "source/bad/failed_episodes": 16},
        "Source bad: 128 of 128 episodes failed",
    ),
    "rejected": (
        {f"source/bad/{key}": 8 for key in ("episodes", "failed_episodes", "rejected_episodes")},
        None,
    ),
}


@pytest.mark.parametrize(("numbers", "words"), SOURCES.values(), ids=SOURCES)
def test_verdict_names_a_source_without_signal_in_a_learning_run(numbers: dict[str, Any], words: str | None):
    """The mean of all sources rises, and one of them teaches nothing; a step may have a single group of a source."""
    steps = [step | numbers | {"source/good/reward": step["reward"]} for step in rising(NUM_JUDGED_STEPS)]

    assert words is None or (find_verdict(steps) or "").startswith(words)
    assert words is not None or find_verdict(steps) is None
    assert find_verdict(steps[:-1]) is None
