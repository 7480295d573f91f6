"""End jobs on record without the controller that submitted them: for the next controller, and for the command line."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import anyio
from anyio import to_thread
from attrs import evolve

from areal_actors.errors import SchedulerError
from areal_actors.schedulers.slurm.commands import SlurmCommands
from areal_actors.schedulers.slurm.files import JobRecord, SlurmFiles
from areal_actors.schedulers.slurm.queue import Course, JobRow

__all__ = ["cancel_records"]

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.3
_ASK_AGAIN_LOOKS = 30


async def cancel_records(
    files: SlurmFiles,
    commands: SlurmCommands,
    *,
    timeout_seconds: float,
    records: Sequence[JobRecord] | None = None,
) -> tuple[JobRecord, ...]:
    """End every job of ``files`` that is not known to have ended, and return their records, closed. Safe to repeat.

    Args:
        files: the files of the run.
        commands: the cluster.
        timeout_seconds: how long the jobs may take to end.
        records: end only these.

    Raises:
        SchedulerError: some jobs still exist, or the cluster does not answer.
    """
    if records is None:
        records = await to_thread.run_sync(files.read_records)
    records = [one for one in records if one.ended is None]
    for record in records:
        # Before any cancellation: a job that starts meanwhile, or asks for a requeue, must see the mark.
        await to_thread.run_sync(files.mark_stopped, record.name)
    left = {record.name: record for record in records}
    why = ""
    with anyio.move_on_after(timeout_seconds):
        num_looks = 0
        while left:
            try:
                if num_looks % _ASK_AGAIN_LOOKS == 0:
                    await _cancel_all(commands, list(left.values()))
                rows = await commands.list_jobs(list(left))
            except SchedulerError as error:
                why = str(error)
            else:
                num_looks += 1
                why = ""
                await _close(files, left, rows)
            if left:
                await anyio.sleep(_LOOK_SECONDS)
    if left:
        raise SchedulerError(f"{len(left)} jobs may still run ({', '.join(left)}): {why or 'they do not end'}")
    return tuple(evolve(record, ended="cancelled") for record in records)


async def _cancel_all(commands: SlurmCommands, records: Sequence[JobRecord]) -> None:
    for record in records:
        if record.job is not None:
            await commands.cancel(record.job)
        await commands.cancel_named(record.name)


async def _close(files: SlurmFiles, left: dict[str, JobRecord], rows: Sequence[JobRow]) -> None:
    """Close the records of jobs that have ended, and remove them from ``left``."""
    for name, record in list(left.items()):
        states = [row.course for row in rows if row.name == name]
        # If the cluster restarts a doubtful job, its stop mark prevents it from doing anything.
        if all(state in (Course.ENDED, Course.DOUBTFUL) for state in states):
            ended = next((row.state for row in rows if row.name == name), "cancelled")
            await to_thread.run_sync(files.write_record, evolve(record, ended=f"found and ended: {ended}"))
            await to_thread.run_sync(files.remove_bootstrap, name)
            del left[name]
