"""The Slurm scheduler: each worker is a job, and all jobs have ended when the controller leaves.

A job is recorded before it is submitted, so that jobs of a killed controller can be found: the next controller of the
same directory takes them over (``takeover``), or ``areal-actors slurm reap`` ends them. The queue is read once for all
jobs, off the event loop. While the cluster does not answer, jobs are neither given up nor submitted again.
"""

from __future__ import annotations

import os
import random
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import anyio
from anyio import to_thread
from attrs import evolve

from areal_actors.errors import SchedulerError
from areal_actors.lib.task_groups import open_tasks
from areal_actors.lib.telemetry import get_logger
from areal_actors.schedulers.base import WorkerSpec
from areal_actors.schedulers.bootstrap import Bootstrap, read_epoch
from areal_actors.schedulers.slurm.commands import (
    RETRY_SECONDS,
    Refused,
    SlurmCommands,
    Submitted,
    Unconfirmed,
    clean_environment,
)
from areal_actors.schedulers.slurm.files import JobRecord, SlurmFiles
from areal_actors.schedulers.slurm.placement import SlurmPlacement
from areal_actors.schedulers.slurm.queue import JobPhase
from areal_actors.schedulers.slurm.script import JobRequest, create_arguments, render_script
from areal_actors.schedulers.slurm.settings import SlurmConfig
from areal_actors.schedulers.slurm.takeover import KeptJob, Traits, cancel_records, take_over, traits_of

__all__ = ["SlurmScheduler"]

_log = get_logger(__name__)

_RUN_BYTES = 8
_STOP_GRACE_SECONDS = 0.0
_NUM_LOOKS = 2
"""A submission with an unknown outcome counts as rejected after this many queue listings without the job."""


