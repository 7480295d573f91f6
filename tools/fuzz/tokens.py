"""The long profile of the token-exactness fuzz: ``python -m tools.fuzz.tokens --turns 1000000 --seed 0 --processes 2``.

Prints how far it has come, and at the end what became of the turns of each family and protocol. A violation is printed
with the command that replays its session, whose requests are written to a file; the exit code is 1 then.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import anyio
import orjson
from attrs import frozen
from tools.fuzz.clients import CLIENTS
from tools.fuzz.play import Outcome, Stage, open_stage

from areal_actors_testing.families import FAMILIES

__all__ = ["main", "run"]

Cell = tuple[str, str]
"""A family and a protocol."""
_BLOCK = 40
"""Sessions of one cell between two looks at the clock."""
_REPORT_SECONDS = 10.0
_COLUMNS = {
    "turns": "turns",
    "compared": "compared",
    "linked": "linked",
    "extended": "extended",
    "sampled": "sampled",
    "trained": "trained",
}


@frozen
class Job:
    """What one process plays: sessions of its cells in turn, until it has played its turns or its time is over."""

    cells: tuple[Cell, ...]
    seed: int
    turns: int
    first: int = 0
    max_seconds: float = float("inf")


async def play(job: Job) -> list[Outcome]:
    """Play a job; returns one outcome per cell and one per session with a violation."""
    totals = {cell: Outcome(family=cell[0], protocol=cell[1], session=-1) for cell in job.cells}
    stages: dict[str, Stage] = {}
    began = reported = time.monotonic()
    wrong: list[Outcome] = []
    num_turns = 0
    for block in itertools.count():
        for family, protocol in job.cells:
            stages[family] = stages.get(family) or await open_stage(family)
            cell_began = time.process_time()
            for number in range(_BLOCK):
                session = job.first + block * _BLOCK + number
                outcome = await stages[family].play(protocol, seed=job.seed, number=session)
                totals[family, protocol].counts += outcome.counts
                num_turns += outcome.counts["turns"]
                if outcome.violations:
                    wrong.append(outcome)
                    _tell(outcome, job.seed)
            totals[family, protocol].counts["microseconds"] += int(1e6 * (time.process_time() - cell_began))
            now = time.monotonic()
            if now - reported > _REPORT_SECONDS:
                reported = now
                speed = num_turns / (now - began)
                print(f"process {os.getpid()}: {num_turns} of {job.turns} turns, {speed:.0f} per second", flush=True)
            if num_turns >= job.turns or now - began > job.max_seconds:
                return [*totals.values(), *wrong]
    raise AssertionError


def _tell(outcome: Outcome, seed: int) -> None:
    """Print a violation, write the requests that led to it, and say how to see it again."""
    name = f"{outcome.family}/{outcome.protocol}/{outcome.session}"
    path = Path(f"fuzz-violation-{name.replace('/', '-')}.json")
    path.write_bytes(json.dumps(outcome.requests, indent=1, default=repr).encode())
    first = outcome.violations[0]
    print(f"VIOLATION in {name}: {first}\nreplay: --seed {seed} --session {name}; requests: {path}", flush=True)


def _play_job(job: Job) -> list[Outcome]:
    before = gc.get_threshold()
    gc.set_threshold(100_000, 20, 100)  # sessions leave hardly any cycles
    try:
        return anyio.run(play, job)
    finally:
        gc.set_threshold(*before)


def run(jobs: Sequence[Job]) -> list[Outcome]:
    """Play all jobs, each in a process of its own."""
    if len(jobs) == 1:
        return _play_job(jobs[0])
    with multiprocessing.get_context("spawn").Pool(len(jobs)) as pool:
        return [outcome for outcomes in pool.imap_unordered(_play_job, jobs) for outcome in outcomes]


# --------------------------------------------------------------------------------------------------- the table


def _sum_of(counts: Counter[str], prefix: str) -> str:
    """All counts of one kind, the largest first."""
    found = [(n, name.removeprefix(prefix)) for name, n in counts.items() if name.startswith(prefix)]
    found.sort(reverse=True)
    return ", ".join(f"{name} {n}" for n, name in found) or "-"


def format_table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """A line per cell in Markdown, and the sums."""
    wrong = Counter((outcome.family, outcome.protocol) for outcome in outcomes if outcome.violations)
    totals = sorted((o for o in outcomes if o.session < 0 and o.counts["turns"]), key=lambda o: (o.family, o.protocol))
    yield f"| family | protocol | {' | '.join(_COLUMNS.values())} | untrained | forks | refused | violations | CPU s |"
    yield "|---" * (len(_COLUMNS) + 7) + "|"
    whole = Outcome(family="all", protocol="all", session=-1)
    for outcome in totals:
        whole.counts += outcome.counts
        yield _format_row(outcome, wrong[outcome.family, outcome.protocol])
    yield _format_row(whole, wrong.total())


def _format_row(outcome: Outcome, num_wrong: int) -> str:
    counts = outcome.counts
    cells = [outcome.family, outcome.protocol, *(str(counts[name]) for name in _COLUMNS)]
    cells += [_sum_of(counts, prefix) for prefix in ("untrained: ", "fork: ", "refused: ")]
    cells += [str(num_wrong), f"{counts['microseconds'] / 1e6:.1f}"]
    return f"| {' | '.join(cells)} |"


# --------------------------------------------------------------------------------------------- the command line


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, play, report. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=20_000, help="how many turns to run at least")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first session of each family and protocol")
    parser.add_argument("--max-seconds", type=float, default=float("inf"))
    parser.add_argument("--session", help="replay this one: family/protocol/number")
    chosen = parser.parse_args(arguments)
    if chosen.session is not None:
        return _replay(chosen.session, chosen.seed)
    cells = [(family, protocol) for family in FAMILIES for protocol in CLIENTS]
    families = list(FAMILIES)
    jobs = [
        Job(
            tuple(cell for cell in cells if families.index(cell[0]) % chosen.processes == process),
            chosen.seed,
            -(-chosen.turns // chosen.processes),
            chosen.first,
            chosen.max_seconds,
        )
        for process in range(chosen.processes)
    ]
    outcomes = run(jobs)
    print("\n".join(format_table(outcomes)))
    return int(any(outcome.violations for outcome in outcomes))


def _replay(name: str, seed: int) -> int:
    family, protocol, number = name.split("/")
    outcome = anyio.run(partial(_replay_session, family, protocol, seed, int(number)))
    for body in outcome.requests:
        print(orjson.dumps(body, default=repr).decode())
    print("\n".join(outcome.violations) or "no violation")
    return int(bool(outcome.violations))


async def _replay_session(family: str, protocol: str, seed: int, number: int) -> Outcome:
    stage = await open_stage(family)
    return await stage.play(protocol, seed=seed, number=number)


if __name__ == "__main__":
    sys.exit(main())
