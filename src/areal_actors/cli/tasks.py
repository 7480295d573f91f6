"""``areal-actors tasks``: check task directories, and generate some."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import anyio
import click

from areal_actors.cli.explaining import EXIT_FAILED, explains_errors, verbose_option
from areal_actors.errors import ConfigError

if TYPE_CHECKING:
    from areal_actors.datasets import TaskDirectory
    from areal_actors.sandbox import SandboxConfig

__all__ = ["tasks"]

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
    """Check task directories in Harbor's format, and generate some."""


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
    from areal_actors.datasets import find_task_directories, load_task

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


@tasks.command()
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--package", "packages", multiple=True, required=True, help="An installed package or module with tests; several."
)
@click.option("--num", type=click.IntRange(min=1), default=100, show_default=True, help="Tasks to generate.")
@click.option(
    "--level",
    type=click.IntRange(0, 4),
    default=2,
    show_default=True,
    help="0: choose the line; 1: correct the line; 2: correct the function; 3: repair the file; 4: find it, too.",
)
@click.option("--mutations", type=click.IntRange(min=1), default=1, show_default=True, help="Mutations of a function.")
@click.option("--max-lines", type=click.IntRange(min=2), help="Of the longest function; by default, as the level says.")
@click.option("--per-function", type=click.IntRange(min=1), default=2, show_default=True, help="Tasks of one function.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Equal seeds give equal tasks.")
@click.option("--workers", type=click.IntRange(min=1), default=2, show_default=True, help="Mutants tested at once.")
@_sandbox
@verbose_option
@explains_errors
def bugs(  # noqa: PLR0917 - click passes by name
    directory: Path,
    packages: tuple[str, ...],
    num: int,
    level: int,
    mutations: int,
    max_lines: int | None,
    per_function: int,
    seed: int,
    workers: int,
    backend: str,
) -> None:
    """Write bugs in installed Python packages as task directories in DIRECTORY, and problems.jsonl.

    A function is mutated so that some tests of the package fail and others pass. The reward of a repair is the share
    of failing tests that pass, and 0 if one breaks that passed.

    \b
    Examples:
      areal-actors tasks bugs easy --package textwrap --package fractions --level 0 --num 200
      areal-actors tasks bugs hard --package networkx --level 4 --mutations 2 --workers 8
    """  # noqa: D301 - a real backspace tells click to keep the lines
    from areal_actors.bugs import BugConfig, Counts, Level, find_modules, open_bugs, write_tasks

    if directory.exists() and any(directory.iterdir()):
        raise ConfigError(f"{directory} is not empty; name another directory.")
    chosen = Level(level)
    if mutations > 1 and chosen.is_one_line:
        raise ConfigError(
            f"--mutations {mutations} are in several lines, and --level {level} asks for one; use 2 to 4."
        )
    config = BugConfig(
        seed=seed,
        num_mutations=mutations,
        max_lines=max_lines or chosen.max_lines,
        min_code_lines=chosen.min_code_lines,
        max_per_function=per_function,
        is_one_line=chosen.is_one_line,
        num_workers=workers,
    )
    modules = [module for name in packages for module in find_modules(name)]
    sandbox, counts, begun = _open_sandbox(backend), Counts(), time.monotonic()

    async def write(problems: TextIO) -> int:
        async with open_bugs(modules, config, sandbox, counts=counts) as found:
            return await write_tasks(found, chosen, directory, problems, num=num, seed=seed)

    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "problems.jsonl").open("w", encoding="utf-8") as problems:
        written = anyio.run(write, problems)
    per_minute = written / (time.monotonic() - begun) * 60
    shares = {"qualified": counts.qualified, "no test noticed": counts.survived, "broke all tests": counts.broke_all}
    told = ", ".join(f"{number / max(counts.tried, 1):.0%} {name}" for name, number in shares.items())
    click.echo(f"{written} tasks in {directory}, {per_minute:.0f} a minute. Mutants: {counts.tried}, {told}.")
    if written < num:
        click.echo("There are no more; name other packages, or raise --max-lines or --per-function.", err=True)


async def _grade_both(task: TaskDirectory, config: SandboxConfig) -> tuple[float | None, float | None, str]:
    """Return the rewards of the solution and of nothing, and the first reason for one that is missing."""
    from areal_actors.errors import DatasetError, EpisodeError, SandboxError
    from areal_actors.workflows.task_directories import check_task, grade_solution

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
    from areal_actors.sandbox import SandboxConfig, SandboxKind, create_sandbox

    config = SandboxConfig(backend=SandboxKind(backend))
    create_sandbox(config.backend).check(config)
    return config