class SlurmScheduler:
    """Places workers as Slurm jobs. Created by ``open``."""

    def __init__(
        self,
        config: SlurmConfig,
        *,
        files: SlurmFiles,
        logs: Path,
        commands: SlurmCommands,
        jitter: Callable[[], float],
        module: str,
    ) -> None:
        self._config, self._files, self._logs, self._commands = config, files, logs, commands
        self._jitter, self._module = jitter, module
        self._run = secrets.token_hex(_RUN_BYTES)
        self._placements: dict[str, SlurmPlacement] = {}
        self._kept: dict[str, KeptJob] = {}
        self._epoch = 0
        self._superseded: SchedulerError | None = None
        self._left: set[str] = set()
        self._reading = anyio.Lock()
        self._num_failed_reads = 0

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        config: SlurmConfig | None = None,
        *,
        directory: Path,
        environment: Mapping[str, str] | None = None,
        wanted: Sequence[WorkerSpec] = (),
        jitter: Callable[[], float] = random.random,
        module: str = "areal_actors.worker",
    ) -> AsyncIterator[SlurmScheduler]:
        """Open the scheduler as the only controller of a run directory while the block lasts.

        Args:
            config: settings of the cluster.
            directory: the run directory, on a file system that the controller shares with the nodes.
            environment: environment of the jobs, from which Slurm's variables are removed; by default that of this
                process.
            wanted: the workers that will be placed first. Jobs that a former controller has left for them are kept if
                they are the same; all its other jobs have ended when the block begins.
            jitter: returns a number from 0 to 1 that spreads the polls of many controllers over time.
            module: the module that a worker's interpreter runs.

        Raises:
            SchedulerError: Slurm is not installed or does not answer, another controller holds this directory, or jobs
                of an earlier one cannot be ended. During the block: a later controller has taken over the jobs.
        """
        config = config or SlurmConfig()
        commands = SlurmCommands(
            environment=dict(os.environ if environment is None else environment),
            timeout_seconds=config.command_timeout_seconds,
        )
        commands.check()
        await commands.check_answers()
        files = SlurmFiles(path=Path(await anyio.Path(directory).absolute()) / "slurm")
        await to_thread.run_sync(files.create)
        logs = files.path.parent / "logs" / "workers"
        await to_thread.run_sync(partial(logs.mkdir, parents=True, exist_ok=True))
        self = cls(config, files=files, logs=logs, commands=commands, jitter=jitter, module=module)
        # Lock first: two controllers must never take over the same jobs.
        with files.hold():
            self._epoch = await to_thread.run_sync(files.begin_epoch)
            traits = {spec.name: self._traits(spec) for spec in wanted} if config.rejoin_seconds else {}
            self._kept = await take_over(files, commands, config, epoch=self._epoch, wanted=traits)
            async with open_tasks() as tasks:
                tasks.start_soon(self._watch, tasks.cancel_scope)
                try:
                    yield self
                finally:
                    with anyio.CancelScope(shield=True):  # bounded by cancel_timeout_seconds
                        await self._end_kept(*self._kept)
                tasks.cancel_scope.cancel()
            if self._superseded is not None:
                raise self._superseded

    @property
    def name(self) -> str:
        """Return ``slurm``."""
        return "slurm"

    @property
    def num_failed_reads(self) -> int:
        """Return how often the queue could not be read."""
        return self._num_failed_reads

    def check(self, name: str, *wanted: WorkerSpec) -> None:
        """Do nothing: jobs wait in the queue of the cluster until it has room."""

    @asynccontextmanager
    async def place(self, spec: WorkerSpec) -> AsyncIterator[SlurmPlacement]:
        """Submit a job for a worker for the duration of the block. When the block exits, the job has ended.

        Raises:
            SchedulerError: the cluster rejects the job or does not answer; or, at the end, the job may still be
                running.
        """
        # Names of jobs consist of worker and incarnation, and must be unique.
        if any((one.spec.name, one.spec.life) == (spec.name, spec.life) for one in self._placements.values()):
            raise SchedulerError(f"{spec.name} has been placed in its life {spec.life} already; give it the next one")
        if await self.is_superseded() and self._superseded is not None:
            raise self._superseded
        request, traits = self._request(spec), self._traits(spec)
        kept = self._kept.get(spec.name)
        if kept is not None and kept.record.traits != traits:
            # The kept job differs from what is requested now.
            await self._end_kept(spec.name)
        kept = self._kept.pop(spec.name, None)
        record = JobRecord(
            name=request.name,
            worker=spec.name,
            life=spec.life,
            created_at=time.time(),
            num_tasks=spec.num_tasks,
            traits=dict(traits) if self._config.rejoin_seconds else None,
        )
        placement = SlurmPlacement(
            spec,
            record=record if kept is None else evolve(kept.record, life=spec.life),
            log=request.log,
            files=self._files,
            commands=self._commands,
            config=self._config,
            queue=self,
        )
        self._placements[placement.name] = placement
        try:
            # An interrupted submission may have been accepted, so it is bounded by its own time limits instead.
            with anyio.CancelScope(shield=True):
                if kept is None:
                    await self._submit(placement, request)
                else:
                    await placement.resume(kept.row, num_restarts=kept.num_restarts)
                    await to_thread.run_sync(self._write_bootstrap, placement, kept.num_restarts)
            yield placement
        finally:
            try:
                await placement.stop(grace=_STOP_GRACE_SECONDS)
            finally:
                self._left.add(placement.name)
                self._prune()

    # --------------------------------------------------------------------------------------- a former controller's jobs

    async def _end_kept(self, *workers: str) -> None:
        records = [self._kept.pop(worker).record for worker in workers]
        if not await self.is_superseded():
            seconds = self._config.cancel_timeout_seconds
            await cancel_records(self._files, self._commands, records=records, timeout_seconds=seconds)

    def _write_bootstrap(self, placement: SlurmPlacement, num_restarts: int = 0) -> None:
        told = Bootstrap.of(
            placement.spec,
            num_restarts=num_restarts,
            epoch=self._epoch,
            rejoin_seconds=self._config.rejoin_seconds,
        )
        self._files.write_bootstrap(placement.name, told)

    def _traits(self, spec: WorkerSpec) -> Traits:
        environment = {**clean_environment(self._commands.environment), **spec.environment}
        return traits_of(self._request(spec), self._config, environment)

    # ------------------------------------------------------------------------------------------- submitting

    def _request(self, spec: WorkerSpec) -> JobRequest:
        # Nodes that do not confirm the end of a job, and those of the worker's earlier incarnations that may still be
        # running: a worker that needs a replacement may have failed because of its node.
        avoided = {
            one.node
            for name, one in self._placements.items()
            if not one.is_gone and one.node and (name in self._left or one.spec.name == spec.name)
        }
        return JobRequest(
            run=self._run,
            worker=spec.name,
            life=spec.life,
            directory=self._files.path,
            log=self._logs / f"{spec.name}.log",
            working_directory=(spec.working_directory or Path.cwd()).absolute(),
            resources=spec.resources,
            num_tasks=spec.num_tasks,
            avoided=tuple(sorted(avoided)),
            python=spec.python,
            module=self._module,
        )

    async def _submit(self, placement: SlurmPlacement, request: JobRequest) -> None:
        script = render_script(request, self._config)
        await to_thread.run_sync(self._files.write_script, placement.name, script)
        await to_thread.run_sync(self._write_bootstrap, placement)
        # The record last: a job on record has its script and its bootstrap message.
        await to_thread.run_sync(self._files.write_record, placement.record)
        arguments = create_arguments(request, self._config)
        deadline = anyio.current_time() + self._config.submit_timeout_seconds
        while True:
            environment = placement.spec.environment
            outcome = await self._commands.submit(arguments, script, environment=environment)
            if isinstance(outcome, Unconfirmed):
                _log.warning("submission_in_doubt", job_name=request.name, reason=outcome.why)
                placement.mark_uncertain(outcome.why)
                outcome = await self._find(request.name, deadline) or outcome
            if isinstance(outcome, Submitted):
                await placement.begin(outcome.job)
                _log.info("job_submitted", worker=placement.spec.name, job=outcome.job)
                return
            if isinstance(outcome, Refused):
                await placement.refuse(outcome.why)
                num_nodes, per_node = request.shape(self._config)
                needs = request.resources.times(per_node)
                memory = f", {needs.memory_mib} MiB" if needs.memory_mib else ""
                where = "on one node" if num_nodes == 1 else f"on each of {num_nodes} nodes"
                raise SchedulerError(
                    f"the cluster refuses {placement.spec.name}: {outcome.why} It asked for {needs.cpus} CPUs, "
                    f"{needs.gpus} GPUs{memory} {where}; `sinfo -o '%P %c %m %G %l'` shows what there is. Change the "
                    "resources of its role, or partition, account, extra_arguments in scheduler.slurm."
                )
            if anyio.current_time() >= deadline:
                raise SchedulerError(f"{placement.spec.name} could not be submitted: {outcome.why}")

    async def _find(self, name: str, deadline: float) -> Submitted | None:
        """Return the job with this name once the queue can be read, or ``None`` if there is none or time is up."""
        with suppress(SchedulerError):
            for _ in range(_NUM_LOOKS):
                if rows := await self._commands.wait_for_jobs((name,), deadline=deadline):
                    # Several jobs may exist if a submission was repeated; ``refresh`` ends the others.
                    return Submitted(job=max(row.job for row in rows))
                await anyio.sleep(RETRY_SECONDS)
        return None

    # ------------------------------------------------------------------------------------------- watching

    async def _watch(self, scope: anyio.CancelScope) -> None:
        while not await self.is_superseded():
            # 25 % of jitter in both directions: many controllers must not poll at the same moment.
            await anyio.sleep(self._config.poll_seconds * (0.75 + self._jitter() / 2))
            await self.refresh()
        scope.cancel()

    async def is_superseded(self) -> bool:
        """Return whether a later controller has taken over the jobs, which are then left to it.

        The lock prevents that, except on file systems that do not keep locks.
        """
        epoch = await to_thread.run_sync(read_epoch, self._files.path)
        if epoch > self._epoch and self._superseded is None:
            why = (
                f"another controller has taken over the jobs of {self._files.path.parent}: it is number {epoch} there, "
                f"this one was number {self._epoch}. This one ends, and leaves them alone: a run has one controller."
            )
            _log.error("jobs_taken_over", reason=why)
            self._superseded = SchedulerError(why)
            for one in self._placements.values():
                one.hand_over(why)
        return self._superseded is not None

    async def refresh(self) -> None:
        """Read the queue once, and update every placement. Errors are counted and logged, not raised."""
        async with self._reading:
            if await self.is_superseded():
                return
            living = [one for one in self._placements.values() if one.job is not None and not one.is_gone]
            if not living:
                return
            try:
                rows = await self._commands.list_jobs([one.name for one in living])
                known = {one.job for one in self._placements.values()}
                for row in rows:
                    # A job that shares the name of another one: a submission that was accepted too late.
                    if row.job not in known and row.phase in (JobPhase.WAITING, JobPhase.RUNNING):
                        _log.warning("duplicate_job_cancelled", job=row.job, job_name=row.name)
                        await self._commands.cancel(row.job)
            except SchedulerError as error:
                # A queue that cannot be read says nothing about the jobs: none is given up or replaced.
                self._num_failed_reads += 1
                _log.warning("job_states_unknown", num_jobs=len(living), reason=str(error))
                for one in living:
                    one.report_error(str(error))
                return
            for one in living:
                try:
                    line = next((row for row in rows if row.job == one.job), None)
                    await one.update(line, now=anyio.current_time())
                except SchedulerError as error:
                    one.report_error(str(error))
            self._prune()

    def _prune(self) -> None:
        """Forget placements that were left once their jobs have ended. Until then, their nodes are avoided."""
        for name in [name for name in self._left if self._placements[name].is_gone]:
            self._left.remove(name)
            del self._placements[name]
