"""News for the reporter of a run."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import field, frozen

from areal_actors.domain import Episode, Problem, RunStatus, SessionRecord, TrainedRow
from areal_actors.kernel import Message


class Progress:
    """Address of the reporter: metrics, dumps, display."""


@frozen(kw_only=True)
class PhaseChanged(Message[Progress, None]):
    """News: the run entered a phase that may take long (loading, evaluating, saving …)."""

    phase: str
    detail: str = ""


@frozen(kw_only=True)
class RunEnded(Message[Progress, None]):
    """News: the run is over, as its record says; also for an attempt that failed and may be repeated.

    It is the last message. A reporter that is closed without it belongs to a run that failed.
    """

    status: RunStatus


@frozen(kw_only=True)
class ServiceOpened(Message[Progress, None]):
    """News: a service answers agents at ``url``. ``export`` is the shell command with which an agent finds it."""

    url: str
    export: str


@frozen(kw_only=True)
class SessionsCounted(Message[Progress, None]):
    """News: a session of an external agent began or ended, and now ``num_live`` of them have not ended."""

    num_live: int


@frozen(kw_only=True)
class EpisodeFinished(Message[Progress, None]):
    """News: an episode is over. With ``is_repeated``, an earlier process that was killed may have reported it."""

    episode: Episode
    problem: Problem
    version: int
    is_eval: bool = False
    is_repeated: bool = False


@frozen(kw_only=True)
class SessionArchived(Message[Progress, None]):
    """News: the whole tree of a session, for dumps and the run report."""

    record: SessionRecord
    episode: Episode
    problem: Problem
    is_eval: bool = False


@frozen(kw_only=True)
class StepFinished(Message[Progress, None]):
    """News: a training step, as one flat record of numbers (see ``docs/reference/metrics.md`` for every key).

    ``phase`` is the name of the phase that the step belongs to.
    """

    step: int
    phase: str = "rl"
    metrics: Mapping[str, float | int | None]


@frozen(kw_only=True)
class RowsTrained(Message[Progress, None]):
    """News: the rows of a training step. Sent before the ``StepFinished`` of the same step, if rows are dumped."""

    step: int
    rows: tuple[TrainedRow, ...]


@frozen(kw_only=True)
class GroupsTrained(Message[Progress, None]):
    """News: the problems of all groups of a training step. Sent before the ``StepFinished`` of the same step."""

    step: int
    tasks: tuple[str, ...] = ()
    advantages: Mapping[str, tuple[tuple[float, int], ...]] = field(factory=dict, repr=False)
    """The advantages of the sampled tokens of each turn, by the id of its interaction: runs of ``(advantage, count)``.

    Tokens off the loss mask have 0. Turns beyond a limit on the size of the message are left out.
    """


@frozen(kw_only=True)
class EvaluationFinished(Message[Progress, None]):
    """News: the mean reward on held-out problems under ``version``."""

    version: int
    reward: float
    num_episodes: int
    num_failed: int
    seconds: float
    logged: Mapping[str, float] = field(factory=dict)
    """The means of the numbers that agents logged, as ``eval-rollout/<name>``, and how many episodes logged each.

    It also has the numbers of each set of problems, as ``eval/<set>/<name>``.
    """
