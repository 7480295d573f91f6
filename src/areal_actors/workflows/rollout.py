"""Rollout workflows: an episode in the hands of its author, from the prompt's ids to the tensors that are trained.

An agent (``agents``) is easier and is to be preferred: it only talks to a model. A ``RolloutWorkflow`` is given the
engine itself and returns what is to be trained. What becomes of that is ``results``; how episodes are run,
``actors/rollouts``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

import anyio
from attrs import evolve

from areal_actors.cache import pad_together
from areal_actors.errors import ConfigError, EpisodeError
from areal_actors.telemetry import get_logger
from areal_actors.workflows import context as workflow_context
from areal_actors.workflows.agents import describe_error
from areal_actors.workflows.engine import EpisodeEngine
from areal_actors.workflows.interactions import InteractionWithTokenLogpReward

__all__ = ["GroupedRolloutWorkflow", "RolloutResult", "RolloutWorkflow"]

_log = get_logger(__name__)

RolloutResult = Mapping[str, Any] | None
"""Tensors by name, interactions by completion id, or ``None``: the episode is rejected."""


class RolloutWorkflow(ABC):
    """One episode on a problem. Instances are shared by concurrent episodes: what belongs to one is a local variable.

    A subclass that has ``_run_one_episode(engine, data, rid)`` in the place of ``arun_episode`` is accepted, and so is
    its ``(completions, comp_data)``, of which the first counts. That form is deprecated.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        """Let the deprecated method stand for the present one."""
        super().__init_subclass__(**options)
        if "_run_one_episode" in vars(cls) and "arun_episode" not in vars(cls):
            cls.arun_episode = _arun_deprecated  # type: ignore[method-assign]

    @abstractmethod
    async def arun_episode(self, engine: EpisodeEngine, data: dict[str, Any]) -> RolloutResult:
        """One episode; ``engine`` samples for it, ``data`` is its problem.

        Returns tensors (``input_ids`` and ``attention_mask`` [batch, seq] at least), interactions as
        ``ArealOpenAI.export_interactions`` gives them, or ``None`` to reject the episode. What is raised fails it.
        """


async def _arun_deprecated(self: Any, engine: EpisodeEngine, data: dict[str, Any]) -> RolloutResult:
    returned = await self._run_one_episode(engine, data, uuid4().hex)
    result: RolloutResult = returned[0] if isinstance(returned, tuple) else returned
    return result


class GroupedRolloutWorkflow(RolloutWorkflow):
    """Runs ``workflow`` ``group_size`` times at once on each problem, and joins what comes of it.

    Tensors are joined along the batch and padded; interactions are merged into one dictionary. Rejected members are
    left out, and so are failed ones, which are logged; ``None`` if all were rejected. A training run takes the group
    apart: there each member is an episode of its own.
    """

    def __init__(self, workflow: RolloutWorkflow, group_size: int) -> None:
        if group_size < 1:
            raise ConfigError(f"group_size must be at least 1, not {group_size}.")
        self.workflow = workflow
        self.group_size = group_size

    async def arun_episode(self, engine: EpisodeEngine, data: dict[str, Any]) -> RolloutResult:
        """All members. Raises ``EpisodeError`` if every one of them failed, or if their results are of two kinds."""
        results: dict[int, RolloutResult] = {}
        failures: list[Exception] = []

        async def run(member: int) -> None:
            try:
                with workflow_context.enter(evolve(workflow_context.get(), member=member)):
                    results[member] = await self.workflow.arun_episode(engine.for_episode(member), dict(data))
            except Exception as error:  # noqa: BLE001 - whatever a member does, its siblings live on
                _log.warning("member_failed", member=member, reason=describe_error(error))
                failures.append(error)

        async with anyio.create_task_group() as members:
            for member in range(self.group_size):
                members.start_soon(run, member)
        if not results:
            raise EpisodeError(f"All {self.group_size} members failed; {describe_error(failures[0])}") from failures[0]
        return _join([results[member] for member in sorted(results)])


def _join(results: list[RolloutResult]) -> RolloutResult:
    valid = [result for result in results if result is not None]
    if not valid:
        return None
    are_interactions = {is_interactions(result) for result in valid}
    if len(are_interactions) > 1:
        raise EpisodeError("Some members of the group returned tensors and others interactions; return one kind.")
    if are_interactions == {True}:
        return {name: interaction for result in valid for name, interaction in result.items()}
    return pad_together(valid)


def is_interactions(result: Mapping[str, Any]) -> bool:
    """Whether the values are interactions. An empty dictionary is one of interactions: nothing was completed."""
    return all(isinstance(value, InteractionWithTokenLogpReward) for value in result.values())
