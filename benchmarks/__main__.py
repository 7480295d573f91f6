"""The command line of the benchmarks: run them and see the gates, or compare two runs.

::

    python -m benchmarks                      all of them
    python -m benchmarks kernel proxy --quick a short look at two
    python -m benchmarks compare A.json B.json

Each benchmark runs in a process of its own, one after another, so that none inherits the heap, the threads or the
caches of the one before, and so that one that fails does not take the others with it.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from benchmarks.harness import Result, Skipped
from benchmarks.machine import ROOT, describe_machine, load_average
from benchmarks.report import Report, compare, create_changes_table, create_table
from rich.console import Console

NAMES = ("kernel", "journal", "proxy", "engine", "trainer", "default_job")
"""Quick ones first: what is wrong shows early."""

RESULTS = ROOT / "benchmarks" / "results"
_WIDTH = 150
"""Columns of the table where there is no terminal to ask."""
_NUM_LINES_OF_FAILURE = 12


class _RunUnlessTold(click.Group):
    """``run`` is the command where none is named."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        known = {*self.commands, *ctx.help_option_names}
        return super().parse_args(ctx, args if args and args[0] in known else ["run", *args])


@click.group(cls=_RunUnlessTold, help=(__doc__ or "").partition("::")[0])
def main() -> None:
    """Do what the subcommand says."""


@main.command("run")
@click.argument("names", nargs=-1, type=click.Choice(NAMES))
@click.option("--quick", is_flag=True, help="Fewer rounds and smaller sizes: a look, not a measurement.")
@click.option("--json", "path", type=click.Path(dir_okay=False, path_type=Path), help="Where the figures are written.")
def run_benchmarks(names: tuple[str, ...], *, quick: bool, path: Path | None) -> None:
    """Run benchmarks (all, unless named), print a table and write the figures as JSON.

    The exit code is 1 if a benchmark failed to run. A gate that is missed is shown, and is for a reader to judge: on a
    busy machine times say little.
    """
    report = run_all(names or NAMES, quick=quick)
    path = path or RESULTS / f"{report.facts['date'].replace(':', '')}.json"
    report.save(path)
    console = _console()
    console.print(create_table(report))
    console.print(f"{len(report.results)} figures, {report.num_missed} beyond their gates; written to {path}")
    if report.failures:
        sys.exit(1)


@main.command("compare")
@click.argument("old", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("new", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--noise", type=click.FloatRange(min=0), help="Changes up to this share are chance, such as 0.2.")
def compare_reports(old: Path, new: Path, *, noise: float | None) -> None:
    """Print the figures of two runs side by side and mark what changed by more than chance."""
    try:
        changes = compare(Report.load(old), Report.load(new), noise=noise)
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    _console().print(create_changes_table(changes))


@main.command("measure", hidden=True)
@click.argument("name", type=click.Choice(NAMES))
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--quick", is_flag=True)
def measure_one(name: str, path: Path, *, quick: bool) -> None:
    """Run one benchmark in this process and write its figures to ``path``: what a child of ``run`` does."""
    try:
        results: list[Result] = importlib.import_module(f"benchmarks.{name}").run(quick)
        document = {"results": [result.to_json() for result in results]}
    except Skipped as skipped:
        document = {"skipped": str(skipped)}
    path.write_text(json.dumps(document), encoding="utf-8")


def run_all(names: Iterable[str], *, quick: bool) -> Report:
    """Run each of ``names`` in a process of its own, in this order."""
    facts: dict[str, Any] = describe_machine() | {"quick": quick, "load_before": load_average()}
    facts["date"] = datetime.now(UTC).isoformat(timespec="seconds")
    results: list[Result] = []
    failures: dict[str, str] = {}
    skips: dict[str, str] = {}
    for name in names:
        print(f"{name} …", file=sys.stderr, flush=True)
        try:
            results += measure_in_child(name, quick=quick)
        except Skipped as skipped:
            skips[name] = str(skipped)
        except RuntimeError as error:
            failures[name] = str(error)
    facts["load_after"] = load_average()
    return Report(results=tuple(results), failures=failures, skips=skips, facts=facts)


def measure_in_child(name: str, *, quick: bool) -> list[Result]:
    """The figures of one benchmark.

    Raises ``Skipped`` if it cannot run here, or ``RuntimeError`` with the end of what it printed if it failed.
    """
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "results.json"
        command = [sys.executable, "-m", "benchmarks", "measure", name, str(path), *(["--quick"] if quick else [])]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        if done.returncode == 0:
            document = json.loads(path.read_text(encoding="utf-8"))
            if "skipped" in document:
                raise Skipped(document["skipped"])
            return [Result.from_json(result) for result in document["results"]]
    printed = done.stdout.decode(errors="replace").strip().splitlines()
    print("\n".join(printed[-_NUM_LINES_OF_FAILURE:]), file=sys.stderr)
    raise RuntimeError(f"exit code {done.returncode}: {printed[-1] if printed else 'nothing was printed'}")


def _console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=_WIDTH)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks")
