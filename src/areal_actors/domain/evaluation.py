"""The numbers of an evaluation: avg@k and pass@k of each set of problems, with confidence intervals.

Samples of one problem are alike, so problems are the clusters of every standard error (Miller, "Adding error bars to
evals", arXiv:2411.00640, section 2.2). An interval that treated k samples of a problem as k problems would be too
narrow by a factor of up to the square root of k.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from attrs import asdict, evolve, frozen

from areal_actors.domain.rows import Episode, Problem

_Z_95 = 1.959963984540054
"""The 97.5 % quantile of the normal distribution."""


@frozen(kw_only=True)
class Outcome:
    """The result of one evaluation episode: sample ``member`` of ``task``, a problem of the set ``source``."""

    source: str = ""
    task: str
    member: int
    reward: float
    has_failed: bool = False


def to_outcome(problem: Problem, episode: Episode) -> Outcome:
    """Return the outcome of an episode on ``problem``."""
    return Outcome(
        source=problem.source,
        task=problem.task,
        member=episode.member,
        reward=episode.reward,
        has_failed=episode.failure is not None,
    )


@frozen(kw_only=True)
class Estimate:
    """A mean over problems with its 95 % confidence interval.

    With fewer than two problems, the standard error and the interval are ``None``.
    """

    value: float
    standard_error: float | None = None
    low: float | None = None
    high: float | None = None


@frozen(kw_only=True)
class SetResult:
    """The numbers of one set of problems; failed episodes count as reward 0 in all but ``completed_mean``."""

    source: str
    num_problems: int
    num_episodes: int
    num_failed: int
    mean: Estimate
    """avg@k: the mean reward of all episodes."""
    completed_mean: Estimate | None
    """The mean reward of the episodes that did not fail; ``None`` if all failed."""
    passes: dict[int, Estimate]
    """pass@k by k: the probability that at least one of k samples of a problem is solved."""

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain data."""
        return asdict(self) | {"passes": {str(k): asdict(found) for k, found in self.passes.items()}}


def pass_at_k(num_samples: int, num_solved: int, k: int) -> float:
    """Return the unbiased estimate of pass@k for one problem, 1 - C(n - c, k) / C(n, k).

    It is that of Chen et al. 2021 (arXiv:2107.03374, equation 1). ``k`` is at most ``num_samples``.
    """
    return 1.0 - math.comb(num_samples - num_solved, k) / math.comb(num_samples, k)


def estimate_mean(clusters: Sequence[Sequence[float]]) -> Estimate:
    """Return the mean of all values with a standard error clustered by problem; each cluster has a value at least.

    The error is Miller's equation 4 with the factor G/(G - 1) for G clusters, without which it is too small for few
    problems; with one value in each cluster, it is the usual standard error of the mean.
    """
    num_values, num_clusters = sum(map(len, clusters)), len(clusters)
    mean = math.fsum(value for cluster in clusters for value in cluster) / num_values
    if num_clusters < 2:  # noqa: PLR2004 - a variance needs two
        return Estimate(value=mean)
    squares = math.fsum(math.fsum(value - mean for value in cluster) ** 2 for cluster in clusters)
    # Without the factor G / (G - 1), the error is too small for few problems.
    error = math.sqrt(squares * num_clusters / (num_clusters - 1)) / num_values
    return Estimate(value=mean, standard_error=error, low=mean - _Z_95 * error, high=mean + _Z_95 * error)


def estimate_runs(values: Sequence[float]) -> Estimate:
    """Return the mean of one value per run. Runs are few, so the interval is Student's."""
    found = estimate_mean([[value] for value in values])
    if found.standard_error is None:
        return found
    width = student_quantile(len(values) - 1) * found.standard_error
    return evolve(found, low=found.value - width, high=found.value + width)


def student_quantile(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's distribution with ``freedom`` degrees of freedom, at least 1.

    It bisects the closed forms of Abramowitz and Stegun, 26.7.3 and 26.7.4.
    """
    is_odd = freedom % 2
    low, high = 0.0, math.pi / 2
    while high - low > 1e-12:  # noqa: PLR2004 - radians
        angle = (low + high) / 2
        sine, cosine = math.sin(angle), math.cos(angle)
        term, total = (cosine, 0.0) if is_odd else (1.0, 0.0)
        for power in range(1 + is_odd, freedom, 2):
            total += term
            term *= cosine**2 * power / (power + 1)
        inside = (angle + sine * total) * 2 / math.pi if is_odd else sine * total
        low, high = (angle, high) if inside < 0.95 else (low, angle)  # noqa: PLR2004 - two-sided
    return math.tan((low + high) / 2) * math.sqrt(freedom)


def estimate_pass(clusters: Sequence[Sequence[bool]], k: int) -> Estimate:
    """Return the mean of pass@k over problems. Each has one value, so the error is that of independent values."""
    return estimate_mean([[pass_at_k(len(solved), sum(solved), k)] for solved in clusters])


def summarize_outcomes(outcomes: Iterable[Outcome], *, solved_reward: float) -> tuple[SetResult, ...]:
    """Return the result of each set, in order of first appearance.

    An episode is solved if it did not fail and its reward is at least ``solved_reward``. pass@k is reported for 1, the
    powers of two and the number of samples of the problem that has the fewest.
    """
    sets: dict[str, dict[str, list[Outcome]]] = {}
    for outcome in outcomes:
        sets.setdefault(outcome.source, {}).setdefault(outcome.task, []).append(outcome)
    results = []
    for source, tasks in sets.items():
        problems = list(tasks.values())
        episodes = [outcome for problem in problems for outcome in problem]
        rewards = [[0.0 if outcome.has_failed else outcome.reward for outcome in problem] for problem in problems]
        completed = [[outcome.reward for outcome in problem if not outcome.has_failed] for problem in problems]
        solved = [[not one.has_failed and one.reward >= solved_reward for one in problem] for problem in problems]
        most = min(map(len, problems))
        sizes = sorted({most, *(2**power for power in range(most.bit_length()))})
        results.append(
            SetResult(
                source=source,
                num_problems=len(problems),
                num_episodes=len(episodes),
                num_failed=sum(outcome.has_failed for outcome in episodes),
                mean=estimate_mean(rewards),
                completed_mean=estimate_mean([kept for kept in completed if kept]) if any(completed) else None,
                passes={k: estimate_pass(solved, k) for k in sizes if k <= most},
            )
        )
    return tuple(results)
