"""The sentences that say why a run does not learn, from the metrics of its latest steps.

The causes are those that the metrics show beyond doubt: episodes that fail, rewards that do not differ, tokens that are
not trained, answers that are cut. If several hold, all are named. A run whose reward rises has no verdict, unless one
of its sources has one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

CAUSES = ("failed_episodes", "greedy_tokens", "equal_rewards", "cut_answers", "source")
"""The causes that a verdict can have, by name."""
NUM_JUDGED_STEPS = 8
"""A verdict is about this many latest steps, or all if there are fewer."""
_RISE = 0.05
"""A mean reward that is higher than in the first steps by this share of its range rises."""

Metrics = Mapping[str, Any]


def find_verdict(steps: Sequence[Metrics]) -> str | None:
    """Return why the run of ``steps`` (metrics in order) does not learn; ``None`` if it learns or nothing is known."""
    # Several may hold, and each has its own remedy: cut answers are often why rewards are equal.
    return " Also: ".join(find_causes(steps).values()) or None


def find_causes(steps: Sequence[Metrics]) -> dict[str, str]:
    """Return the sentences of the verdict on ``steps`` by their cause, one of ``CAUSES``."""
    steps = [
        step
        for step in steps
        # A source of which every episode failed has no reward.
        if step.get("phase", "rl") != "sft" and (step.get("reward") is not None or step.get("failed_episodes"))
    ]
    # The first and the latest steps decide; to look at the sources of 5,000 steps takes 30 ms.
    if len(steps) > 2 * NUM_JUDGED_STEPS:
        steps = [*steps[:NUM_JUDGED_STEPS], *steps[-NUM_JUDGED_STEPS:]]
    rewarded = [step for step in steps if step.get("reward") is not None]
    latest = steps[-NUM_JUDGED_STEPS:]
    over = "in the last step" if len(latest) == 1 else f"in the last {len(latest)} steps"
    # A workflow rejects episodes on purpose; these are among the failed ones.
    num_episodes, num_failed = _sum(latest, "episodes"), _sum(latest, "failed_episodes")
    num_failed -= _sum(latest, "rejected_episodes")
    num_trained, num_greedy = _sum(latest, "trained_tokens"), _sum(latest, "greedy_tokens")
    causes = {}
    if num_failed * 2 >= num_episodes > 0:
        causes["failed_episodes"] = (
            f"{num_failed:.0f} of {num_episodes:.0f} episodes failed {over}; failures.jsonl has their tracebacks."
        )
    if num_greedy * 2 >= num_trained and num_greedy > 0:
        causes["greedy_tokens"] = (
            f"{num_greedy:.0f} of {num_greedy + num_trained:.0f} tokens {over} were sampled at temperature 0, and such "
            "tokens are not trained: give requests a temperature."
        )
    if rewarded and not _is_rising(rewarded):
        causes |= _find_lack_of_signal(rewarded[-NUM_JUDGED_STEPS:], over)
    if not causes and (found := _find_source_without_signal(steps)) is not None:
        causes["source"] = found
    return causes


def _find_source_without_signal(steps: Sequence[Metrics]) -> str | None:
    """Return the verdict on the first source that has one: the reward of a run can rise without that of each source."""
    # A step may have a single group of a source.
    if len(steps) < NUM_JUDGED_STEPS:
        return None
    names = {key.split("/")[1] for step in steps for key in step if key.startswith("source/")}
    for name in sorted(names):
        own = []
        for step in steps:
            keys = ("reward", "episodes", "failed_episodes", "rejected_episodes")
            numbers = {key: step.get(f"source/{name}/{key}") for key in keys}
            # Groups with equal rewards are replaced if advantages.drop_zero_variance is set.
            replaced = step.get(f"source/{name}/replaced_groups") or 0
            numbers["groups"] = (step.get(f"source/{name}/groups") or 0) + replaced
            numbers["zero_variance_groups"] = (step.get(f"source/{name}/equal_groups") or 0) + replaced
            own.append(numbers)
        if (verdict := find_verdict(own)) is not None:
            return f"Source {name}: {verdict}"
    return None


def _find_lack_of_signal(latest: Sequence[Metrics], over: str) -> Iterator[tuple[str, str]]:
    num_groups, num_equal = _sum(latest, "groups"), _sum(latest, "zero_variance_groups")
    # In the first steps of a run that learns, 30 of 40 groups may be equal; if all are, there was no update.
    if num_equal * (1 if len(latest) < NUM_JUDGED_STEPS else 2) >= num_groups > 0:
        equal = f"{num_equal:.0f} of {num_groups:.0f} groups had equal rewards {over}: nothing to learn from them."
        rewards = [step["reward"] for step in latest]
        if all(reward == 0 for reward in rewards):
            advice = (
                "No episode was rewarded: use easier problems, or show the model answers first "
                "(docs/guides/warm_start.md)."
            )
        elif min(rewards) == max(rewards):
            advice = f"Every step has the mean reward {rewards[-1]:.3g}: check that the reward depends on the answer."
        else:
            advice = "Use harder or easier problems, larger groups, or a reward with more levels."
        yield "equal_rewards", f"{equal} {advice}"
    num_cut = _sum(latest, "truncated_turns")
    # The cut answers are those of trained episodes, which an asynchronous run has drawn in other steps.
    num_turns = sum((step.get("trained_turns_mean") or 0) * (step.get("trained_episodes") or 0) for step in latest)
    if num_cut * 2 >= num_turns > 0:
        cut = f"{num_cut:.0f} of {num_turns:.0f} answers {over} were cut at their limit of tokens: raise max_tokens."
        yield "cut_answers", cut


def _is_rising(steps: Sequence[Metrics]) -> bool:
    """Return whether the mean reward of the latest steps is above that of the first ones, by a share of its range."""
    rewards = [float(step["reward"]) for step in steps]
    num = min(NUM_JUDGED_STEPS, len(rewards) // 2)
    if num == 0:
        return False
    first, last = sum(rewards[:num]) / num, sum(rewards[-num:]) / num
    return last - first > _RISE * max(abs(max(rewards)), abs(min(rewards)))


def _sum(steps: Sequence[Metrics], key: str) -> float:
    return float(sum(step.get(key) or 0 for step in steps))
