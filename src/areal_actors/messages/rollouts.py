"""Messages to the rollout runner: episodes outside the training data."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import field, frozen

from areal_actors.domain import Group, Problem
from areal_actors.kernel import Message


class Rollouts:
    """Address of the rollout runner, which runs agents in groups, each episode in a separate scope."""


@frozen(kw_only=True)
class Evaluate(Message[Rollouts, tuple[Group, ...]]):
    """Run the agent on every held-out problem with the weights now served, and return the groups.

    Each problem is run ``num_samples`` times, or as often as ``num_by_source`` says, except for the episodes in
    ``finished``, each named by its task and member; a group lacks these, and a problem whose episodes are all finished
    has no group.
    """

    version: int
    num_samples: int = 1
    num_by_source: Mapping[str, int] = field(factory=dict)
    finished: tuple[tuple[str, int], ...] = ()


@frozen(kw_only=True)
class RunProblem(Message[Rollouts, Group]):
    """Run one group manually, outside the training data and its capacity."""

    problem: Problem
    num_episodes: int = 1
