"""One worker on a cluster: what is known of its job, and how it is brought to its end.

The queue is read for all placements at once, by ``scheduler``, which hands each of them its line. Here it is decided
what a line, or its absence, means, and the end of a job is put on record.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Protocol

import anyio
from anyio import to_thread
from attrs import evolve

from areal_actors.errors import SchedulerError
from areal_actors.schedulers.base import PlacementState, PlacementStatus, WorkerSpec
from areal_actors.schedulers.slurm.commands import SlurmCommands
from areal_actors.schedulers.slurm.files import JobRecord, SlurmFiles
from areal_actors.schedulers.slurm.queue import Course, ExitStatus, JobReport, JobRow
from areal_actors.schedulers.slurm.settings import SlurmConfig
from areal_actors.schedulers.slurm.view import JobView, observe, to_status
from areal_actors.schedulers.statuses import HOME_LOST, NOT_BEGUN, RUN_AGAIN

__all__ = ["QueueReader", "SlurmPlacement"]

logger = logging.getLogger(__name__)

_TAIL_BYTES = 4096
_FIRST_LOOK_SECONDS = 0.1
_LAST_LOOK_SECONDS = 2.0
_ASK_AGAIN_SECONDS = 10.0
_UNWRITABLE = -53
"""Slurm's word for a job whose output file, or working directory, could not be opened on the node."""

_MEANINGS = {
    RUN_AGAIN: "it asked to be started again, which its cluster has not done",
    NOT_BEGUN: "it could not begin",
    HOME_LOST: "it had lost home",
    _UNWRITABLE: "the node could not open its log or working directory; are they on a file system that nodes share?",
}


class QueueReader(Protocol):
    """Whoever reads the queue for all placements."""

    async def look(self) -> None:
        """Read it now, and tell every placement."""
        ...

    async def is_ousted(self) -> bool:
        """Whether the jobs are a later home's. Then every placement has been told to leave them alone."""
        ...


