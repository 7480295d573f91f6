"""The metrics of steps and evaluations: flat records of numbers by name, which ``docs/reference/metrics.md`` explains.

Nothing here imports torch, since the exporter measures the lengths of sampled episodes with the same functions, so that
they can be compared with those of the trained ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import isfinite
from typing import TYPE_CHECKING

import numpy as np

from areal_actors.domain import (
    EVAL_SCOPE,
    SCOPE,
    Episode,
    Group,
    PoolSizes,
    UntrainedReason,
    average_numbers,
    find_truncated,
    summarize_outcomes,
    to_outcome,
)
from areal_actors.messages import EvaluationFinished, Lease, UntrainedGroup

if TYPE_CHECKING:
    from areal_actors.training.statistics import StepStatistics


def measure_episodes(groups: Iterable[Group]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the sampled tokens and the turns of all successful episodes. A failed episode has no known length."""
    episodes = [episode for group in groups for episode in group.episodes if episode.failure is None]
    tokens = tuple(sum(row.num_trained_tokens for row in episode.trajectories) for episode in episodes)
    return tokens, tuple(episode.num_turns for episode in episodes)


def count_truncated(groups: Iterable[Group]) -> tuple[int, int]:
    """Return how many answers were cut at their token limit, and how many trained tokens they have."""
    found = {
        (row.session, interaction): num_tokens
        for group in groups
        for episode in group.episodes
        for row in episode.trajectories
        for interaction, num_tokens in find_truncated(row).items()
        if num_tokens
    }
    return len(found), sum(found.values())


_UNTRAINED = {
    None: "were sampled at temperature 0 (give requests a temperature, or set rollout.sampling.temperature)",
    UntrainedReason.CANCELLED: "are of requests that were cancelled",
    UntrainedReason.FAILED: "are of requests that failed",
    UntrainedReason.NOT_STORED: "came with store: false (change that in the agent, or set proxy.honour_store)",
    UntrainedReason.NO_REWARD: "are in conversations without a reward (rollout.openai.unrewarded is skip)",
    UntrainedReason.TOO_LONG: "are in turns that are longer than max_tokens of the export",
    UntrainedReason.TRUNCATED: "were cut at their limit (raise max_tokens of the requests)",
    UntrainedReason.OTHER_ROLE: "are of roles that are not in rollout.train_roles",
}


def describe_untrained(episodes: Iterable[Episode]) -> str | None:
    """Return how many tokens are not trained, and why, if they are more than half of those that were sampled."""
    counts: Counter[UntrainedReason | None] = Counter()
    num_sampled = 0
    for episode in episodes:
        for row in episode.trajectories:
            num_sampled += row.num_trained_tokens
            for index, info in enumerate(row.turn_infos):
                if info.sampling is not None and info.sampling.is_greedy:
                    counts[None] += int(((row.turns == index) & (row.loss_mask == 1)).sum())
        for one in episode.untrained:
            num_sampled += one.num_tokens
            counts[one.reason] += one.num_tokens
    num_untrained = counts.total()
    if num_untrained * 2 <= num_sampled:
        return None
    reasons = "; ".join(f"{num} {_UNTRAINED[reason]}" for reason, num in counts.most_common() if num)
    return f"{num_untrained} of {num_sampled} sampled tokens are not trained: {reasons}."


def describe_lengths(name: str, tokens: Sequence[int], turns: Sequence[int]) -> dict[str, float | int | None]:
    """Return metrics of lengths, with keys that begin with ``name``. The mean of no episodes is ``None``."""
    metrics: dict[str, float | int | None] = {f"{name}_episodes": len(tokens)}
    for unit, values in (("tokens", tokens), ("turns", turns)):
        metrics[f"{name}_{unit}_mean"] = float(np.mean(values)) if len(values) else None
    metrics[f"{name}_tokens_p90"] = float(np.quantile(tokens, 0.9)) if len(tokens) else None
    return metrics


