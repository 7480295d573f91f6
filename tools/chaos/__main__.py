"""``python -m tools.chaos --kills 200 --seed 1``: kill a service and its agents, and see that nothing is lost.

Prints what was killed while it did what, what there was, and what is wrong with it; a failure names the seed that
repeats the schedule, and keeps everything that was written down.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import click
from tools.chaos.judge import Verdict, judge, read_evidence
from tools.chaos.play import Outcome, Profile, play
from tools.chaos.processes import Failed

PROFILES = {"usual": 200, "long": 1000}


def main() -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.chaos")
    parser.add_argument("--profile", choices=PROFILES, default="usual", help="200 kills, or 1,000")
    parser.add_argument("--kills", type=int, help="so many instead")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--directory", type=Path, help="where everything is written down, and kept")
    options = parser.parse_args()
    directory = options.directory or Path(tempfile.mkdtemp(prefix="chaos-"))
    directory.mkdir(parents=True, exist_ok=True)
    kills = PROFILES[options.profile] if options.kills is None else options.kills
    click.echo(f"{kills} kills, seed {options.seed}, in {directory}")
    try:
        outcome = play(directory.absolute(), seed=options.seed, profile=Profile(kills=kills))
        verdict = judge(read_evidence(directory))
        problems = (*outcome.problems, *verdict.problems)
        click.echo(format_report(outcome, verdict))
    except Failed as error:
        problems = (str(error),)
    if problems:
        click.echo("\n  ".join((f"\n{len(problems)} things are wrong:", *problems[:50])))
        click.echo(
            f"\nReplay: python -m tools.chaos --kills {kills} --seed {options.seed}; what was written is in {directory}"
        )
        return 1
    if options.directory is None:
        shutil.rmtree(directory)
    return 0


def format_report(outcome: Outcome, verdict: Verdict) -> str:
    """What was done, and what there was, as a table."""
    usual = statistics.median(outcome.start_seconds) if outcome.start_seconds else 0.0
    return "\n".join(
        (
            _section("Killed", outcome.kills),
            _section("The service was killed while", outcome.stages),
            _section("Of these, by itself, at", outcome.traps),
            _section("What there was", verdict.counts),
            f"\n{outcome.lives} lives of the service, {usual:.1f} s to start; {outcome.seconds:.0f} s in all.",
        )
    )


def _section(title: str, numbers: Mapping[str, int]) -> str:
    lines: Iterable[str] = (f"  {name:<40}{number:>8}" for name, number in sorted(numbers.items()))
    return "\n".join((f"\n{title}", *lines))


if __name__ == "__main__":
    sys.exit(main())
