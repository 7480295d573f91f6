"""Attack rewards from a seed: ``python -m tools.redteam --count 10000 --seed 0``; exit 1 if an attack succeeds."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio
import click
from tools.redteam.files import play_files
from tools.redteam.plays import play, play_restarts

from areal_actors.errors import SandboxError

__all__ = ["main"]

_NUM_RESTARTS = 20


@click.command()
@click.option(
    "--count", default=10_000, show_default=True, help="Attacks on each event loop and service, and on files."
)
@click.option("--seed", default=0, show_default=True)
def main(count: int, seed: int) -> None:
    """Attack on both event loops."""
    try:
        with TemporaryDirectory() as directory:
            found = anyio.run(play_files, seed, count, Path(directory))
        click.echo(f"files: {count} attacks, {len(found)} successes")
        click.echo("\n".join(found))
    except SandboxError as error:
        found = []
        click.echo(f"files: {error}")
    failed = bool(found)
    for number, backend in enumerate(("asyncio", "trio")):
        with TemporaryDirectory() as directory:
            restarts = partial(play_restarts, directory=Path(directory), num_restarts=_NUM_RESTARTS)
            for title, attack in (("one run", play), (f"{_NUM_RESTARTS} restarts", restarts)):
                statuses, successes = anyio.run(attack, seed + number, count, backend=backend)
                counts = dict(sorted(statuses.items()))
                click.echo(f"{backend}, {title}: {count} attacks, {len(successes)} successes; statuses {counts}")
                click.echo("\n".join(successes[:20]))
                failed = failed or bool(successes)
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
