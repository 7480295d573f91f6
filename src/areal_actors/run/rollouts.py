"""Rollouts: the runner of agents, and rollouts submitted outside training to a model that is already served.

Results of submitted rollouts can be awaited in any order.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
from anyio.abc import TaskGroup

from areal_actors.cache import to_tensors
from areal_actors.client import create_agent_http_client
from areal_actors.domain import Group, Problem
from areal_actors.errors import ArealError, ConfigError, EpisodeError
from areal_actors.kernel import ActorSystem, Ref
from areal_actors.lib.task_groups import open_tasks
from areal_actors.messages import Endpoint, Generation, RunProblem
from areal_actors.rendering import Renderer
from areal_actors.rollouts.runner import Peers, RolloutRunner, RolloutsConfig
from areal_actors.workflows import (
    EpisodeEngine,
    GenerationConfig,
    GroupedRolloutWorkflow,
    direct_connections,
    placeholder_keys,
    resolve_workflow,
)

_STOP_SECONDS = 5.0


class RolloutHandle:
    """A submitted rollout. It can be awaited repeatedly and from several tasks."""

    def __init__(self, position: int) -> None:
        self.position = position
        """Index of this rollout among those of its engine; the workflow reads it as ``task_id``."""
        self._ended = anyio.Event()
        self._scope = anyio.CancelScope()
        self._group: Group | None = None
        self._failure: ArealError | None = None

    def __await__(self) -> Generator[Any, None, dict[str, Any] | None]:
        """Await ``result``."""
        return self.result().__await__()

    @property
    def is_over(self) -> bool:
        """Return whether the result is available without waiting."""
        return self._ended.is_set()

    async def result(self) -> dict[str, Any] | None:
        """Return all rows as tensors, padded to the longest row, or ``None`` if all episodes were rejected.

        ``cache.arrays`` names the tensors.

        Raises:
            EpisodeError: no episode succeeded and not all were rejected, or the rollout was cancelled.
        """
        episodes = [episode for episode in (await self.group()).episodes if episode.failure is None]
        return to_tensors([row for episode in episodes for row in episode.trajectories]) if episodes else None

    async def group(self) -> Group:
        """Return the episodes with their rewards and failure reasons. Raises the same errors as ``result``."""
        await self._ended.wait()
        if self._group is None:
            raise self._failure or EpisodeError(f"Rollout {self.position} was cancelled before it was over.")
        episodes = self._group.episodes
        # A rejection is a decision of the workflow: a group of which all were rejected has not failed.
        reasons = [episode.failure for episode in episodes if episode.failure is not None and not episode.is_rejected]
        if reasons and all(episode.failure is not None for episode in episodes):
            raise EpisodeError(reasons[0])
        return self._group

    def cancel(self) -> None:
        """Cancel the rollout and its pending engine requests. Does nothing if the rollout is over."""
        self._scope.cancel()

    async def run(self, system: ActorSystem, runner: RolloutRunner, wanted: RunProblem) -> None:
        """Run the rollout. Errors are stored and raised to the tasks that await the result."""
        try:
            with self._scope:
                rollouts = await system.spawn(runner, name=f"rollout-by-hand-{self.position}")
                try:
                    self._group = await rollouts.ask(wanted)
                finally:
                    # Shielded, because the scope may be cancelled already and the actor must still stop; bounded,
                    # because the runner may be unresponsive.
                    with anyio.move_on_after(_STOP_SECONDS, shield=True):
                        await rollouts.stop(grace=0)
        except ArealError as error:
            self._failure = error
        finally:
            self._ended.set()


class RolloutEngine(EpisodeEngine):
    """An engine that samples from the model and runs workflows on request. Created by ``open_rollouts``."""

    def __init__(
        self,
        generation: Ref[Generation],
        renderer: Renderer,
        *,
        system: ActorSystem,
        tasks: TaskGroup,
        create_runner: Callable[..., RolloutRunner],
        gconfig: GenerationConfig | None,
    ) -> None:
        super().__init__(generation, renderer, gconfig=gconfig)
        self._system = system
        self._tasks = tasks
        self._create_runner = create_runner
        self._num_submitted = 0

    def submit(
        self,
        data: Mapping[str, Any],
        workflow: Any,
        workflow_kwargs: Mapping[str, Any] | None = None,
        group_size: int = 1,
    ) -> RolloutHandle:
        """Start ``workflow`` on one problem, with ``group_size`` concurrent episodes, and return without waiting.

        A ``GroupedRolloutWorkflow`` runs all its members in each of them.

        Args:
            data: the problem.
            workflow: an agent or a rollout workflow: an instance, a class, or a dotted name.
            workflow_kwargs: arguments of its class.
            group_size: number of episodes; one that fails or is rejected does not affect the others.

        Raises:
            WorkflowError: the workflow cannot be found.
            ConfigError: ``group_size`` is less than 1.
        """
        if group_size < 1:
            raise ConfigError(f"group_size must be at least 1, not {group_size}.")
        resolved = resolve_workflow(workflow, workflow_kwargs=workflow_kwargs)
        if isinstance(resolved, GroupedRolloutWorkflow):
            # The runner runs its members as separate episodes.
            group_size *= resolved.group_size
        runner = self._create_runner(agents={"": resolved}, engine=self, seed=self.key.seed)
        handle = RolloutHandle(self._num_submitted)
        self._num_submitted += 1
        problem = Problem(position=handle.position, data=data)
        wanted = RunProblem(problem=problem, num_episodes=group_size)
        self._tasks.start_soon(handle.run, self._system, runner, wanted)
        return handle


@asynccontextmanager
async def open_rollouts(
    system: ActorSystem,
    generation: Ref[Generation],
    renderer: Renderer,
    *,
    peers: Peers,
    endpoint: Endpoint,
    gconfig: GenerationConfig | None = None,
    config: RolloutsConfig | None = None,
) -> AsyncIterator[RolloutEngine]:
    """Open an engine for rollouts that are submitted to it. Leaving the block cancels the rollouts that still run."""
    async with create_agent_http_client() as http_client, open_tasks() as tasks:
        create = partial(
            RolloutRunner,
            peers=peers,
            endpoint=endpoint,
            http_client=http_client,
            configs={"": config or RolloutsConfig()},
        )
        with placeholder_keys(), direct_connections():
            yield RolloutEngine(generation, renderer, system=system, tasks=tasks, create_runner=create, gconfig=gconfig)
            tasks.cancel_scope.cancel()
