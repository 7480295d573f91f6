"""One worker on a cluster: the state of its job, and how the job is ended.

``scheduler`` reads the queue for all placements at once and passes each of them its line. A placement interprets the
line, or its absence, and records the end of its job.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import anyio
from anyio import to_thread
from attrs import evolve

from areal_actors.errors import SchedulerError
from areal_actors.lib.telemetry import get_logger
from areal_actors.schedulers.base import (
    CONTROLLER_LOST,
    NOT_BEGUN,
    RUN_AGAIN,
    PlacementState,
    PlacementStatus,
    WorkerSpec,
)
from areal_actors.schedulers.slurm.commands import SlurmCommands
from areal_actors.schedulers.slurm.files import JobRecord, SlurmFiles
from areal_actors.schedulers.slurm.queue import JobPhase, JobRow, JobView, observe, to_status
from areal_actors.schedulers.slurm.settings import SlurmConfig

_log = get_logger(__name__)

_TAIL_BYTES = 4096
_FIRST_LOOK_SECONDS = 0.1
_LAST_LOOK_SECONDS = 2.0
_ASK_AGAIN_SECONDS = 10.0
_UNWRITABLE = -53
"""Slurm's exit code for a job whose output file or working directory could not be opened on the node."""

_MEANINGS = {
    RUN_AGAIN: "it asked to be started again, which its cluster has not done",
    NOT_BEGUN: "it could not begin",
    CONTROLLER_LOST: "it had lost its controller",
    _UNWRITABLE: "the node could not open its log or working directory; are they on a file system that nodes share?",
}


