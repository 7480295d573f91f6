"""Commands for the results of runs: ``report``, ``export`` and ``models``."""

from __future__ import annotations

import json
from difflib import get_close_matches
from pathlib import Path

import click

from areal_actors.cli.explaining import explains_errors
from areal_actors.cli.options import verbose_option
from areal_actors.errors import ConfigError

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
@click.option(
    "--format",
    "form",
    default="weights",
    show_default=True,
    metavar="[weights|verl|trl|slime|prime-rl]",
    help="What to export: the weights, or the rows for another trainer.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where rows are written, instead of RUN_DIR/exports/<format>.",
)
@click.option("--steps", metavar="FIRST:LAST", help="The training steps whose rows are exported, instead of all.")
@click.option("--force", is_flag=True, help="Replace rows that were exported to the same directory before.")
@verbose_option
@explains_errors
def export(*, run_dir: Path, form: str, output: Path | None, steps: str | None, force: bool) -> None:
    """Write the weights of RUN_DIR, or its rows in the format of another trainer.

    The weights are those of the newest checkpoint of a run that has not finished; a run that finishes writes them
    itself. RUN_DIR/weights is written completely or not at all; transformers and inference servers can load it.

    Rows are those that the run dumped (logging.row_dumps.every_steps): exact tokens, masks, log-probabilities, rewards
    and advantages, one branch of a session each.

    \b
    Examples:
      areal-actors export runs/tool_agent/trial
      areal-actors export runs/tool_agent/trial --format trl
      areal-actors export runs/tool_agent/trial --format slime --steps 3:10 --output /data/rows
    """  # noqa: D301 - a real backspace tells click to keep the lines
    if form != "weights":
        from areal_actors.interchange import FORMATS
        from areal_actors.run.exporting import export_run_rows, parse_steps

        chosen = None if steps is None else parse_steps(steps)
        if form not in FORMATS and get_close_matches(form, ["weights"]):
            raise ConfigError(f"There is no format {form!r}; did you mean weights?")
        exported = export_run_rows(run_dir, form, output=output, steps=chosen, replace=force)
        click.echo(json.dumps(exported.to_json()))
        return
    if output is not None or steps is not None:
        raise ConfigError("--output and --steps are for rows; weights are written to RUN_DIR/weights")
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
