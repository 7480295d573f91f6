"""The command ``areal-actors slurm``: cancel the jobs that runs have on a cluster, from their records.

Records are in the directories of runs (``schedulers.slurm.files``). ``squeue`` lists the jobs.
A run whose controller is alive ends its jobs itself: ``reap`` skips it, ``cancel`` does not.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path

import anyio

from areal_actors.errors import SchedulerError
from areal_actors.lib.telemetry import get_logger
from areal_actors.schedulers.slurm import JobRecord, SlurmCommands, cancel_records, find_slurm_files

_log = get_logger(__name__)

_CANCEL_SECONDS = 120.0


def _commands() -> SlurmCommands:
    commands = SlurmCommands()
    commands.check()
    return commands


def cancel_jobs(root: Path, *, spares_running: bool = False) -> tuple[JobRecord, ...]:
    """Cancel every job of a run directory, or of all runs below it.

    With ``spares_running``, runs whose controller is alive keep their jobs. Raises ``SchedulerError`` if some jobs may
    still run, with the errors of all runs.
    """
    ended: list[JobRecord] = []
    wrong: list[str] = []
    for files in find_slurm_files(root):
        try:
            if spares_running and files.is_held:
                _log.warning("running_job_left_alone", run_dir=str(files.path.parent))
                continue
            # The lock keeps a restarted controller from adopting the jobs while they are being cancelled.
            with files.hold() if spares_running else nullcontext():
                if any(record.ended is None for record in files.read_records()):
                    cancel = partial(cancel_records, files, _commands(), timeout_seconds=_CANCEL_SECONDS)
                    ended += anyio.run(cancel)
        except SchedulerError as error:
            wrong.append(f"{files.path.parent}: {error}")
    if wrong:
        raise SchedulerError("\n".join(wrong))
    return tuple(ended)