class SlurmPlacement:
    """A job, from its submission until nothing of it is left."""

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        record: JobRecord,
        log: Path,
        files: SlurmFiles,
        commands: SlurmCommands,
        config: SlurmConfig,
        queue: QueueReader,
    ) -> None:
        self.spec = spec
        self.log: Path | None = log
        self.record = record
        self._files, self._commands, self._config, self._queue = files, commands, config, queue
        self._view: JobView | None = None
        self._silence = ""
        self._final: PlacementStatus | None = None
        self._gone = anyio.Event()
        self._stopping = anyio.Lock()
        self._is_unwanted = False
        self._num_hurried = 0
        self._num_released = 0
        self._given_up = ""
        self._is_doubtful = False

    @property
    def name(self) -> str:
        """The job's name."""
        return self.record.name

    @property
    def job(self) -> int | None:
        """The job's number, once it is known."""
        return self.record.job

    @property
    def is_gone(self) -> bool:
        """Whether nothing of it is left, even where its node had not confirmed that for long."""
        return self.record.ended is not None

    @property
    def node(self) -> str:
        """Where it runs, or was when it was last seen."""
        return "" if self._view is None else self._view.nodes

    @property
    def status(self) -> PlacementStatus:
        """What is known at present."""
        if self._final is not None:
            return self._final
        if self._view is None:
            return PlacementStatus(state=PlacementState.UNKNOWN, reason=self._silence or "it is being submitted")
        seen = to_status(self._view)
        return evolve(seen, state=PlacementState.UNKNOWN, reason=self._silence) if self._silence else seen

    async def wait_ended(self) -> PlacementStatus:
        """Until nothing of it is left."""
        await self._gone.wait()
        return self.status

    # ------------------------------------------------------------------------------------------------ its course

    async def begin(self, job: int) -> None:
        """It has a number. Whoever finds the record can end it, whatever becomes of this process."""
        self._view = JobView(job=job)
        self.record = evolve(self.record, job=job)
        await to_thread.run_sync(self._files.write_record, self.record)

    async def resume(self, row: JobRow, *, num_restarts: int) -> None:
        """It is the job of a former home, and ours from now on."""
        assert self.job is not None
        self._view = observe(JobView(job=self.job, num_restarts=num_restarts), row, now=0.0, patience=0.0)
        self._num_hurried = num_restarts
        await to_thread.run_sync(self._files.write_record, self.record)

    def hand_over(self, why: str) -> None:
        """It is a later home's, which decides when it ends."""
        if self._final is None:
            self._final = PlacementStatus(state=PlacementState.ENDED, reason=why)
            self._is_doubtful = False
            self._gone.set()

    def doubt(self, why: str) -> None:
        """It is not known whether it was taken; it may even come to be twice."""
        self._silence, self._is_doubtful = why, True

    async def refuse(self, why: str) -> None:
        """There is no such job, and will not be."""
        self._final = PlacementStatus(state=PlacementState.ENDED, reason=why)
        self.record = evolve(self.record, ended=why)
        self._gone.set()
        await to_thread.run_sync(self._files.remove_bootstrap, self.name)
        await to_thread.run_sync(self._files.forget_record, self.name)

    def hear_nothing(self, why: str) -> None:
        """The queue could not be read."""
        self._silence = why

    async def see(self, row: JobRow | None, *, now: float) -> None:
        """The queue was read, and had this line for the job, or none."""
        if self._view is None or self.is_gone:
            return
        self._silence = ""
        patience = self._config.lost_seconds if self._config.max_requeues and not self._is_unwanted else 0.0
        self._view = observe(self._view, row, now=now, patience=patience)
        if self._view.course is Course.ENDED:
            await self._close(self._view)
        elif row is None:
            await self._look_for(self._view, now=now)
        elif row.is_held_back and not self._is_unwanted:
            await self._release(self._view)
        elif row.reason == "BeginTime" and self._num_put_back > self._num_hurried:
            await self._hurry(self._view)

    @property
    def _num_put_back(self) -> int:
        """How often it was put back, at least; a launch that failed may not have been seen to run."""
        return (0 if self._view is None else self._view.num_restarts) + self._num_released

    async def _look_for(self, view: JobView, *, now: float) -> None:
        """A job that is not in the queue has ended if it says so, or if its controller has forgotten it for long."""
        left = await to_thread.run_sync(self._files.read_exit, self.name, view.job)
        report = await self._commands.describe(view.job) if left is None else None
        if report is not None and report.course is not Course.ENDED:
            return
        is_lost = now - (view.doubtful_since or now) >= self._config.lost_seconds or self._is_unwanted
        if left is not None or report is not None or is_lost:
            await self._close(evolve(view, state=report.state if report else "LOST" if left is None else "ENDED"))

    async def _hurry(self, view: JobView) -> None:
        """Refused while the job's former life is being cleared away, it is asked again at the next look."""
        await self._commands.start_soon(view.job)
        self._num_hurried = self._num_put_back
        logger.info("job %d of %s was put back into the queue; it is started again soon", view.job, self.spec.name)

    async def _release(self, view: JobView) -> None:
        """Nobody else would. Where the cluster refuses, or holds it again and again, it is for others to place anew."""
        if self._num_released >= self._config.max_requeues:
            return await self._give_up(view, f"it was released {self._num_released} times already")
        refusal = await self._commands.release(view.job)
        if refusal is not None:
            return await self._give_up(view, refusal.why)
        self._num_released += 1
        logger.warning("job %d of %s was held (%s); it is released", view.job, self.spec.name, view.reason)
        return None

    async def _give_up(self, view: JobView, why: str) -> None:
        """What is held may be released by an administrator one day, and must not begin then."""
        self._given_up = f"Slurm held it ({view.reason}), and it was given up: {why}"
        await to_thread.run_sync(self._files.mark_stopped, self.name)
        await self._commands.cancel(view.job)

    async def _close(self, view: JobView) -> None:
        """It has ended: find out how, and say so for ever."""
        report = await self._report(view)
        left = await to_thread.run_sync(self._files.read_exit, self.name, view.job)
        code = _exit_code(view, report, left)
        words = self._given_up or _describe_end(view, code, is_unwanted=self._is_unwanted)
        if code != 0 and not self._is_unwanted:
            words += await to_thread.run_sync(_last_words, self.log)
        await self._keep_end(PlacementStatus(
            state=PlacementState.ENDED, where=to_status(view).where, reason=words, exit_code=code
        ))  # fmt: skip

    async def _report(self, view: JobView) -> JobReport | None:
        try:
            return await self._commands.describe(view.job)
        except SchedulerError:
            return None

    async def _keep_end(self, status: PlacementStatus) -> None:
        self._final = self._final or status
        self.record = evolve(self.record, ended=status.reason.partition("\n")[0])
        try:
            with anyio.CancelScope(shield=True):  # whoever looks may do so for another job, and only for so long
                await to_thread.run_sync(self._files.write_record, self.record)
                await to_thread.run_sync(self._files.remove_bootstrap, self.name)
        finally:
            self._gone.set()

    # ------------------------------------------------------------------------------------------------ its end

    async def stop(self, *, grace: float) -> None:
        """End it: SIGTERM to the worker, after ``grace`` seconds to the job, whose cluster makes it end.

        A controller that does not answer is asked again until ``cancel_timeout_seconds`` are over. Cannot be cancelled.

        Raises:
            SchedulerError: it may still be there.
        """
        with anyio.CancelScope(shield=True):
            async with self._stopping:
                await self._end(grace)

    async def _end(self, grace: float) -> None:
        await self._queue.is_ousted()
        if self._final is not None:
            if self._is_doubtful:
                await self._commands.cancel_named(self.name)
            return
        self._is_unwanted = True
        await to_thread.run_sync(self._files.mark_stopped, self.name)
        if self._view is not None and self._view.course is Course.RUNNING and grace > 0:
            await self._warn(self._view.job, grace)
        why = "it did not end"
        began = anyio.current_time()
        with anyio.move_on_after(self._config.cancel_timeout_seconds):
            while self._final is None and not await self._queue.is_ousted():
                try:
                    await self._cancel()
                except SchedulerError as error:
                    why = str(error)
                await self._wait_gone(_ASK_AGAIN_SECONDS)
                view, waited = self._view, anyio.current_time() - began
                if view is not None and view.state == "COMPLETING" and waited >= self._config.completing_seconds:
                    self._leave(view)
        if self._final is None:
            raise SchedulerError(
                f"job {self.record.job or self.name} of {self.spec.name} may still run: {why}. When the cluster "
                f"answers again, `areal-actors slurm cancel {self._files.path.parent}` ends it."
            )

    async def _warn(self, job: int, grace: float) -> None:
        try:
            await self._commands.warn(job)
        except SchedulerError as error:
            logger.warning("%s", error)
            return
        await self._wait_gone(grace)

    async def _cancel(self) -> None:
        """By its number, and then by its name: nothing that was submitted twice by mistake is left, either."""
        if self.record.job is not None:
            await self._commands.cancel(self.record.job)
        await self._commands.cancel_named(self.name)
        if self.record.job is None and not await self._commands.list_jobs((self.name,)):
            await self._keep_end(PlacementStatus(state=PlacementState.ENDED, reason="it was never taken"))

    def _leave(self, view: JobView) -> None:
        """Its node does not answer. The job is cancelled; what may still run there knows that it has lost home."""
        words = f"job {view.job} is cancelled, and {view.nodes or 'its node'} does not confirm that it has ended"
        logger.warning("%s; the node is avoided until the cluster has given it up", words)
        self._final = PlacementStatus(state=PlacementState.ENDED, where=to_status(view).where, reason=words)
        self._gone.set()

    async def _wait_gone(self, seconds: float) -> None:
        seconds = min(seconds, self._config.completing_seconds)
        pause = _FIRST_LOOK_SECONDS
        with anyio.move_on_after(seconds):
            while self._final is None:
                await self._queue.look()
                with anyio.move_on_after(pause):
                    await self._gone.wait()
                pause = min(_LAST_LOOK_SECONDS, pause * 1.5)


