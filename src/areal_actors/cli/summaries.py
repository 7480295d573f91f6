"""How commands end: one JSON object for programs, and at a terminal a few lines with the commands that come next."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from areal_actors.config import RunConfig
    from areal_actors.dashboard import RunSummary


def print_summary(document: Mapping[str, Any], text: str, *, is_json: bool) -> None:
    """Print ``document`` as one line of JSON if a program reads it or ``is_json`` is set, and ``text`` otherwise."""
    click.echo(text if sys.stdout.isatty() and not is_json else json.dumps(document))


def format_summary(
    summary: RunSummary, config: RunConfig, *, command: str, path: Path, overrides: Iterable[str] = ()
) -> str:
    """Return the summary of the run that ``areal-actors <command> <path> <overrides>`` has run, for people."""
    from areal_actors.dashboard import DisplayStyle, RunDirectory
    from areal_actors.dashboard.display import format_seconds
    from areal_actors.dashboard.run_record import read_record
    from areal_actors.domain import RunStatus

    record = read_record(RunDirectory(path=summary.run_dir))
    is_finished = record is not None and record.status is RunStatus.FINISHED
    reason = f" ({record.reason})" if record is not None and record.reason else ""
    lines = [f"{summary.steps} of {config.total_steps} steps in {format_seconds(summary.seconds)}{reason}"]
    for name, first, last in (
        ("reward", summary.reward_first, summary.reward_last),
        ("held out", summary.eval_first, summary.eval_last),
    ):
        if first is not None and last is not None:
            # Equal numbers are those of the only one.
            lines.append(f"{name} {last:.3f}" if first == last else f"{name} {first:.3f} -> {last:.3f}")
    # A display has said it already.
    if summary.verdict is not None and config.logging.display is DisplayStyle.NONE:
        lines.append(f"This run did not learn: {summary.verdict}")
    run, job = shorten(summary.run_dir), shlex.join([str(path), *overrides])
    following = [f"view {run}"]
    if config.held_out_sets and not config.missing_agents:
        following.append(f"eval {job} --model {run}")
    if is_finished:
        lines.append(f"weights: {run}/weights")
    else:
        # The weights of the last checkpoint.
        following.append(f"export {run}")
        place = "" if summary.run_dir == config.run_directory.path else f" --run-dir {run}"
        following.append(f"{command} {job} --resume{place}")
    return "\n".join([*lines, "Next:", *(f"  areal-actors {words}" for words in following)])


def shorten(path: Path) -> str:
    """Return ``path`` as an argument of a shell, relative to the working directory if it is below it."""
    return shlex.quote(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))
