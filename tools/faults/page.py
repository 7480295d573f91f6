"""The tables of faults: which test covers which fault of which role, and the page made from them."""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from attrs import frozen

__all__ = [
    "FAULTS",
    "KINDS",
    "MATRIX",
    "NAMING",
    "PAGE",
    "PROCESS_FAULTS",
    "RESULTS",
    "ROLES",
    "ROOT",
    "Cell",
    "format_page",
    "load_cells",
    "load_seconds",
]

ROOT = Path(__file__).parents[2]
MATRIX = Path(__file__).with_name("matrix.toml")
RESULTS = ROOT / "benchmarks" / "results" / "faults.jsonl"
PAGE = ROOT / "docs" / "results" / "faults.md"

ROLES = {
    "processes": ("trainer", "rank", "engine", "inference server", "proxy", "sessions", "rollout", "controller"),
    "actors": (
        *("capacity granter", "session manager", "intake", "embedded engine", "replica", "exporter", "runner"),
        *("trainer", "proxy", "entry", "agent"),
    ),
}
PROCESS_FAULTS = {
    "kill -9": "kill",
    "requeue": "requeue",
    "scancel": "cancel",
    "node crash": "crash",
    "node drain": "drain",
    "SIGSTOP": "stop",
    "slow start": "slow",
    "network cut": "cut",
    "time limit": "limit",
    "full disk": "",
}
"""Faults of processes, and their names in ``tools/slurm/faults.py``."""
FAULTS = {
    "processes": tuple(PROCESS_FAULTS),
    "actors": (*("killed", "hangs", "connection cut", "full disk", "asker cancelled", "slow", "duplicated message"),),
}
KINDS = {"test": "goes on", "ends": "error", "unrun": "not run", "none": "·", "open": "**not tested**"}

NAMING = ("test", "ends", "unrun")
"""Kinds of cells that name a test."""

_HEAD = """\
# Faults

Each row is a fault and each column a role of a run. *Goes on* means that a test injects the fault, and that the run
continues by itself: nothing is lost or trained twice. *Error* means that a test injects it, and that the request, the
episode or the run ends with an error that names the fault. *·* means that the fault cannot happen to the role, *not
run* that its test exists but has not been run to its end, **not tested** that there is no test. The tests are listed
below each table.

`python -m tools.faults` writes this page from `tools/faults/matrix.toml`, and fails if a test that is named here does
not exist. `nox -s slurm` runs the tests of `tools/slurm` but those of
`faults.py`, of which `nox -s slurm -- faults` runs all or some (`--sample 3 --seed 7`); `nox -s placement` injects
faults [on one machine](../guides/processes.md). All others are in the suite.
[Durability](../concepts/durability.md#how-it-is-tested) is about kills at random times. Of this table, the suite
contains one fault of one role in workers on one machine, which `FAULTS_SEED` draws, and six kills of a service and its
agents.
"""

_TITLES = {
    "processes": """\
## Processes

What happens to a job of a cluster, or to a worker on one machine. *Engine* is the role `generation`, *rank* one of
several processes that train together.
""",
    "actors": """\
## Actors

What happens to a part of any run, also of one in a single process ([Architecture](../concepts/architecture.md) has the
actors).
*Replica* is one of the engines of a replica set, *entry* the address in front of several services, *asker cancelled*
means that the client or actor that asked for something leaves before it is answered.
""",
}


@frozen(kw_only=True)
class Cell:
    """A fault of a role. ``kind`` is a key of ``KINDS``, ``text`` the test, or why there is none."""

    table: str
    fault: str
    role: str
    kind: str
    text: str


def load_cells(path: Path = MATRIX) -> tuple[Cell, ...]:
    """Return all cells, by table and row."""
    cells = []
    for table, rows in tomllib.loads(path.read_text(encoding="utf-8")).items():
        for fault, row in rows.items():
            for role, value in row.items():
                ((kind, text),) = value.items()
                cells.append(Cell(table=table, fault=fault, role=role, kind=kind, text=text))
    return tuple(cells)


def load_seconds(path: Path = RESULTS) -> Mapping[tuple[str, str], int]:
    """Return the longest measured time of each fault (as its test names it) and role."""
    longest: dict[tuple[str, str], int] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        record = json.loads(line)
        at = record["fault"], record["role"]
        longest[at] = max(longest.get(at, 0), record["seconds"])
    return longest


def format_page(cells: Iterable[Cell], seconds: Mapping[tuple[str, str], int]) -> str:
    """Return the page."""
    cells = tuple(cells)
    tables = (_format_table(table, [cell for cell in cells if cell.table == table], seconds) for table in ROLES)
    measured = "\nA number is the longest time in seconds from the fault to the end of the second step after it, on\n"
    measured += "two cores with a load average of 1 to 54; `benchmarks/results/faults.jsonl` has the load at each.\n"
    return "\n".join((_HEAD + (measured if seconds else ""), *tables))


def _format_table(table: str, cells: Iterable[Cell], seconds: Mapping[tuple[str, str], int]) -> str:
    found = {(cell.fault, cell.role): cell for cell in cells}
    roles = ROLES[table]
    lines = [f"| | {' | '.join(roles)} |", f"|---|{'---|' * len(roles)}"]
    for fault in FAULTS[table]:
        words = []
        for role in roles:
            at = PROCESS_FAULTS.get(fault, ""), "generation" if role == "engine" else role
            measured = seconds.get(at) if table == "processes" else None
            word = KINDS[found[fault, role].kind]
            words.append(word if measured is None else f"{word}, {measured} s")
        lines.append(f"| {fault} | {' | '.join(words)} |")
    numbers = Counter(cell.kind for cell in found.values())
    lines += [
        "",
        (
            f"Of {len(found)} cells, {numbers['test'] + numbers['ends']} have a test, {numbers['unrun']} one that "
            f"has not been run, {numbers['none']} cannot happen, and {numbers['open']} are not tested."
        ),
        "",
        "| Fault | Role | Test, or why there is none |",
        "|---|---|---|",
    ]
    for fault in FAULTS[table]:
        for role in roles:
            cell = found[fault, role]
            text = f"`{cell.text}`" if cell.kind in NAMING else f"{KINDS[cell.kind]} {cell.text}"
            lines.append(f"| {fault} | {role} | {text} |")
    return _TITLES[table] + "\n" + "\n".join(lines) + "\n"
