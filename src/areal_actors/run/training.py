"""A training run over a dataset: ``areal-actors train`` and ``Trainer(config).train(...)``.

``controller`` opens the roles of the run, in this process and in workers.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import anyio
from anyio import to_thread
from attrs import evolve

from areal_actors.config import RunConfig
from areal_actors.dashboard import RunDirectory, RunSummary, summarize_run
from areal_actors.dashboard.run_record import read_record
from areal_actors.domain import Role
from areal_actors.errors import ConfigError
from areal_actors.lib import loops
from areal_actors.lib.notebooks import Startable, format_table, require_no_event_loop
from areal_actors.lib.task_groups import open_tasks
from areal_actors.lib.telemetry import logging_to_file
from areal_actors.lib.tracing import open_tracing
from areal_actors.rollouts.runner import Agents
from areal_actors.run.advice import log_advice, warn_of_singletons
from areal_actors.run.checks import check_teacher, log_functions, require_config, try_functions
from areal_actors.run.controller import run_plan
from areal_actors.run.directory import directory_of, prepared_directory
from areal_actors.run.job import load_supervised, prepare_agents
from areal_actors.run.plan import RunPlan
from areal_actors.run.signals import RunControl


def train(config: RunConfig, *, resume: bool = False, run_dir: Path | None = None) -> RunSummary:
    """Run a configuration to its end in a new event loop. Raises the ``ArealError`` that ended the run."""
    return Trainer(config).train(resume=resume, run_dir=run_dir)


class Trainer:
    """The Python interface of training."""

    def __init__(self, config: RunConfig) -> None:
        self.config = require_config(config)

    def train(
        self,
        workflow: Any = None,
        workflow_kwargs: Mapping[str, Any] | None = None,
        *,
        resume: bool = False,
        run_dir: Path | None = None,
        backend: str = "asyncio",
    ) -> RunSummary:
        """Train in a new event loop (``backend``: ``asyncio``, as configured, or ``trio``), until the run ends.

        ``workflow`` replaces the agent of the configuration. It is an agent or a rollout workflow: an instance, a class
        with ``workflow_kwargs``, a reference as in the configuration, or a ``CommandConfig``.
        """

        async def main() -> RunSummary:
            return await self.run(workflow, workflow_kwargs, resume=resume, run_dir=run_dir, is_handling_signals=True)

        require_no_event_loop("train()", "run()")
        return loops.run(main, event_loop=self.config.event_loop, backend=backend)

    def open(
        self,
        workflow: Any = None,
        workflow_kwargs: Mapping[str, Any] | None = None,
        *,
        resume: bool = False,
        run_dir: Path | None = None,
    ) -> Startable[TrainingRun]:
        """Train in the background of the running event loop while a block runs, or over the cells of a notebook.

        ::

            training = Trainer(config).open(workflow=MyAgent())
            run = await training.start()
            await run.wait()
            await training.aclose()

        The context is entered when the run has begun: its settings are checked and its engines have weights. Leaving it
        before the run is over stops the run as Ctrl-C does: the step ends, a checkpoint is written, and ``resume``
        continues from it. An exception of the block cancels the run at once.

        Raises what ended the run: on entering if it did not begin, else from ``wait``, and on leaving if nothing
        waited.
        """

        async def train(control: RunControl) -> RunSummary:
            return await self.run(workflow, workflow_kwargs, resume=resume, run_dir=run_dir, control=control)

        return Startable(partial(TrainingRun(directory_of(self.config, run_dir)).hold, train))

    async def run(
        self,
        workflow: Any = None,
        workflow_kwargs: Mapping[str, Any] | None = None,
        *,
        resume: bool = False,
        run_dir: Path | None = None,
        is_handling_signals: bool = False,
        control: RunControl | None = None,
    ) -> RunSummary:
        """Train inside the running event loop. Signals are handled only if ``is_handling_signals`` is set.

        ``control`` tells its owner that the run has begun, and may stop it; ``open`` sets it.
        """
        config = self.config
        _check_complete(config, has_workflow=workflow is not None)
        # Before the run directory is prepared, so that no mistake in them moves an earlier run aside.
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
        plan = RunPlan(
            config=config,
            directory=directory,
            supervised=supervised,
            resume=resume,
            is_handling_signals=is_handling_signals,
            control=control,
        )
        return await run_in_directory(plan, opening)


async def run_in_directory(plan: RunPlan, opening: AbstractAsyncContextManager[Agents | None]) -> RunSummary:
    """Carry out ``plan`` with the agents that ``opening`` opens, in its directory, which is locked meanwhile.

    Raises the ``ArealError`` that ended the run, or that kept it from beginning.
    """
    config, directory, started = plan.config, plan.directory, time.monotonic()
    functions = await to_thread.run_sync(try_functions, config)
    with prepared_directory(config, directory, resume=plan.resume), logging_to_file(directory.log), open_tracing():
        log_functions(functions)
        log_advice(config)
        if plan.is_service:
            warn_of_singletons(config, {"rollout.group_size": config.rollout.group_size})
        if plan.is_service and plan.admin_key is None and directory.admin_key.exists():
            # Of before a restart: agents know it.
            plan = evolve(plan, admin_key=directory.admin_key.read_text(encoding="utf-8").strip())
        async with opening as agents:
            await run_plan(evolve(plan, agents=agents))
    return summarize_run(directory, seconds=time.monotonic() - started)


class TrainingRun:
    """A run that goes on in the background. Created by ``Trainer.open``."""

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory
        self._ended = anyio.Event()
        self._summary: RunSummary | None = None
        self._error: Exception | None = None
        self._is_reported = False

    @property
    def is_over(self) -> bool:
        """Whether the run has ended: finished, stopped or failed."""
        return self._ended.is_set()

    async def wait(self) -> RunSummary:
        """Wait for the end of the run and return its summary. Cancelling it leaves the run alone.

        Raises the ``ArealError`` that ended the run.
        """
        await self._ended.wait()
        if self._error is not None:
            self._is_reported = True
            raise self._error
        if self._summary is None:
            raise RuntimeError("the run was cancelled")
        return self._summary

    async def summarize(self) -> RunSummary:
        """Return the summary of the steps so far, or that of the ended run."""
        if self._summary is not None:
            return self._summary
        return await to_thread.run_sync(summarize_run, self.directory)

    def _repr_html_(self) -> str:
        """Return the state of the run and its summary as a table, for notebooks."""
        record = read_record(self.directory)
        status = {} if record is None else {"status": record.status.value, "reason": record.reason}
        return format_table({**status, **(self._summary or summarize_run(self.directory)).to_json()})

    @asynccontextmanager
    async def hold(self, train: Callable[[RunControl], Awaitable[RunSummary]]) -> AsyncIterator[TrainingRun]:
        """Run ``train`` while a block runs, which is entered when the run has begun. See ``Trainer.open``."""
        control = RunControl()
        async with open_tasks() as tasks:
            tasks.start_soon(self._train, train, control)
            await control.begun.wait()
            self._raise_unreported()
            yield self
            control.stopping.set()
            await self._ended.wait()
        self._raise_unreported()

    async def _train(self, train: Callable[[RunControl], Awaitable[RunSummary]], control: RunControl) -> None:
        try:
            self._summary = await train(control)
        except Exception as error:  # noqa: BLE001 - raised by wait, or when the context is left
            self._error = error
        finally:
            self._ended.set()
            control.begun.set()

    def _raise_unreported(self) -> None:
        if self._error is not None and not self._is_reported:
            raise self._error


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
