"""Several proxies of one service on one machine: what a request costs all of them, and which process is full first.

The service is a process of its own, with the engine (which costs nothing), sessions, their journal and the first proxy;
the others are its children, each with sessions, a journal and a proxy. Load comes over 32 connections, one for each
session. Requests per second are those of a
machine that the load shares; ``limit`` is what the service could answer if it had a core for each process, from the CPU
time of the busiest one.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio
from attrs import frozen
from benchmarks.harness import Result
from benchmarks.load import Connection, converse
from benchmarks.null_engine import SETUPS, NullEngine

from areal_actors.config import create_config, save_config
from areal_actors.journal import SqliteJournal
from areal_actors.lib.process_limits import tuned_gc
from areal_actors.messages import OpenSession
from areal_actors.proxy import ProxyConfig
from areal_actors.run.control_plane import open_proxies
from areal_actors.run.inference import InferenceConfig, open_actors
from areal_actors.sessions.intake import IntakeConfig

_NUMBERS = (1, 2, 4)
_NUM_CONNECTIONS = 32
_NUM_TURNS = 4
_START_SECONDS = 120.0
_TICKS = os.sysconf("SC_CLK_TCK")


@frozen(kw_only=True)
class _Round:
    """One load: seconds on the clock, and CPU seconds of each process of the service, its own first."""

    num_requests: int
    seconds: float
    cpu_seconds: tuple[float, ...]

    @property
    def us_per_request(self) -> float:
        """CPU of all processes."""
        return sum(self.cpu_seconds) / self.num_requests * 1e6

    @property
    def us_of_service(self) -> float:
        """CPU of the process that has the session manager, and a proxy of its own."""
        return self.cpu_seconds[0] / self.num_requests * 1e6

    @property
    def us_of_busiest(self) -> float:
        """CPU of the process that is full first."""
        return max(self.cpu_seconds) / self.num_requests * 1e6


def run(quick: bool) -> list[Result]:  # noqa: FBT001 - the protocol of all benchmarks
    """Requests per second and CPU per request with 1, 2 and 4 proxies; the best of several rounds each."""
    rounds, num_each = (2, 10) if quick else (5, 40)
    results: list[Result] = []
    for number in _NUMBERS:
        with _serving(number) as (pid, urls):
            asyncio.run(_load(pid, urls, num_each=2))
            results += _figures(number, [asyncio.run(_load(pid, urls, num_each=num_each)) for _ in range(rounds)])
    return results


def _figures(number: int, rounds: Sequence[_Round]) -> list[Result]:
    name = f"{number} prox{'y' if number == 1 else 'ies'}"
    values = (
        ("requests per second beside the load", max(r.num_requests / r.seconds for r in rounds), "requests/s"),
        ("CPU of all processes", min(r.us_per_request for r in rounds), "µs/request"),
        ("CPU of the service's own process", min(r.us_of_service for r in rounds), "µs/request"),
        ("limit", 1e6 / min(r.us_of_busiest for r in rounds), "requests/s"),
    )
    return [
        Result(
            benchmark="proxies", name=f"{name}, {what}", value=value, unit=unit, higher_is_better=unit == "requests/s"
        )
        for what, value, unit in values
    ]


async def _load(pid: int, urls: Sequence[str], *, num_each: int) -> _Round:
    """Conversations of four turns on every connection at once."""
    connections = [await Connection(url).open() for url in urls]
    try:
        before, start = _cpu_seconds(pid), time.perf_counter()
        await asyncio.gather(*(_talk(c, number, num_each) for number, c in enumerate(connections)))
        seconds, after = time.perf_counter() - start, _cpu_seconds(pid)
    finally:
        for connection in connections:
            connection.close()
    used = tuple(after[process] - before.get(process, 0.0) for process in sorted(after, key=lambda one: one != pid))
    return _Round(num_requests=len(urls) * num_each * _NUM_TURNS, seconds=seconds, cpu_seconds=used)


async def _talk(connection: Connection, number: int, num_each: int) -> None:
    for index in range(num_each):
        await converse(connection, f"Let us talk about {number} and {index}.", num_turns=_NUM_TURNS)


def _cpu_seconds(pid: int) -> dict[int, float]:
    """User and system time of a process and of all below it, by id; Linux tells."""
    parents: dict[int, int] = {}
    used: dict[int, float] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = path.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        process = int(path.parent.name)
        parents[process], used[process] = int(words[1]), (int(words[11]) + int(words[12])) / _TICKS
    return {process: used[process] for process in used if pid in _line(process, parents)}


def _line(process: int, parents: dict[int, int]) -> Iterator[int]:
    """A process, its parent, and so on."""
    while process in parents:
        yield process
        process = parents[process]


# ------------------------------------------------------------------------------------------------------- the service


@contextmanager
def _serving(number: int) -> Iterator[tuple[int, list[str]]]:
    """A service with so many proxies in a process of its own: its id, and a base URL per session."""
    command = [sys.executable, "-m", "benchmarks.proxies", str(number)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process.pid, json.loads(process.stdout.readline())
        finally:
            process.stdin.close()
            process.wait(timeout=60)


@asynccontextmanager
async def _open(number: int, directory: Path) -> AsyncIterator[list[str]]:
    settings = {"experiment_name": "proxies", "total_steps": 1, "model": "tiny", "rollout": {}}
    save_config(create_config(settings | {"proxy": {"num_processes": number}}), directory / "config.yaml")
    setup = SETUPS["idle"]
    renderer = setup.create_renderer()
    config = InferenceConfig(proxy=ProxyConfig(num_processes=number), intake=IntakeConfig())
    async with (
        SqliteJournal.open(directory / "journal.sqlite") as journal,
        open_actors(config, engine=NullEngine(renderer, setup), renderer=renderer, journal=journal) as inference,
        open_proxies(
            inference.actors,
            inference.endpoint,
            num_more=number - 1,
            config=directory / "config.yaml",
            logs=directory,
            handover=inference.handover,
        ) as proxies,
    ):
        with anyio.fail_after(_START_SECONDS):
            await proxies.wait_for(number - 1)
        opened = [
            await inference.sessions.ask(OpenSession(task=f"s{n}", is_durable=True)) for n in range(_NUM_CONNECTIONS)
        ]
        yield [f"{inference.endpoint.url}/{session.session}" for session in opened]


async def _serve(number: int) -> None:
    with TemporaryDirectory() as directory:
        async with _open(number, Path(directory)) as urls:
            with tuned_gc():
                print(json.dumps(urls), flush=True)
                await anyio.to_thread.run_sync(sys.stdin.read)


if __name__ == "__main__":
    anyio.run(_serve, int(sys.argv[1]))