def describe_sources(lease: Lease) -> dict[str, float | int | None]:
    """Return the metrics of each source of problems, ``source/<name>/<key>``; none for problems without sources.

    Episodes of untrained groups count as well: a source that teaches nothing may have no other groups.
    """
    metrics: dict[str, float | int | None] = {}
    others = (*lease.drawn.replaced, *lease.drawn.failed)
    names = {group.problem.source for group in lease.groups} | {group.source for group in others}
    for source in sorted(names - {""}):
        found = [group for group in lease.groups if group.problem.source == source]
        untrained = [group for group in others if group.source == source]
        replaced = [group for group in lease.drawn.replaced if group.source == source]
        failed = [group for group in lease.drawn.failed if group.source == source]
        episodes = [episode for group in found for episode in group.episodes]
        rewards = [[episode.reward for episode in group.episodes if episode.failure is None] for group in found]
        succeeded = [reward for group in (*rewards, *(group.rewards for group in replaced)) for reward in group]
        tokens, turns = measure_episodes(found)
        numbers: dict[str, float | int | None] = {
            "reward": float(np.mean(succeeded)) if succeeded else None,
            "groups": len(found),
            # A group of one episode is compared with other groups, if with any.
            "equal_groups": sum(len(each) != 1 and len(set(each)) < 2 for each in rewards),  # noqa: PLR2004 - all equal
            "replaced_groups": len(replaced),
            **_count_failed_groups(failed),
            "episodes": len(episodes) + sum(group.num_episodes for group in untrained),
            "failed_episodes": len(episodes) - sum(map(len, rewards)) + sum(group.num_failed for group in untrained),
            "rejected_episodes": sum(episode.is_rejected for episode in episodes)
            + sum(group.num_rejected for group in untrained),
            "limited_episodes": sum(episode.limit is not None for episode in episodes),
            "tokens_mean": float(np.mean(tokens)) if tokens else None,
            "turns_mean": float(np.mean(turns)) if turns else None,
            "seconds_mean": float(np.mean([episode.seconds for episode in episodes])) if episodes else None,
        }
        if source in lease.drawn.pools:
            numbers |= _describe_pools([lease.drawn.pools[source]])
        metrics |= {f"source/{source}/{key}": value for key, value in numbers.items()}
    return metrics


def _describe_pools(pools: Sequence[PoolSizes]) -> dict[str, float | int | None]:
    """Return the numbers of problems by difficulty, and the mean solve rate of those that were run."""
    num_run = sum(each.num_run for each in pools)
    return {
        "easy_problems": sum(each.easy for each in pools) if pools else None,
        "hard_problems": sum(each.hard for each in pools) if pools else None,
        "solve_rate": sum((each.solve_rate or 0.0) * each.num_run for each in pools) / num_run if num_run else None,
    }


def _count_failed_groups(failed: Iterable[UntrainedGroup]) -> dict[str, int]:
    """Return the numbers of groups that failed, and of those that were rejected on purpose."""
    kinds = [group.is_rejected for group in failed if group.num_failed]
    return {"failed_groups": kinds.count(False), "rejected_groups": kinds.count(True)}


def mean_reward(statistics: StepStatistics, lease: Lease) -> float:
    """Return the mean reward over the step's episodes and those that were replaced.

    Without the replaced ones, the mean would never be near 0 or 1.
    """
    data, replaced = statistics.data, [reward for group in lease.drawn.replaced for reward in group.rewards]
    if not replaced:
        return data.reward_mean
    num_trained = data.num_episodes - data.num_failed_episodes
    total = data.reward_mean * num_trained + sum(replaced)
    return total / (num_trained + len(replaced))


_STEP_KEYS = (
    *("loss", "grad_norm", "learning_rate", "num_updates", "entropy", "reference_kl", "teacher_kl", "clip_fraction"),
    *("importance_mean", "importance_max", "out_of_range_fraction", "behaviour_gap_mean", "behaviour_gap_max"),
    "outside_fraction",
)
_DATA_KEYS = ("penalty_mean", "staleness_mean", "staleness_max", "temperature_mean")
"""The fields of the statistics that are metrics of the same name."""


