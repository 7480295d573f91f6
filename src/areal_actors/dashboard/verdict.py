"""The sentences that say why a run does not learn, from the metrics of its steps.

The causes are those that the metrics show beyond doubt: episodes that fail, rewards that do not differ, tokens that are
not trained, a policy that collapsed. If several hold, all are named. A run whose reward rises has no verdict, unless
one of its sources has one. Fewer than ``NUM_JUDGED_STEPS`` steps have one only if nothing was trained in any of them: a
run that learns begins with many equal groups and answers that are cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

CAUSES = ("failed_episodes", "greedy_tokens", "collapse", "equal_rewards", "source")
"""The causes that a verdict can have, by name."""
NUM_JUDGED_STEPS = 8
"""A verdict is about this many latest steps."""
_NUM_EARLY_STEPS = 3
"""Steps in which nothing was trained that are enough for a verdict. One or two may be bad luck."""
_RISE = 0.05
"""A mean reward that is higher than in the first steps by this share of its range rises."""
_FALL = 0.5
"""A mean reward that is lower than the best one by more than this share of it has fallen."""
_COLLAPSE = 0.1
"""The entropy of a policy that collapsed is below this share of that of the first steps."""

Metrics = Mapping[str, Any]


def find_verdict(steps: Sequence[Metrics]) -> str | None:
    """Return why the run of ``steps`` (metrics in order) does not learn; ``None`` if it learns or nothing is known."""
    # Several may hold, and each has its own remedy.
    found = " Also: ".join(find_causes(steps).values())
    # Answers that are cut are often why rewards are equal, but a run learns from them as well: they are no cause.
    return " Note: ".join(filter(None, (found, found and _find_cut(_judged(steps))))) or None


def find_note(steps: Sequence[Metrics]) -> str | None:
    """Return what may be wrong with a run that has no verdict and does not learn: that most answers are cut."""
    steps = _judged(steps)
    return None if len(steps) < NUM_JUDGED_STEPS or _is_rising(_rewarded(steps)) else _find_cut(steps)


def append_step(steps: tuple[Metrics, ...], step: Metrics) -> tuple[Metrics, ...]:
    """Append the metrics of a step; those of older ones are reduced to what the verdict on these steps needs."""
    if not _counts(step):
        return steps
    if len(steps) >= 2 * NUM_JUDGED_STEPS:
        middle = {"reward": steps[-NUM_JUDGED_STEPS].get("reward")}
        steps = (*steps[:-NUM_JUDGED_STEPS], middle, *steps[1 - NUM_JUDGED_STEPS :])
    return (*steps, step)


def find_causes(steps: Sequence[Metrics]) -> dict[str, str]:
    """Return the sentences of the verdict on ``steps`` by their cause, one of ``CAUSES``."""
    rewards = [float(step["reward"]) for step in steps if _counts(step) and step.get("reward") is not None]
    steps = _judged(steps)
    if len(steps) < _NUM_EARLY_STEPS:
        return {}
    is_early = len(steps) < NUM_JUDGED_STEPS
    # A half is beyond doubt in enough steps, and everything in fewer.
    share = 1 if is_early else 2
    latest = steps[-NUM_JUDGED_STEPS:]
    over = f"in the last {len(latest)} steps"
    # A workflow rejects episodes on purpose; these are among the failed ones.
    num_episodes, num_failed = _sum(latest, "episodes"), _sum(latest, "failed_episodes")
    num_failed -= _sum(latest, "rejected_episodes")
    num_trained, num_greedy = _sum(latest, "trained_tokens"), _sum(latest, "greedy_tokens")
    causes = {}
    if num_failed * share >= num_episodes > 0:
        causes["failed_episodes"] = (
            f"{num_failed:.0f} of {num_episodes:.0f} episodes failed {over}; failures.jsonl has their tracebacks."
        )
    if num_greedy * share >= num_greedy + num_trained > 0:
        causes["greedy_tokens"] = (
            f"{num_greedy:.0f} of {num_greedy + num_trained:.0f} tokens {over} were sampled at temperature 0, and such "
            "tokens are not trained: give requests a temperature, or set rollout.sampling.temperature: override."
        )
    rewarded = _rewarded(steps)
    if rewarded and not _is_rising(rewarded):
        causes |= _find_collapse(rewarded, best=max(rewards)) or _find_equal_rewards(rewarded, over, share)
    if not causes and not is_early and (found := _find_source_without_signal(steps)) is not None:
        causes["source"] = found
    return causes


def _counts(step: Metrics) -> bool:
    # A source of which every episode failed has no reward.
    return step.get("phase", "rl") != "sft" and bool(step.get("reward") is not None or step.get("failed_episodes"))


def _judged(steps: Sequence[Metrics]) -> Sequence[Metrics]:
    """Return the first and the latest steps that count: to look at the sources of 5,000 steps takes 30 ms."""
    steps = list(filter(_counts, steps))
    is_long = len(steps) > 2 * NUM_JUDGED_STEPS
    return [*steps[:NUM_JUDGED_STEPS], *steps[-NUM_JUDGED_STEPS:]] if is_long else steps


def _rewarded(steps: Sequence[Metrics]) -> Sequence[Metrics]:
    return [step for step in steps if step.get("reward") is not None]


def _find_source_without_signal(steps: Sequence[Metrics]) -> str | None:
    """Return the verdict on the first source that has one: the reward of a run can rise without that of each source."""
    # A step may have a single group of a source, so this needs NUM_JUDGED_STEPS.
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


def _find_collapse(rewarded: Sequence[Metrics], *, best: float) -> dict[str, str]:
    """Return the verdict on a policy that has one answer to everything, and is rewarded less for it than before."""
    entropies = [step["entropy"] for step in rewarded if step.get("entropy") is not None]
    if not entropies:
        return {}
    latest = rewarded[-NUM_JUDGED_STEPS:]
    last, last_entropy = _sum(latest, "reward") / len(latest), entropies[-1]
    first_entropy = max(entropies[:NUM_JUDGED_STEPS])
    has_fallen = best - last > _FALL * max(abs(best), abs(last))
    if not has_fallen or last_entropy >= _COLLAPSE * first_entropy:
        return {}
    return {
        "collapse": f"The policy collapsed: the reward fell from {best:.3g} at its best to {last:.3g}, and the entropy "
        f"from {first_entropy:.2g} to {last_entropy:.2g}. Lower trainer.optimizer.learning_rate, and begin again."
    }


def _find_equal_rewards(rewarded: Sequence[Metrics], over: str, share: int) -> dict[str, str]:
    latest = rewarded[-NUM_JUDGED_STEPS:]
    num_groups, num_equal = _sum(latest, "groups"), _sum(latest, "zero_variance_groups")
    if not num_equal * share >= num_groups > 0:
        return {}
    rewards = [step["reward"] for step in latest]
    if all(reward == 0 for reward in rewards):
        advice = (
            "No episode was rewarded: use easier problems, or show the model answers first (docs/guides/warm_start.md)."
        )
    elif min(rewards) == max(rewards):
        advice = f"Every step has the mean reward {rewards[-1]:.3g}: check that the reward depends on the answer."
    else:
        advice = "Use harder or easier problems, larger groups, or a reward with more levels."
    equal = f"{num_equal:.0f} of {num_groups:.0f} groups had equal rewards {over}: nothing to learn from them."
    return {"equal_rewards": f"{equal} {advice}"}


def _find_cut(steps: Sequence[Metrics]) -> str | None:
    latest = _rewarded(steps)[-NUM_JUDGED_STEPS:]
    num_cut = _sum(latest, "truncated_turns")
    # The cut answers are those of trained episodes, which an asynchronous run has drawn in other steps.
    num_turns = sum((step.get("trained_turns_mean") or 0) * (step.get("trained_episodes") or 0) for step in latest)
    if not num_cut * 2 >= num_turns > 0:
        return None
    return (
        f"{num_cut:.0f} of {num_turns:.0f} answers in the last {len(latest)} steps were cut at their limit of tokens; "
        "if they should end by themselves, raise max_tokens."
    )


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
