"""The agent of a run, where its configuration wants it: in this event loop, in child processes, or as a command."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

from areal_actors.config import AgentMode, RolloutConfig
from areal_actors.errors import WorkflowError
from areal_actors.workflows import (
    Agent,
    AgentPool,
    CommandAgent,
    CommandConfig,
    PoolConfig,
    RolloutWorkflow,
    create_handover,
    placeholder_keys,
    resolve_workflow,
)

__all__ = ["prepare_agent"]


def prepare_agent(
    rollout: RolloutConfig, *, workflow: Any = None, workflow_kwargs: Mapping[str, Any] | None = None, logs: Path
) -> AbstractAsyncContextManager[Agent | RolloutWorkflow]:
    """What gives the agent when it is entered, and ends its processes when it is left.

    ``workflow`` with ``workflow_kwargs`` takes the place of what the configuration names. Raises ``WorkflowError`` for
    what can be seen to be wrong without a process; entering raises it for the rest.
    """
    target = rollout.workflow if workflow is None else workflow
    kwargs = rollout.workflow_kwargs if workflow is None else workflow_kwargs
    pool = PoolConfig(
        num_workers=rollout.openai.subproc_max_workers,
        start_timeout_seconds=rollout.openai.subproc_start_timeout_seconds,
        logs=logs,
    )
    if isinstance(target, CommandConfig):
        if kwargs:
            raise WorkflowError(
                f"workflow_kwargs {sorted(kwargs)} were given with a command; make them arguments of it."
            )
        return CommandAgent.open(target, pool)
    if rollout.openai.mode is AgentMode.SUBPROCESS:
        return AgentPool.open(create_handover(target, kwargs), pool)
    return _open_inline(resolve_workflow(target, workflow_kwargs=kwargs))


@asynccontextmanager
async def _open_inline(agent: Agent | RolloutWorkflow) -> AsyncIterator[Agent | RolloutWorkflow]:
    with placeholder_keys():
        yield agent
