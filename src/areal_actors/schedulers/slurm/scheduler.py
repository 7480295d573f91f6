"""The Slurm scheduler: each worker is a job, and all jobs have ended when the controller leaves.

A job is recorded before it is submitted, so that jobs of a killed controller can be found: the next controller of the
same directory ends them before it submits others, or ``areal-actors slurm reap`` does. The queue is read once for all
jobs, off the event loop. While the cluster does not answer, jobs are neither given up nor submitted again.
"""

from __future__ import annotations

import os
import random
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
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
from areal_actors.schedulers.bootstrap import Bootstrap
from areal_actors.schedulers.slurm.commands import (
    RETRY_SECONDS,
    JobRefused,
    SlurmCommands,
)
from areal_actors.schedulers.slurm.files import JobRecord, SlurmFiles
from areal_actors.schedulers.slurm.placement import SlurmPlacement
from areal_actors.schedulers.slurm.queue import JobPhase, JobRow
from areal_actors.schedulers.slurm.script import JobRequest, create_arguments, render_script
from areal_actors.schedulers.slurm.settings import SlurmConfig

_log = get_logger(__name__)

_RUN_BYTES = 8
_STOP_GRACE_SECONDS = 0.0
_CANCEL_POLL_SECONDS = 0.3
_ASK_AGAIN_LOOKS = 30
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
        module: str,
    ) -> None:
        self._config, self._files, self._logs, self._commands = config, files, logs, commands
        self._module = module
        self._run = secrets.token_hex(_RUN_BYTES)
        self._placements: dict[str, SlurmPlacement] = {}
        self._left: set[str] = set()
        self._reading = anyio.Lock()

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        config: SlurmConfig | None = None,
        *,
        directory: Path,
        logs: Path | None = None,
        environment: Mapping[str, str] | None = None,
        module: str = "areal_actors.worker",
    ) -> AsyncIterator[SlurmScheduler]:
        """Open the scheduler as the only controller of a run directory while the block lasts.

        Args:
            config: settings of the cluster.
            directory: the run directory, on a file system that the controller shares with the nodes.
            logs: directory for the output of the jobs; by default ``logs/workers`` in the run directory.
            environment: environment of the jobs, from which Slurm's variables are removed; by default that of this
                process.
            module: the module that a worker's interpreter runs.

        Raises:
            SchedulerError: Slurm is not installed or does not answer, another controller holds this directory, or jobs
                of an earlier one cannot be ended.
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
        # Absolute, because nodes open it.
        logs = Path(await anyio.Path(logs or files.path.parent / "logs" / "workers").absolute())
        await to_thread.run_sync(partial(logs.mkdir, parents=True, exist_ok=True))
        self = cls(config, files=files, logs=logs, commands=commands, module=module)
        # Lock first: only the jobs of a controller that is gone may be ended.
        with files.hold():
            await cancel_records(files, commands, timeout_seconds=config.cancel_timeout_seconds)
            async with open_tasks() as tasks:
                tasks.start_soon(self._watch)
                yield self
                tasks.cancel_scope.cancel()

    @property
    def name(self) -> str:
        """Return ``slurm``."""
        return "slurm"

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
        request = self._request(spec)
        placement = SlurmPlacement(
            spec,
            record=JobRecord(name=request.name, worker=spec.name, life=spec.life, created_at=time.time()),
            log=request.log,
            files=self._files,
            commands=self._commands,
            config=self._config,
            refresh=self.refresh,
        )
        self._placements[placement.name] = placement
        try:
            # An interrupted submission may have been accepted, so it is bounded by its own time limits instead.
            with anyio.CancelScope(shield=True):
                await self._submit(placement, request)
            yield placement
        finally:
            try:
                await placement.stop(grace=_STOP_GRACE_SECONDS)
            finally:
                self._left.add(placement.name)
                self._prune()

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
            working_directory=Path.cwd(),
            resources=spec.resources,
            num_tasks=spec.num_tasks,
            avoided=tuple(sorted(avoided)),
            python=spec.python,
            module=self._module,
        )

    async def _submit(self, placement: SlurmPlacement, request: JobRequest) -> None:
        script = render_script(request, self._config)
        await to_thread.run_sync(self._files.write_script, placement.name, script)
        await to_thread.run_sync(self._files.write_bootstrap, placement.name, Bootstrap.of(placement.spec))
        # The record last: a job on record has its script and its bootstrap message.
        await to_thread.run_sync(self._files.write_record, placement.record)
        arguments = create_arguments(request, self._config)
        deadline = anyio.current_time() + self._config.submit_timeout_seconds
        while True:
            try:
                job = await self._commands.submit(arguments, script, environment=placement.spec.environment)
            except JobRefused as refused:
                await placement.refuse(str(refused))
                num_nodes, per_node = request.shape(self._config)
                needs = request.resources.times(per_node)
                memory = f", {needs.memory_mib} MiB" if needs.memory_mib else ""
                where = "on one node" if num_nodes == 1 else f"on each of {num_nodes} nodes"
                raise SchedulerError(
                    f"the cluster refuses {placement.spec.name}: {refused} It asked for {needs.cpus} CPUs, "
                    f"{needs.gpus} GPUs{memory} {where}; `sinfo -o '%P %c %m %G %l'` shows what there is. Change the "
                    "resources of its role, or partition, account, extra_arguments in scheduler.slurm."
                ) from None
            except SchedulerError as error:
                _log.warning("submission_in_doubt", job_name=request.name, reason=str(error))
                placement.mark_uncertain(str(error))
                found = await self._find(request.name, deadline)
                if found is None and anyio.current_time() < deadline:
                    continue
                if found is None:
                    raise SchedulerError(f"{placement.spec.name} could not be submitted: {error}") from error
                job = found
            await placement.begin(job)
            _log.info("job_submitted", worker=placement.spec.name, job=job)
            return

    async def _find(self, name: str, deadline: float) -> int | None:
        """Return the job with this name once the queue can be read, or ``None`` if there is none or time is up."""
        with suppress(SchedulerError):
            for _ in range(_NUM_LOOKS):
                if rows := await self._commands.wait_for_jobs((name,), deadline=deadline):
                    # Several jobs may exist if a submission was repeated; ``refresh`` ends the others.
                    return max(row.job for row in rows)
                await anyio.sleep(RETRY_SECONDS)
        return None

    # ------------------------------------------------------------------------------------------- watching

    async def _watch(self) -> None:
        while True:
            # 25 % of jitter in both directions: many controllers must not poll at the same moment.
            await anyio.sleep(self._config.poll_seconds * random.uniform(0.75, 1.25))  # noqa: S311 - jitter
            await self.refresh()

    async def refresh(self) -> None:
        """Read the queue once, and update every placement. Errors are logged, not raised."""
        async with self._reading:
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


async def cancel_records(
    files: SlurmFiles,
    commands: SlurmCommands,
    *,
    timeout_seconds: float,
) -> tuple[JobRecord, ...]:
    """End every job of ``files`` that is not known to have ended, and return their records, closed. Safe to repeat.

    Args:
        files: the files of the run.
        commands: the cluster.
        timeout_seconds: how long the jobs may take to end.

    Raises:
        SchedulerError: some jobs still exist, or the cluster does not answer.
    """
    records = [one for one in await to_thread.run_sync(files.read_records) if one.ended is None]
    for record in records:
        # Before any cancellation: a job that starts meanwhile, or asks for a requeue, must see the mark.
        await to_thread.run_sync(files.mark_stopped, record.name)
    left = {record.name: record for record in records}
    why = ""
    with anyio.move_on_after(timeout_seconds):
        num_looks = 0
        while left:
            try:
                for record in left.values() if num_looks % _ASK_AGAIN_LOOKS == 0 else ():
                    if record.job is not None:
                        await commands.cancel(record.job)
                    await commands.cancel_named(record.name)
                rows = await commands.list_jobs(list(left))
            except SchedulerError as error:
                why = str(error)
            else:
                num_looks += 1
                why = ""
                await _close(files, left, rows)
            if left:
                await anyio.sleep(_CANCEL_POLL_SECONDS)
    if left:
        raise SchedulerError(f"{len(left)} jobs may still run ({', '.join(left)}): {why or 'they do not end'}")
    return tuple(evolve(record, ended="cancelled") for record in records)


async def _close(files: SlurmFiles, left: dict[str, JobRecord], rows: Sequence[JobRow]) -> None:
    """Close the records of jobs that have ended, and remove them from ``left``."""
    for name, record in list(left.items()):
        states = [row.phase for row in rows if row.name == name]
        # If the cluster restarts a doubtful job, its stop mark prevents it from doing anything.
        if all(state in (JobPhase.ENDED, JobPhase.UNCERTAIN) for state in states):
            ended = next((row.state for row in rows if row.name == name), "cancelled")
            await to_thread.run_sync(files.write_record, evolve(record, ended=f"found and ended: {ended}"))
            await to_thread.run_sync(files.remove_bootstrap, name)
            del left[name]
