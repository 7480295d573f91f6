"""Commands to use before a run: ``settings`` lists all settings, ``doctor`` checks whether a job can run here."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from areal_actors.cli.explaining import EXIT_FAILED, explains_errors
from areal_actors.cli.options import config_argument, overrides_argument, verbose_option

__all__ = ["doctor", "settings"]


@click.command()
@click.argument("section", required=False)
@verbose_option
@explains_errors
def settings(*, section: str | None) -> None:
    """Print every setting as commented YAML: what it must be, its default, what its section is for.

    \b
    Examples:
      areal-actors settings
      areal-actors settings trainer.objective
    """  # noqa: D301 - a real backspace tells click to keep the lines
    from areal_actors.config import format_reference, settings_class

    click.echo(format_reference(settings_class(section or "")), nl=False)


@click.command()
@config_argument
@overrides_argument
@click.option("--submit", is_flag=True, help="Try a job of each role on the cluster, and wait for it.")
@click.option("--json", "is_json", is_flag=True, help="Print one JSON object per check.")
@verbose_option
@explains_errors
def doctor(*, config: Path, overrides: tuple[str, ...], submit: bool, is_json: bool) -> None:
    """Check whether the job of the YAML file CONFIG can run here, before it waits in a queue.

    It checks packages, the model, problems, the agent, the run directory, ports, devices, inference servers and the
    cluster, as far as CONFIG uses them, and suggests what to do about problems. It leaves nothing running. The exit
    code is 1 if the job cannot run.

    \b
    Example:
      areal-actors doctor examples/tool_agent.yaml
      areal-actors doctor examples/slurm.yaml --submit
    """  # noqa: D301 - a real backspace tells click to keep the lines
    from areal_actors.config import load_config
    from areal_actors.run.doctor import Verdict, examine, format_finding

    verdicts = set()
    for finding in examine(load_config(config, overrides), has_trial=submit):
        click.echo(finding.to_json() if is_json else format_finding(finding))
        verdicts.add(finding.verdict)
    if Verdict.FAILED in verdicts:
        sys.exit(EXIT_FAILED)
