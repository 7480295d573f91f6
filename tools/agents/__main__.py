"""``python -m tools.agents --environments DIR [agent ...]``: run the agents, write the results and their page."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import anyio
import structlog
from tools.agents.page import load_results, save_results
from tools.agents.running import Verdict, load_programs, run_agent, to_document


def main() -> int:
    """Run the agents that the command line names; all of them if it names none. Return 1 if one of them fails."""
    programs = load_programs()
    arguments = _parse_arguments(list(programs))
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    has_failed = False
    for name in arguments.agents or programs:
        executables = programs[name].find(arguments.environments.absolute())
        if executables is None:
            verdict = Verdict(report=None, seconds=0.0, faults=("it is not installed",))
        else:
            verdict = anyio.run(
                lambda name=name, folder=executables: run_agent(programs[name], folder, log=arguments.log)
            )
        _print(name, verdict)
        has_failed |= bool(verdict.faults)
        if not arguments.dry:
            save_results(load_results() | {name: to_document(programs[name], verdict)}, programs.values())
    return int(has_failed)


def _parse_arguments(names: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.agents", description=__doc__)
    parser.add_argument("agents", nargs="*", metavar="agent", help=", ".join(names))
    parser.add_argument("--environments", type=Path, required=True, help="directory with one environment an agent")
    parser.add_argument("--dry", action="store_true", help="write neither results nor page")
    parser.add_argument("--log", type=Path, help="where the output of the agents goes")
    arguments = parser.parse_args()
    if unknown := set(arguments.agents) - set(names):
        parser.error(f"no agent is called {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    return arguments


def _print(name: str, verdict: Verdict) -> None:
    report = verdict.report
    figures = "" if report is None else f"{report.turns} turns, {report.linked}/{report.follow_ups} linked, {report}"
    print(f"{name:16} {'fails' if verdict.faults else 'works'} {verdict.seconds:5.1f} s {figures}")
    for fault in verdict.faults:
        print(f"    {fault}")


if __name__ == "__main__":
    sys.exit(main())