class SlurmPlacement:
    """A job, from its submission until it has ended; implements ``Placement``.

    ``refresh`` reads the queue now, and updates every placement.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        record: JobRecord,
        log: Path,
        files: SlurmFiles,
        commands: SlurmCommands,
        config: SlurmConfig,
        refresh: Callable[[], Awaitable[None]],
    ) -> None:
        self.spec = spec
        self.log: Path | None = log
        self.record = record
        self._files, self._commands, self._config, self._refresh = files, commands, config, refresh
        self._view: JobView | None = None
        self._read_error = ""
        self._final: PlacementStatus | None = None
        self._gone = anyio.Event()
        self._stopping = anyio.Lock()
        self._is_unwanted = False
        self._num_hurried = 0
        self._given_up = ""
        self._is_uncertain = False

    @property
    def name(self) -> str:
        """Return the job's name."""
        return self.record.name

    @property
    def job(self) -> int | None:
        """Return the job's number, or ``None`` while it is unknown."""
        return self.record.job

    @property
    def is_gone(self) -> bool:
        """Return whether the end of the job is on record, even if its node took long to confirm it."""
        return self.record.ended is not None

    @property
    def node(self) -> str:
        """Return the nodes on which the job runs or was last seen."""
        return "" if self._view is None else self._view.nodes

    @property
    def status(self) -> PlacementStatus:
        """Return the current status."""
        if self._final is not None:
            return self._final
        if self._view is None:
            return PlacementStatus(state=PlacementState.UNKNOWN, reason=self._read_error or "it is being submitted")
        seen = to_status(self._view)
        return evolve(seen, state=PlacementState.UNKNOWN, reason=self._read_error) if self._read_error else seen

    async def wait_ended(self) -> PlacementStatus:
        """Wait until the job has ended, and return its final status."""
        await self._gone.wait()
        return self.status

    # ------------------------------------------------------------------------------------------------ its phase

    async def begin(self, job: int) -> None:
        """Record the job's number, so that another process can end the job if this one is killed."""
        self._view = JobView(job=job)
        self.record = evolve(self.record, job=job)
        await to_thread.run_sync(self._files.write_record, self.record)

    def mark_uncertain(self, why: str) -> None:
        """Record that it is unknown whether the job was accepted; it may even have been accepted twice."""
        self._read_error, self._is_uncertain = why, True

    async def refuse(self, why: str) -> None:
        """Record that the job was rejected, and remove its files."""
        self._final = PlacementStatus(state=PlacementState.ENDED, reason=why)
        self.record = evolve(self.record, ended=why)
        self._gone.set()
        await to_thread.run_sync(self._files.remove_bootstrap, self.name)
        await to_thread.run_sync(self._files.forget_record, self.name)

    def report_error(self, why: str) -> None:
        """Record why the state of the job could not be read. The status is UNKNOWN until it can be read again."""
        self._read_error = why

    async def update(self, row: JobRow | None, *, now: float) -> None:
        """Process a queue listing, in which this job has the line ``row``, or none."""
        if self._view is None or self.is_gone:
            return
        self._read_error = ""
        # A job that cannot be requeued, or is no longer wanted, gets no time to come back.
        patience = self._config.lost_seconds if self._config.max_requeues and not self._is_unwanted else 0.0
        self._view = observe(self._view, row, now=now, patience=patience)
        if self._view.phase is JobPhase.ENDED:
            await self._close(self._view)
        elif row is None:
            await self._look_for(self._view, now=now)
        elif row.is_held_back and not self._is_unwanted:
            self._given_up = f"Slurm held it ({row.reason}), and it was given up"
            # An administrator may release the job later. The stop mark keeps it from starting then.
            await to_thread.run_sync(self._files.mark_stopped, self.name)
            await self._commands.cancel(row.job)
        elif row.reason == "BeginTime" and self._view.num_restarts > self._num_hurried:
            # Slurm refuses this while it still cleans up the job's previous run; then the next listing tries again.
            await self._commands.start_soon(self._view.job)
            self._num_hurried = self._view.num_restarts
            _log.info("job_requeued", job=self._view.job, worker=self.spec.name)

    async def _look_for(self, view: JobView, *, now: float) -> None:
        """Decide whether a job that is missing from the queue has ended.

        It has if its exit record or slurmctld says so, or if it has been missing for ``lost_seconds``.
        """
        left = await to_thread.run_sync(self._files.read_exit, self.name, view.job)
        report = await self._commands.describe(view.job) if left is None else None
        if report is not None and report.phase is not JobPhase.ENDED:
            return
        is_lost = now - (view.doubtful_since or now) >= self._config.lost_seconds or self._is_unwanted
        if left is not None or report is not None or is_lost:
            await self._close(evolve(view, state=report.state if report else "LOST" if left is None else "ENDED"))

    async def _close(self, view: JobView) -> None:
        """Determine how the job ended, and record it."""
        report = None
        with suppress(SchedulerError):  # the exit record suffices
            report = await self._commands.describe(view.job)
        left = await to_thread.run_sync(self._files.read_exit, self.name, view.job)
        code = None
        # The script's record is that of an earlier run if the cluster has started the job again since.
        if left is not None and left.restarts >= (report.restarts if report else view.num_restarts):
            code = left.code
        # A job that did not complete has no exit code 0, whatever Slurm reports.
        elif report is not None and (report.code != 0 or view.state == "COMPLETED"):
            code = report.code
        how = f"ended as {view.state or 'LOST'}" + (f" on {view.nodes}" if view.nodes else "")
        if code is not None:
            how += f", by signal {-code}" if code < 0 else f", with status {code}"
        meaning = _MEANINGS.get(code or 0, "")
        if view.state.startswith("CANCELLED") and not self._is_unwanted:
            meaning = "it was cancelled from outside"
        elif view.state == "TIMEOUT":
            meaning = "its time was over (scheduler.slurm.time_minutes)"
        elif view.state == "LOST":
            meaning = "it is not in the queue, and has left no word"
        words = self._given_up or f"job {view.job} {how}" + (f": {meaning}" if meaning else "")
        if code != 0 and not self._is_unwanted:
            words += await to_thread.run_sync(_last_words, self.log)
        await self._keep_end(PlacementStatus(
            state=PlacementState.ENDED, where=to_status(view).where, reason=words, exit_code=code
        ))  # fmt: skip

    async def _keep_end(self, status: PlacementStatus) -> None:
        self._final = self._final or status
        self.record = evolve(self.record, ended=status.reason.partition("\n")[0])
        try:
            # The caller may have a time limit, or look for another job.
            with anyio.CancelScope(shield=True):
                await to_thread.run_sync(self._files.write_record, self.record)
                await to_thread.run_sync(self._files.remove_bootstrap, self.name)
        finally:
            self._gone.set()

    # ------------------------------------------------------------------------------------------------ its end

    async def stop(self, *, grace: float) -> None:
        """End the job: send SIGTERM to the worker, and cancel the job after ``grace`` seconds.

        The request is repeated until ``cancel_timeout_seconds`` are over if slurmctld does not answer. This
        method cannot be cancelled.

        Raises:
            SchedulerError: the job may still be running.
        """
        with anyio.CancelScope(shield=True):
            async with self._stopping:
                await self._end(grace)

    async def _end(self, grace: float) -> None:
        if self._final is not None:
            if self._is_uncertain:
                await self._commands.cancel_named(self.name)
            return
        self._is_unwanted = True
        await to_thread.run_sync(self._files.mark_stopped, self.name)
        if self._view is not None and self._view.phase is JobPhase.RUNNING and grace > 0:
            try:
                await self._commands.warn(self._view.job)
                await self._wait_gone(grace)
            except SchedulerError as error:
                _log.warning("job_not_warned", job=self._view.job, reason=str(error))
        why = "it did not end"
        began = anyio.current_time()
        with anyio.move_on_after(self._config.cancel_timeout_seconds):
            while self._final is None:
                try:
                    await self._cancel()
                except SchedulerError as error:
                    why = str(error)
                await self._wait_gone(_ASK_AGAIN_SECONDS)
                view, waited = self._view, anyio.current_time() - began
                # The node of a COMPLETING job may have crashed, and then never confirms the end.
                if view is not None and view.state == "COMPLETING" and waited >= self._config.completing_seconds:
                    # A process that may still run there notices that it has lost its controller. The node is avoided
                    # until the cluster has given it up.
                    node = view.nodes or "its node"
                    words = f"job {view.job} is cancelled, and {node} does not confirm that it has ended"
                    _log.warning("job_end_not_confirmed", job=view.job, node=view.nodes, reason=words)
                    where = to_status(view).where
                    self._final = PlacementStatus(state=PlacementState.ENDED, where=where, reason=words)
                    self._gone.set()
        if self._final is None:
            raise SchedulerError(
                f"job {self.record.job or self.name} of {self.spec.name} may still run: {why}. When the cluster "
                f"answers again, `areal-actors slurm cancel {self._files.path.parent}` ends it."
            )

    async def _cancel(self) -> None:
        """Cancel the job by its number, and then by its name."""
        if self.record.job is not None:
            await self._commands.cancel(self.record.job)
        await self._commands.cancel_named(self.name)
        # The name as well: a submission whose outcome was unknown may have created a second job.
        if self.record.job is None and not await self._commands.list_jobs((self.name,)):
            await self._keep_end(PlacementStatus(state=PlacementState.ENDED, reason="it was never taken"))

    async def _wait_gone(self, seconds: float) -> None:
        seconds = min(seconds, self._config.completing_seconds)
        pause = _FIRST_LOOK_SECONDS
        with anyio.move_on_after(seconds):
            while self._final is None:
                await self._refresh()
                with anyio.move_on_after(pause):
                    await self._gone.wait()
                pause = min(_LAST_LOOK_SECONDS, pause * 1.5)


def _last_words(log: Path | None) -> str:
    try:
        with open(log or "", "rb") as file:  # noqa: PTH123 - a path or nothing
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            words = file.read().decode(errors="replace").strip()
    except OSError:
        return f"\nThere is no log at {log}."
    return f"\nThe end of {log}:\n{words}" if words else ""