def _exit_code(view: JobView, report: JobReport | None, left: ExitStatus | None) -> int | None:
    """What the script has left of the job's last life, else what Slurm says. A job that did not complete has no 0."""
    restarts = report.exit.restarts if report else view.num_restarts
    if left is not None and left.restarts >= restarts:
        return left.code
    if report is None or (report.exit.code == 0 and view.state != "COMPLETED"):
        return None
    return report.exit.code


def _describe_end(view: JobView, code: int | None, *, is_unwanted: bool) -> str:
    how = f"ended as {view.state or 'LOST'}" + (f" on {view.nodes}" if view.nodes else "")
    if code is not None:
        how += f", by signal {-code}" if code < 0 else f", with status {code}"
    meaning = _MEANINGS.get(code or 0, "")
    if view.state.startswith("CANCELLED") and not is_unwanted:
        meaning = "it was cancelled from outside"
    elif view.state == "TIMEOUT":
        meaning = "its time was over (scheduler.slurm.time_minutes)"
    elif view.state == "LOST":
        meaning = "it is not in the queue, and has left no word"
    return f"job {view.job} {how}" + (f": {meaning}" if meaning else "")


def _last_words(log: Path | None) -> str:
    try:
        with open(log or "", "rb") as file:  # noqa: PTH123 - a path or nothing
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            words = file.read().decode(errors="replace").strip()
    except OSError:
        return f"\nThere is no log at {log}."
    return f"\nThe end of {log}:\n{words}" if words else ""
