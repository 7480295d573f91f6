"""Attack rewards from a seed: ``python -m tests.redteam --count 10000 --seed 0``; exit 1 if an attack succeeds."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import anyio
import click
from tests.redteam.attacks import Attacker, open_arena
from tests.redteam.files import play_files

from areal_actors.errors import SandboxError

__all__ = ["main", "play"]

_BLOCK = 100
"""Attacks between two looks at the sessions."""


async def play(seed: int, count: int) -> tuple[Counter[int], list[str]]:
    """Statuses of ``count`` attacks, and those that succeeded.

    An attack succeeds if it is answered with 200, if a reward or an end changed, or if the runner's own reward does not
    stand in the end. A replayed request may be answered: its session has ended, and another end changes nothing.
    """
    statuses: Counter[int] = Counter()
    successes: list[str] = []
    async with open_arena() as arena:
        attacker = Attacker(Random(seed), arena.victims, captured=arena.captured)
        before = await arena.state()
        for number in range(count):
            attack = attacker.attack()
            answer = await arena.send(attack)
            statuses[answer.status_code] += 1
            if answer.is_success and not attack.is_replay:
                successes.append(f"{number}: {attack} was answered {answer.status_code} {answer.text[:200]}")
            if number % _BLOCK == _BLOCK - 1 and (now := await arena.state()) != before:
                successes.append(f"{number - _BLOCK + 1} to {number}: {before} became {now}")
                before = now
        for session in (arena.own, arena.other):
            honest = await arena.complete(session["completion_key"])
            rewards = [turn.reward for turn in await arena.finalize(session, 0.5)]
            if not honest.is_success or rewards != [None, None, 0.5]:
                successes.append(f"in the end, {session['session_id']} has the rewards {rewards}, {honest.status_code}")
    return statuses, successes


@click.command()
@click.option("--count", default=10_000, show_default=True, help="Attacks on each event loop, and on files.")
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
        statuses, successes = anyio.run(play, seed + number, count, backend=backend)
        click.echo(f"{backend}: {count} attacks, {len(successes)} successes; statuses {dict(sorted(statuses.items()))}")
        click.echo("\n".join(successes[:20]))
        failed = failed or bool(successes)
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
