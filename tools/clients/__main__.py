"""``python -m tools.clients --environments DIR [client ...]``: run the clients, write the results and their page."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import anyio
import structlog
from tools.clients.judge import Verdict
from tools.clients.page import load_results, save_results
from tools.clients.running import SCENARIOS, Environment, load_environments, run_client, to_document
from tools.clients.staging import ScriptedEngine, open_stage


def main() -> int:
    """Run what the command line names; all clients if it names none. Fails if one of them fails where it should not."""
    environments = load_environments()
    arguments = _parse_arguments(list(environments))
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    has_failed = False
    for name in arguments.clients or environments:
        verdicts = anyio.run(_run, environments[name], arguments)
        has_failed |= _print(name, verdicts)
        if not arguments.scenario:
            results = load_results() | {name: to_document(environments[name], verdicts)}
            save_results(results, environments.values())
    return int(has_failed)


def _parse_arguments(names: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.clients", description=__doc__)
    parser.add_argument("clients", nargs="*", metavar="client", help=", ".join(names))
    parser.add_argument("--environments", type=Path, required=True, help="directory with one environment a client")
    parser.add_argument("--scenario", action="append", help="only this one; nothing is written")
    parser.add_argument("--log", type=Path, help="where the clients' own output goes")
    arguments = parser.parse_args()
    if unknown := set(arguments.clients) - set(names):
        parser.error(f"no client is called {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    return arguments


async def _run(environment: Environment, arguments: argparse.Namespace) -> Mapping[str, Mapping[str, Verdict]]:
    python = (arguments.environments / environment.name / "bin" / "python").absolute()
    async with open_stage(ScriptedEngine) as stage:
        return await run_client(
            stage, environment, python, scenarios=arguments.scenario or tuple(SCENARIOS), log=arguments.log
        )


def _print(name: str, verdicts: Mapping[str, Mapping[str, Verdict]]) -> bool:
    """One line a scenario. Returns whether one of them failed."""
    for protocol, played in verdicts.items():
        for scenario, verdict in played.items():
            links = f"{verdict.links.linked}/{verdict.links.follow_ups}" if verdict.links.follow_ups else ""
            print(f"{name:14} {protocol:10} {scenario:18} {verdict.outcome:15} {links:6} {verdict.why or ''}")
    return any(verdict.outcome == "fails" for played in verdicts.values() for verdict in played.values())


if __name__ == "__main__":
    sys.exit(main())
