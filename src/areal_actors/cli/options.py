"""Arguments and options shared by several commands."""

from __future__ import annotations

from pathlib import Path

import click

__all__ = ["config_argument", "overrides_argument", "resume_option", "run_dir_option", "verbose_option"]

config_argument = click.argument("config", type=click.Path(path_type=Path))
overrides_argument = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
resume_option = click.option("--resume", is_flag=True, help="Go on from the last checkpoint of this run.")
run_dir_option = click.option(
    "--run-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where the run is written, instead of <fileroot>/<experiment_name>/<trial_name>.",
)
verbose_option = click.option("--verbose", is_flag=True, help="Log details, and show tracebacks.")
