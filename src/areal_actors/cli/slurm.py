"""The command ``slurm``: the jobs of runs on a cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from areal_actors.cli.explaining import explains_errors
from areal_actors.cli.options import verbose_option

if TYPE_CHECKING:
    from areal_actors.schedulers.slurm import JobRecord

__all__ = ["slurm"]


_runs = click.argument(
    "directory", type=click.Path(path_type=Path, file_okay=False, exists=True), default=Path("runs"), required=False
)
_as_json = click.option("--json", "is_json", is_flag=True, help="For programs: one JSON document.")


@click.group()
def slurm() -> None:
    """Manage the jobs of runs on a Slurm cluster.

    DIRECTORY is that of a run, or one with runs below it, such as the setting fileroot. A run ends its jobs itself;
    these commands are for jobs of a run that was killed, or whose cluster did not answer.
    """


@slurm.command("status")
@_runs
@_as_json
@verbose_option
@explains_errors
def show_jobs(*, directory: Path, is_json: bool) -> None:
    """List the jobs of DIRECTORY, and their states.

    \b
    Examples:
      areal-actors slurm status runs/sums/trial
      areal-actors slurm status --json
    """  # noqa: D301 - a real backspace tells click to keep the lines
    from areal_actors.run.slurm import format_jobs, format_json, list_known_jobs

    jobs = list_known_jobs(directory)
    click.echo(format_json(jobs) if is_json else format_jobs(jobs))


@slurm.command("cancel")
@_runs
@_as_json
@verbose_option
@explains_errors
def cancel_jobs_of(*, directory: Path, is_json: bool) -> None:
    """End every job of DIRECTORY, including those of live runs, and wait until they are gone. Repeating it is safe."""
    from areal_actors.run.slurm import cancel_jobs

    _tell_ended(cancel_jobs(directory), is_json=is_json)


@slurm.command("reap")
@_runs
@_as_json
@verbose_option
@explains_errors
def reap_jobs_of(*, directory: Path, is_json: bool) -> None:
    """End the jobs that killed runs in DIRECTORY have left, and wait until they are gone.

    Live runs are not affected.
    """
    from areal_actors.run.slurm import reap_jobs

    _tell_ended(reap_jobs(directory), is_json=is_json)


def _tell_ended(records: tuple[JobRecord, ...], *, is_json: bool) -> None:
    if is_json:
        click.echo(json.dumps([{"name": one.name, "worker": one.worker, "job": one.job} for one in records]))
    else:
        said = ", ".join(f"{one.job or one.name} ({one.worker})" for one in records)
        click.echo(f"Ended: {said}." if records else "There was nothing to end.")