def step_metrics(statistics: StepStatistics, lease: Lease) -> dict[str, float | int | None]:
    """Return the metrics of a step on sampled episodes."""
    data = statistics.data
    episodes = [episode for group in lease.groups for episode in group.episodes]
    metrics: dict[str, float | int | None] = {
        "step": statistics.version,
        "version": statistics.version,
        "kl": statistics.approximate_kl,
        **{name: getattr(statistics, name) for name in _STEP_KEYS},
        **{name: getattr(data, name) for name in _DATA_KEYS},
        "tokens": data.num_tokens,
        "trained_tokens": data.num_trained_tokens,
        "packed_tokens": statistics.num_packed_tokens,
        "greedy_tokens": data.num_greedy_tokens,
        "adjusted_tokens": data.num_adjusted_tokens,
        # Also of groups in which every episode failed, of which the trainer receives nothing.
        "episodes": data.num_episodes + sum(group.num_episodes for group in lease.drawn.failed),
        "failed_episodes": data.num_failed_episodes + sum(group.num_failed for group in lease.drawn.failed),
        "rejected_episodes": data.num_rejected_episodes + sum(group.num_rejected for group in lease.drawn.failed),
        "limited_episodes": sum(episode.limit is not None for episode in episodes),
        "groups": len(lease.groups),
        "zero_variance_groups": data.num_zero_variance_groups,
        "dropped_groups": lease.drawn.dropped,
        "requeued_groups": lease.drawn.requeued,
        "replaced_groups": len(lease.drawn.replaced),
        **_count_failed_groups(lease.drawn.failed),
    }
    metrics["truncated_turns"], metrics["truncated_tokens"] = count_truncated(lease.groups)
    metrics |= _describe_pools(tuple(lease.drawn.pools.values()))
    metrics["held_seconds"] = lease.drawn.held_seconds
    metrics |= describe_lengths("drawn", lease.drawn.tokens, lease.drawn.turns)
    metrics |= describe_lengths("trained", *measure_episodes(lease.groups))
    metrics |= average_numbers([episode.logged for episode in episodes], scope=SCOPE)
    metrics |= describe_sources(lease)
    metrics |= {f"custom/{name}": value for name, value in statistics.custom.items()}
    # A step without any advantage computed nothing, so values such as its entropy are NaN; report them as missing.
    return {key: value if value is None or isfinite(value) else None for key, value in metrics.items()}


_SUPERVISED_KEYS = (
    *("step", "version", "loss", "entropy", "tokens", "trained_tokens", "packed_tokens", "grad_norm", "learning_rate"),
    *("num_updates", "trained_episodes", "trained_tokens_mean", "trained_tokens_p90"),
)
"""The metrics of a step whose tokens were not sampled."""


def supervised_metrics(statistics: StepStatistics, lease: Lease) -> dict[str, float | int | None]:
    """Return the metrics of a step on given conversations; those of a sampling policy are missing."""
    metrics = step_metrics(statistics, lease)
    is_known = {key: key in _SUPERVISED_KEYS or key.startswith("custom/") for key in metrics}
    return {key: value if is_known[key] else None for key, value in metrics.items()}


def describe_evaluation(
    groups: tuple[Group, ...], *, version: int, seconds: float, solved_reward: float = 1.0
) -> EvaluationFinished:
    """Return the report of an evaluation of ``version``, in which a failed episode counts as 0.

    With several samples per problem, or named sets, it has the numbers of ``domain.evaluation`` for each set.
    """
    episodes = [episode for group in groups for episode in group.episodes]
    outcomes = [to_outcome(group.problem, episode) for group in groups for episode in group.episodes]
    numbers: dict[str, float] = {}
    for found in summarize_outcomes(outcomes, solved_reward=solved_reward):
        scope = f"eval/{found.source}" if found.source else "eval"
        if found.source:
            numbers[f"{scope}/reward"] = found.mean.value
        if found.source or len(found.passes) > 1:
            numbers |= {f"{scope}/pass_at_{k}": estimate.value for k, estimate in found.passes.items()}
            if found.mean.standard_error is not None:
                numbers[f"{scope}/reward_standard_error"] = found.mean.standard_error
    return EvaluationFinished(
        version=version,
        reward=sum(episode.reward for episode in episodes) / len(episodes),
        num_episodes=len(episodes),
        num_failed=sum(episode.failure is not None for episode in episodes),
        seconds=seconds,
        logged=numbers | average_numbers((episode.logged for episode in episodes), scope=EVAL_SCOPE),
    )
