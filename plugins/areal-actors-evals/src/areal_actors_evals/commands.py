"""The command ``areal-actors verify``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from areal_actors.cli.explaining import EXIT_FAILED, explains_errors, verbose_option


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--strict", is_flag=True, help="Fail also if a row has no seal or a turn has no digest.")
@click.option("--json", "is_json", is_flag=True, help="One JSON object in place of the text.")
@verbose_option
@explains_errors
def verify(*, run_dir: Path, strict: bool, is_json: bool) -> None:
    """Check that the rows of RUN_DIR are the answers that the engine gave. Nothing is written.

    Rows are those that the run dumped (logging.row_dumps.every_steps), turns those in its journal. Each difference is
    printed with its file, row, turn and token; the exit code is then 1. Turns without a
    digest and rows without a seal are counted.

    \b
    Examples:
      areal-actors verify runs/tool_agent/trial
      areal-actors verify runs/tool_agent/trial --strict --json
    """  # noqa: D301 - a real backspace tells click to keep the lines
    from areal_actors_evals.verifying import format_verification, verify_run

    found = verify_run(run_dir)
    click.echo(json.dumps(found.to_json()) if is_json else format_verification(found))
    if found.differences or (strict and not found.is_complete):
        sys.exit(EXIT_FAILED)
