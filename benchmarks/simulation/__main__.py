"""The command line of the model.

::

    python -m benchmarks.simulation --sessions 10000 --engines 1000
    python -m benchmarks.simulation --sessions 1000 --engines 100 --one-process
    python -m benchmarks.simulation validate --sessions 1000
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from attrs import evolve
from benchmarks.machine import describe_machine, load_average
from benchmarks.simulation.agents import Workload
from benchmarks.simulation.findings import format_findings, to_json
from benchmarks.simulation.model import Scenario, run_scenario


class _RunUnlessTold(click.Group):
    """``run`` is the command where none is named."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        known = {*self.commands, *ctx.help_option_names}
        return super().parse_args(ctx, args if args and args[0] in known else ["run", *args])


@click.group(cls=_RunUnlessTold, help=(__doc__ or "").partition("::")[0])
def main() -> None:
    """Do what the subcommand says."""


@main.command()
@click.option("--sessions", default=10_000, show_default=True, help="Sessions that live at once.")
@click.option("--engines", default=1_000, show_default=True)
@click.option("--group-size", default=8, show_default=True)
@click.option("--live-share", default=0.45, show_default=True, help="Of the members of a running group, at any time.")
@click.option("--eta", default=4, show_default=True, help="How stale a group may be when it is trained.")
@click.option("--warm-up", default=120.0, show_default=True, help="Virtual seconds before anything is measured.")
@click.option("--seconds", default=60.0, show_default=True, help="Virtual seconds that are measured.")
@click.option("--one-process", is_flag=True, help="Let computing take its time, on the one core of one process.")
@click.option("--backend", type=click.Choice(["asyncio", "trio"]), default="asyncio", show_default=True)
@click.option("--json", "path", type=click.Path(dir_okay=False, path_type=Path), help="Where the figures are written.")
def run(
    *,
    sessions: int,
    engines: int,
    group_size: int,
    live_share: float,
    eta: int,
    warm_up: float,
    seconds: float,
    one_process: bool,
    backend: str,
    path: Path | None,
) -> None:
    """Simulate a service, and say what saturates first."""
    scenario = Scenario(
        num_sessions=sessions,
        num_engines=engines,
        group_size=group_size,
        live_share=live_share,
        max_staleness=eta,
        warm_up_seconds=warm_up,
        measured_seconds=seconds,
        is_one_process=one_process,
        backend=backend,
    )
    before = load_average()
    measured = run_scenario(scenario)
    print(format_findings(measured))
    _write(path, to_json(measured), before)


@main.command()
@click.option("--sessions", default=1_000, show_default=True, help="Sessions that live at once.")
@click.option("--engines", default=100, show_default=True)
@click.option("--tool-seconds", default=1.0, show_default=True, help="The median of what agents wait between turns.")
@click.option("--warm-up", default=30.0, show_default=True, help="Seconds before anything is measured.")
@click.option("--seconds", default=30.0, show_default=True, help="Seconds that are measured.")
@click.option("--json", "path", type=click.Path(dir_okay=False, path_type=Path), help="Where the figures are written.")
def validate(
    *, sessions: int, engines: int, tool_seconds: float, warm_up: float, seconds: float, path: Path | None
) -> None:
    """Run the same sessions over real sockets in real time, and in the model, and compare."""
    from benchmarks.simulation.validation import format_comparison, validate

    workload = Workload()
    scenario = Scenario(
        workload=evolve(workload, tool_seconds=evolve(workload.tool_seconds, median=tool_seconds)),
        num_sessions=sessions,
        num_engines=engines,
        warm_up_seconds=warm_up,
        measured_seconds=seconds,
        is_external=True,
        is_one_process=True,
    )
    before = load_average()
    comparison = validate(scenario)
    print(format_comparison(comparison))
    _write(path, {"figures": comparison}, before)


def _write(path: Path | None, figures: dict[str, Any], load_before: list[float]) -> None:
    if path is not None:
        facts = describe_machine() | {"load_before": load_before, "load_after": load_average()}
        path.write_text(json.dumps({"facts": facts} | figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
