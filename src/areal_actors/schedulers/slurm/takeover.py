"""Take over the jobs of a former controller: keep those that are wanted unchanged, and end all others.

A waiting job only needs another address. A running job has processes that know the former controller and may be writing
a checkpoint at this moment: it is kept if each of them has released its role (``schedulers.rejoining``), and ended
otherwise. When the takeover is complete, no process that a former controller started is doing any work.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import anyio
from anyio import to_thread
from attrs import evolve, frozen

from areal_actors.errors import SchedulerError
from areal_actors.schedulers.rejoining import count_let_go
from areal_actors.schedulers.slurm.adoption import Traits, Verdict, judge
from areal_actors.schedulers.slurm.commands import SlurmCommands
from areal_actors.schedulers.slurm.files import JobRecord, SlurmFiles
from areal_actors.schedulers.slurm.queue import Course, JobRow
from areal_actors.schedulers.slurm.reaping import cancel_records
from areal_actors.schedulers.slurm.settings import SlurmConfig

__all__ = ["Kept", "take_over"]

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.5
_RETRY_SECONDS = 2.0


@frozen(kw_only=True)
class Kept:
    """A job that was kept, until its worker is placed."""

    record: JobRecord
    row: JobRow
    num_restarts: int
    """How often the cluster had restarted the job."""


async def take_over(
    files: SlurmFiles, commands: SlurmCommands, config: SlurmConfig, *, epoch: int, wanted: Mapping[str, Traits]
) -> dict[str, Kept]:
    """Decide about every job on record. Return the jobs that are kept, by worker; all others have ended.

    Args:
        files: the files of the run, whose ``epoch`` has begun.
        commands: the cluster.
        config: settings; after ``rejoin_seconds``, processes that have released their role exit. At most half of it is
            spent waiting for processes that have not.
        epoch: the epoch of this controller.
        wanted: the traits of what would be submitted now, by worker.

    Raises:
        SchedulerError: the cluster does not answer, or jobs that are not kept do not end.
    """
    records, stopped = await to_thread.run_sync(_read, files)
    if not records:
        return {}
    # If no worker is wanted, all jobs are ended anyway, and the queue need not be read.
    rows = await _read_queue(commands, records, seconds=config.cancel_timeout_seconds) if wanted else ()
    verdicts = judge(records, rows, wanted, stopped=stopped)
    _tell_ended(verdicts)
    ended = [one.record for one in verdicts if one.why]
    # Half of the time, so that processes that have released their role are still waiting afterwards.
    deadline = anyio.current_time() + config.rejoin_seconds / 2
    await cancel_records(files, commands, records=ended, timeout_seconds=config.cancel_timeout_seconds)
    waiting = _Handover(files, commands, epoch, [one for one in verdicts if not one.why])
    await waiting.run(deadline)
    _tell_ended(waiting.lost)
    lost = [one.record for one in waiting.lost]
    await cancel_records(files, commands, records=lost, timeout_seconds=config.cancel_timeout_seconds)
    for one in waiting.kept:
        where = f" on {one.row.nodes}" if one.row.nodes else ""
        logger.info("job %d of %s is kept, %s%s", one.row.job, one.record.worker, one.row.state, where)
    return {one.record.worker: one for one in waiting.kept}


def _read(files: SlurmFiles) -> tuple[tuple[JobRecord, ...], frozenset[str]]:
    records = tuple(one for one in files.read_records() if one.ended is None)
    return records, frozenset(one.name for one in records if files.is_stopped(one.name))


def _tell_ended(verdicts: Sequence[Verdict]) -> None:
    for one in verdicts:
        if one.why:
            logger.info("job %s of %s is not kept: %s", one.record.job or one.record.name, one.record.worker, one.why)


async def _read_queue(commands: SlurmCommands, records: Sequence[JobRecord], *, seconds: float) -> tuple[JobRow, ...]:
    deadline = anyio.current_time() + seconds
    while True:
        try:
            return await commands.list_jobs([one.name for one in records])
        except SchedulerError as error:
            if anyio.current_time() >= deadline:
                raise
            logger.warning("%s", error)
        await anyio.sleep(_RETRY_SECONDS)


class _Handover:
    """Jobs to be kept, until each of them has released its role or is lost."""

    def __init__(self, files: SlurmFiles, commands: SlurmCommands, epoch: int, verdicts: Sequence[Verdict]) -> None:
        self.kept: list[Kept] = []
        self.lost: list[Verdict] = []
        self._files, self._commands, self._epoch = files, commands, epoch
        self._awaited = {one.record.name: one for one in verdicts}

    async def run(self, deadline: float) -> None:
        """Poll until no job is awaited any longer or the deadline has passed; jobs still awaited are lost."""
        why = "it has not let go of what it did for its former home"
        while self._awaited:
            try:
                await self._look()
            except SchedulerError as error:
                why = str(error)
            if anyio.current_time() >= deadline:
                break
            if self._awaited:
                await anyio.sleep(_LOOK_SECONDS)
        self.lost += [evolve(one, why=why) for one in self._awaited.values()]

    async def _look(self) -> None:
        seen = await self._commands.list_jobs(list(self._awaited))
        rows = {row.name: row for row in seen if row.course is not Course.ENDED}
        let_go = await to_thread.run_sync(count_let_go, self._files.path, self._epoch)
        for name, verdict in list(self._awaited.items()):
            row = rows.get(name)
            if row is None or row.course not in (Course.WAITING, Course.RUNNING) or row.state == "COMPLETING":
                self._awaited.pop(name)
                self.lost.append(evolve(verdict, why="it has ended" if row is None else f"it is {row.state}"))
            elif row.course is Course.WAITING or any(job == name for job, _ in let_go):
                await self._ask(verdict, row, let_go)

    async def _ask(self, verdict: Verdict, row: JobRow, let_go: Mapping[tuple[str, int], int]) -> None:
        """Keep the job if all processes of its current run have confirmed."""
        # Only slurmctld knows the number of the current run. Confirmations of earlier runs do not count.
        report = await self._commands.describe(row.job)
        if report is None:
            return
        name, num_restarts = verdict.record.name, report.exit.restarts
        if row.course is Course.WAITING or let_go.get((name, num_restarts), 0) >= verdict.record.num_tasks:
            record = evolve(verdict.record, job=row.job)
            self.kept.append(Kept(record=record, row=row, num_restarts=num_restarts))
            self._awaited.pop(name)
