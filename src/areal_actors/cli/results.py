"""Commands for the results of runs: ``report``, ``export`` and ``models``."""

from __future__ import annotations

import json
from pathlib import Path

import click

from areal_actors.cli.explaining import explains_errors
from areal_actors.cli.options import verbose_option

__all__ = ["export", "models", "report"]


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@verbose_option
@explains_errors
def report(*, run_dir: Path) -> None:
    """Write the report and the learning curve of RUN_DIR again, from the files in it.

    \b
    Example:
      areal-actors report runs/tool_agent/trial
    """  # noqa: D301 - a real backspace tells click to keep the lines
    from areal_actors.dashboard import RunDirectory, write_report

    click.echo(str(write_report(RunDirectory(path=run_dir))))


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@verbose_option
@explains_errors
def export(*, run_dir: Path) -> None:
    """Write RUN_DIR/weights from the newest checkpoint of a run that has not finished.

    A run that finishes writes its weights itself. The directory is written completely or not at all; transformers and
    inference servers can load it.

    \b
    Example:
      areal-actors export runs/tool_agent/trial
    """  # noqa: D301 - a real backspace tells click to keep the lines
    from areal_actors.run.exporting import export_run

    found = export_run(run_dir)
    click.echo(json.dumps({"model": found.name, "step": found.step, "path": str(found.path)}))


@click.command()
@click.option(
    "--fileroot",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("runs"),
    show_default=True,
    help="Where runs are written.",
)
@verbose_option
@explains_errors
def models(*, fileroot: Path) -> None:
    """List the models that runs have trained, with their steps, dates and rewards.

    A name is what an agent sends as its model to a service that is running, and what RemoteSGLangEngine takes.

    \b
    Example:
      areal-actors models --fileroot runs
    """  # noqa: D301 - a real backspace tells click to keep the lines
    from areal_actors.models import Catalogue, format_models

    click.echo(format_models(Catalogue(root=fileroot).list()))
