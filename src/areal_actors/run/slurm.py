"""The command ``areal-actors slurm``: list the jobs that runs have on a cluster, from their records, and cancel them.

Records are in the directories of runs (``schedulers.slurm.files``); the state of the jobs is queried from the cluster.
A run whose controller is alive ends its jobs itself: ``reap`` skips it, ``cancel`` does not.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import anyio
from attrs import asdict, frozen
from rich.console import Console
from rich.table import Table

from areal_actors.errors import SchedulerError
from areal_actors.lib.telemetry import get_logger
from areal_actors.schedulers.slurm import JobRecord, SlurmCommands, cancel_records, find_slurm_files
from areal_actors.schedulers.slurm.queue import JobPhase, JobRow

__all__ = ["KnownJob", "cancel_jobs", "format_jobs", "format_json", "list_known_jobs", "reap_jobs"]

_log = get_logger(__name__)

_CANCEL_SECONDS = 120.0


@frozen(kw_only=True)
class KnownJob:
    """A recorded job and its current state."""

    run: str
    """The directory of the run."""
    name: str
    worker: str
    life: int
    job: int | None
    state: str
    """The state that Slurm reports; ``gone`` if the job has ended, ``missing`` if the cluster does not know it."""
    nodes: str = ""
    time_left: str = ""
    reason: str = ""
    created_at: float = 0.0


def list_known_jobs(root: Path) -> tuple[KnownJob, ...]:
    """Return the jobs of a run directory, or of all runs below it.

    Raises:
        SchedulerError: some jobs have not ended, and the cluster does not report their state.
    """
    found: list[KnownJob] = []
    for files in find_slurm_files(root):
        records = files.read_records()
        rows: dict[str, JobRow] = {}
        if live := [record.name for record in records if record.ended is None]:
            rows = {row.name: row for row in anyio.run(_commands().list_jobs, live)}
        is_alone = bool(rows) and not files.is_held
        for record in records:
            row = rows.get(record.name)
            reason = "" if row is None else row.reason
            if row is not None and is_alone:
                gone = "its controller is gone"
                reason = f"{reason}; {gone}" if row.phase is JobPhase.WAITING else gone
            job = KnownJob(
                run=str(files.path.parent),
                name=record.name,
                worker=record.worker,
                life=record.life,
                job=record.job if row is None else row.job,
                state="gone" if record.ended is not None else "missing" if row is None else row.state,
                nodes="" if row is None else row.nodes,
                time_left="" if row is None else row.time_left,
                reason=record.ended or reason,
                created_at=record.created_at,
            )
            found.append(job)
    return tuple(found)


def _commands() -> SlurmCommands:
    commands = SlurmCommands()
    commands.check()
    return commands


def cancel_jobs(root: Path) -> tuple[JobRecord, ...]:
    """Cancel every job of a run directory, or of all runs below it. Raises ``SchedulerError`` if some may still run."""
    return _cancel_runs(root)


def reap_jobs(root: Path) -> tuple[JobRecord, ...]:
    """Cancel the jobs of runs whose controller is gone. Raises ``SchedulerError`` if some may still run."""
    return _cancel_runs(root, spares_running=True)


def _cancel_runs(root: Path, *, spares_running: bool = False) -> tuple[JobRecord, ...]:
    """Cancel the jobs of each run, and raise the errors of all runs together afterwards."""
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


def format_json(jobs: Sequence[KnownJob]) -> str:
    """Format the jobs as a JSON list of objects."""
    rows: list[dict[str, Any]] = [asdict(job) for job in jobs]
    return json.dumps(rows, indent=2)


def format_jobs(jobs: Sequence[KnownJob]) -> str:
    """Format the jobs as a table."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("RUN", "WORKER", "LIFE", "JOB", "STATE", "NODES", "LEFT", "SUBMITTED", "REASON"):
        table.add_column(column, overflow="fold")
    for one in jobs:
        submitted = datetime.fromtimestamp(one.created_at, tz=UTC).strftime("%Y-%m-%d %H:%M:%SZ")
        job = "-" if one.job is None else str(one.job)
        cells = (one.run, one.worker, str(one.life), job, one.state, one.nodes, one.time_left, submitted, one.reason)
        table.add_row(*cells)
    console = Console(width=200, no_color=True)
    with console.capture() as captured:
        console.print(table, markup=False)
    return captured.get().rstrip()
