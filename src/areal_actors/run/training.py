"""A training run over a dataset: ``areal-actors train`` and ``Trainer(config).train(...)``.

``controller`` opens the roles of the run, in this process and in workers.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import anyio
from anyio import to_thread

from areal_actors.config import RunConfig
from areal_actors.dashboard import RunSummary, summarize_run
from areal_actors.domain import Role
from areal_actors.errors import ConfigError
from areal_actors.lib.notebooks import require_no_event_loop
from areal_actors.lib.telemetry import logging_to_file
from areal_actors.lib.tracing import open_tracing
from areal_actors.run.checks import check_teacher, log_functions, try_functions
from areal_actors.run.controller import run_plan
from areal_actors.run.job import directory_of, load_supervised, log_advice, prepare_agents, prepared_directory
from areal_actors.run.plan import RunPlan

__all__ = ["RunSummary", "Trainer", "train"]


def train(config: RunConfig, *, resume: bool = False, run_dir: Path | None = None) -> RunSummary:
    """Run a configuration to its end in a new event loop. Raises the ``ArealError`` that ended the run."""
    return Trainer(config).train(resume=resume, run_dir=run_dir)


class Trainer:
    """The Python interface of training."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    def train(
        self,
        workflow: Any = None,
        workflow_kwargs: Mapping[str, Any] | None = None,
        *,
        resume: bool = False,
        run_dir: Path | None = None,
        backend: str = "asyncio",
    ) -> RunSummary:
        """Train in a new event loop (``backend``: ``asyncio`` or ``trio``), blocking until the run ends.

        ``workflow`` replaces the agent of the configuration. It is an agent or a rollout workflow: an instance, a class
        with ``workflow_kwargs``, a reference as in the configuration, or a ``CommandConfig``.
        """

        async def main() -> RunSummary:
            return await self.run(workflow, workflow_kwargs, resume=resume, run_dir=run_dir, is_handling_signals=True)

        require_no_event_loop("train()", "run()")
        return anyio.run(main, backend=backend)

    async def run(
        self,
        workflow: Any = None,
        workflow_kwargs: Mapping[str, Any] | None = None,
        *,
        resume: bool = False,
        run_dir: Path | None = None,
        is_handling_signals: bool = False,
    ) -> RunSummary:
        """Train inside the running event loop. Signals are handled only if ``is_handling_signals`` is set."""
        config = self.config
        _check_complete(config, has_workflow=workflow is not None)
        # Before the run directory is prepared, so that no mistake in them moves an earlier run aside.
        functions = await to_thread.run_sync(try_functions, config)
        supervised = await to_thread.run_sync(load_supervised, config)
        await check_teacher(config)
        directory = directory_of(config, run_dir)
        is_rollout_apart = Role.ROLLOUT in config.scheduler.roles.placed
        if config.sources and workflow is not None:
            raise ConfigError("sources: each names its agent; leave workflow out, or the sources")
        if is_rollout_apart and workflow is not None:
            raise ConfigError(
                "scheduler.roles.rollout: the agent is run in another process, which cannot be given an object of this "
                "one; name it in rollout.workflow, or leave the role in the controller process"
            )
        prepare = partial(prepare_agents, workflow=workflow, workflow_kwargs=workflow_kwargs, logs=directory.agent_logs)
        has_agent = workflow is not None or any(rollout.workflow is not None for rollout in config.agents.values())
        opening = nullcontext() if is_rollout_apart or not has_agent else prepare(config)
        started = time.monotonic()
        with prepared_directory(config, directory, resume=resume), logging_to_file(directory.log), open_tracing():
            log_functions(functions)
            log_advice(config, is_service=False)
            async with opening as agents:
                plan = RunPlan(
                    config=config,
                    directory=directory,
                    agents=agents,
                    supervised=supervised,
                    resume=resume,
                    is_handling_signals=is_handling_signals,
                )
                await run_plan(plan)
        return summarize_run(directory, seconds=time.monotonic() - started)


def _check_complete(config: RunConfig, *, has_workflow: bool) -> None:
    """Raise ``ConfigError`` if a phase in which agents run lacks the dataset or the agent."""
    if not config.has_rollouts:
        return
    missing = []
    if not config.training_sets:
        missing.append("dataset is missing: the problems to train on; to train on what external agents do, use serve")
    missing += [
        f"{setting} is missing: the agent to train; to train agents that run elsewhere, use serve"
        for setting in config.missing_agents
        if not has_workflow
    ]
    if missing:
        raise ConfigError(tuple(missing))
