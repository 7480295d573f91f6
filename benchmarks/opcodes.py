"""Work per request in bytecode instructions of Python: ratios that CI compares, since no load of a machine moves them.

CPU time of one and the same revision differs by tens of percent on a machine that others use, even as a ratio.
Instructions of the interpreter (``f_trace_opcodes``) are counted instead, in the server's own thread, for one
connection that sends one request after another. What C code does in one call is not counted (tokenising, JSON, sockets,
hashes), so that the figures are no times: ``proxy`` measures those. They show what a change adds to a request, and
loops over a history.

Figures of different versions of Python cannot be compared.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextlib import ExitStack

from benchmarks.floors import ADMIN_KEY
from benchmarks.harness import Result
from benchmarks.load import Connection, converse, serving

_GATES = {"proxy": 1.0, "proxy_journaled": 1.1}
_SERVERS = ("capture_floor", "proxy", "proxy_journaled")
_NUM_WARM = 3
"""Requests that fill caches before the first count."""

Load = Callable[[Connection, int], Awaitable[int]]
"""Sends requests over a connection, the given number of times; returns how many they were."""


async def _ask(connection: Connection, times: int) -> int:
    for index in range(times):
        await connection.chat([{"role": "user", "content": f"What is question {index:03}?"}])
    return times


async def _talk(connection: Connection, times: int) -> int:
    opened = await connection.post("/rl/start_session", {"task_id": "long"}, key=ADMIN_KEY)
    await converse(connection, "Let us talk for long.", num_turns=times, session=opened["session_id"])
    return times


async def _count(url: str, load: Load, times: int) -> float:
    """Instructions per request."""
    connection = await Connection(url).open()
    try:
        await load(connection, _NUM_WARM)
        before = await connection.get("/opcodes")
        num_sent = await load(connection, times)
        return float(await connection.get("/opcodes") - before) / num_sent
    finally:
        connection.close()


def run(quick: bool) -> list[Result]:  # noqa: FBT001 - the protocol of all benchmarks
    """Instructions per request of the floor and of the proxy, with and without a journal, and the ratios."""
    loads: dict[str, tuple[Load, int]] = {
        "single turn": (_ask, 5),
        "turn of 25": (_talk, 25),
        "turn of 200": (_talk, 200),
    }
    if quick:
        del loads["turn of 200"]
    counts: dict[tuple[str, str], float] = {}
    with ExitStack() as stack:
        environment = {"BENCHMARK_OPCODES": "1"}
        servers = {name: stack.enter_context(serving(name, "idle", environment)) for name in _SERVERS}
        for name, urls in servers.items():
            for figure, (load, times) in loads.items():
                counts[name, figure] = asyncio.run(_count(urls[0], load, times))
    results = [
        Result(benchmark="opcodes", name=f"{name}, {figure}", value=count, unit="instructions/request")
        for (name, figure), count in counts.items()
    ]
    return results + [
        Result(
            benchmark="opcodes",
            name=f"{name} against {_SERVERS[0]}, {figure}",
            value=count / counts[_SERVERS[0], figure],
            unit="ratio",
            gate=_GATES[name],
            baseline=f"{_SERVERS[0]}, {figure}",
        )
        for (name, figure), count in counts.items()
        if name != _SERVERS[0]
    ]


if __name__ == "__main__":
    for result in run(quick="--quick" in sys.argv):
        print(f"{result.name:60} {result.value:9.3f} {result.unit} {'MISSED' if result.passed is False else ''}")
