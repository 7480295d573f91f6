"""``areal-actors tasks``: check task directories."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import click

from areal_actors.cli.explaining import EXIT_FAILED, explains_errors, verbose_option
from areal_actors.errors import ConfigError
from areal_actors.lib.plugins import PluginGroup, install_advice

if TYPE_CHECKING:
    from areal_actors.sandbox import SandboxConfig
    from areal_actors_environments.harbor import TaskDirectory

_sandbox = click.option(
    "--sandbox",
    "backend",
    type=click.Choice(["bubblewrap", "none"]),
    default="bubblewrap",
    show_default=True,
    help="Where programs of the tasks run; none is for tasks that you trust.",
)


@click.group()
def tasks() -> None:
    """Check task directories in Harbor's format."""


@tasks.command()
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False, exists=True))
@_sandbox
@verbose_option
@explains_errors
def check(*, directory: Path, backend: str) -> None:
    """Run the solution of each task in DIRECTORY, and an agent that does nothing.

    A task is good if its verifier gives the solution 1 and nothing 0. Exits with 1 if one is not.

    \b
    Example:
      areal-actors tasks check examples/tasks
    """  # noqa: D301 - a real backspace tells click to keep the lines
    from areal_actors_environments.harbor import find_task_directories, load_task

    config = _open_sandbox(backend)
    found = [load_task(path) for path in find_task_directories(directory)]
    num_bad = 0
    for task in found:
        solved, idle, reason = anyio.run(_grade_both, task, config)
        is_good = (solved, idle) == (1.0, 0.0)
        num_bad += not is_good
        rewards = " ".join("-" if reward is None else f"{reward:g}" for reward in (solved, idle))
        click.echo(f"{'ok ' if is_good else 'BAD'} {task.name}: solution and nothing give {rewards}{reason}")
    click.echo(f"{len(found) - num_bad} of {len(found)} tasks are good.")
    if num_bad:
        raise SystemExit(EXIT_FAILED)


async def _grade_both(task: TaskDirectory, config: SandboxConfig) -> tuple[float | None, float | None, str]:
    """Return the rewards of the solution and of nothing, and the first reason for one that is missing."""
    from areal_actors.errors import DatasetError, EpisodeError, SandboxError
    from areal_actors_environments.task_directories import check_task, grade_solution

    rewards: list[float | None] = []
    reason = ""
    for is_solved in (True, False):
        try:
            check_task(task, config)
            rewards.append((await grade_solution(task, config, is_solved=is_solved)).reward)
        except (DatasetError, EpisodeError, SandboxError) as error:
            rewards.append(None)
            reason = reason or f"\n    {error}"
    return rewards[0], rewards[1], reason


def _open_sandbox(backend: str) -> SandboxConfig:
    """Return the settings of the sandbox. Raises ``SandboxError`` if it cannot be opened here."""
    from areal_actors.sandbox import SandboxConfig, create_sandbox

    if advice := install_advice(PluginGroup.SANDBOXES, backend):
        raise ConfigError(f"{backend} {advice}, or use --sandbox none")
    config = SandboxConfig(backend=backend)
    create_sandbox(config.backend).check(config)
    return config
