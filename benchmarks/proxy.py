"""The proxy: server CPU per request, beside the floors of ``floors``, in the same run.

Every server has a process of its own, and all of them are up at once: a round of a scenario goes from one to the next,
so that what the machine does meanwhile meets all of them.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeAlias

from attrs import frozen
from benchmarks.floors import ADMIN_KEY, FACTORIES
from benchmarks.harness import Result
from benchmarks.load import Connection, converse, live, serving
from benchmarks.null_engine import SETUPS

_GATE = 1.0
"""Keys, checks, trees and actors may cost what the plain floor spends on its server."""
_JOURNAL_GATE = 1.1
_STREAM_GATE = 0.9
_TEXT = Path(__file__).with_name("README.md")
_LONG_CHARACTERS = 9_400  # 7,000 tokens of the tiny model
_NUM_OTHER_CALLS = 5  # of a life: capacity, start, reward, end, export

Load: TypeAlias = Callable[[Sequence[Connection], int], Awaitable[int]]
"""Sends about so many requests over these connections; returns how many it were."""


@frozen(kw_only=True)
class Scenario:
    """What is measured: a load on some connections of servers with one set-up."""

    name: str
    load: Load
    num_connections: int = 1
    setup: str = "idle"
    gate: float = _GATE
    share: float = 1.0
    """Of the requests of a round that this scenario sends."""


async def _single_turns(connections: Sequence[Connection], num_requests: int) -> int:
    each = num_requests // len(connections)

    async def ask(connection: Connection, number: int) -> None:
        for index in range(each):
            await connection.chat([{"role": "user", "content": f"What is question {number} of round {index}?"}])

    await asyncio.gather(*(ask(connection, number) for number, connection in enumerate(connections)))
    return each * len(connections)


async def _conversations(connections: Sequence[Connection], num_requests: int, *, num_turns: int) -> int:
    """Of several agents at once; each continues in a session of its own."""
    each = max(num_requests // len(connections) // num_turns, 1)

    async def talk(connection: Connection, number: int) -> None:
        for index in range(each):
            await converse(connection, f"Let us talk about {number} and {index}.", num_turns=num_turns)

    await asyncio.gather(*(talk(connection, number) for number, connection in enumerate(connections)))
    return each * len(connections) * num_turns


async def _lives(connections: Sequence[Connection], num_requests: int, *, num_turns: int) -> int:
    num_calls = num_turns + _NUM_OTHER_CALLS
    each = max(num_requests // len(connections) // num_calls, 1)

    async def repeat(connection: Connection, number: int) -> None:
        for index in range(each):
            await live(connection, f"t{number}-{index}", num_turns=num_turns)

    await asyncio.gather(*(repeat(connection, number) for number, connection in enumerate(connections)))
    return each * len(connections) * num_calls


async def _long_prompts(connections: Sequence[Connection], num_requests: int, *, is_shared: bool = False) -> int:
    """Questions with 7,000 tokens before them, which are new each time, or the same ones in new sessions."""
    text, (connection, *_) = _TEXT.read_text(encoding="utf-8")[:_LONG_CHARACTERS], connections
    for index in range(num_requests):
        start = "" if is_shared else f"{index} {time.monotonic_ns()} "
        said = {"role": "system", "content": start + text}, {"role": "user", "content": f"What is question {index}?"}
        await connection.chat([*said])
    return num_requests


async def _shared_prompts(connections: Sequence[Connection], num_requests: int) -> int:
    return await _long_prompts(connections, num_requests, is_shared=True)


async def _streams(connections: Sequence[Connection], num_requests: int) -> int:
    """Answers of 200 tokens that come one by one, each of them read to its end."""
    each = max(num_requests // len(connections), 1)

    async def read(connection: Connection, number: int) -> None:
        for index in range(each):
            await connection.start_chat([{"role": "user", "content": f"w{number:03}w{index:03}"}])
            await connection.finish_chat()

    await asyncio.gather(*(read(connection, number) for number, connection in enumerate(connections)))
    return each * len(connections)


async def _fifty_turns(connections: Sequence[Connection], num_requests: int) -> int:
    return await _conversations(connections, num_requests, num_turns=50)


async def _four_turns(connections: Sequence[Connection], num_requests: int) -> int:
    return await _conversations(connections, num_requests, num_turns=4)


async def _lives_of_eight(connections: Sequence[Connection], num_requests: int) -> int:
    return await _lives(connections, num_requests, num_turns=8)


SCENARIOS = (
    Scenario(name="single turn, 1 connection", load=_single_turns),
    Scenario(name="single turn, 16 connections", load=_single_turns, num_connections=16),
    Scenario(name="turn of 50, 1 connection", load=_fifty_turns),
    Scenario(name="session of 8 turns and 5 calls, 16 connections", load=_lives_of_eight, num_connections=16),
    Scenario(name="single turn of 7000 new tokens, 1 connection", load=_long_prompts, share=0.04),
    Scenario(name="single turn of 7000 shared tokens, 1 connection", load=_shared_prompts, share=0.04),
    Scenario(
        name="streamed answer of 200 tokens, 16 connections",
        load=_streams,
        num_connections=16,
        setup="tokens",
        gate=_STREAM_GATE,
        share=0.02,
    ),
    Scenario(
        name="turn of 4, 1000 sessions, 100 ms engine", load=_four_turns, num_connections=1000, setup="busy", share=2.5
    ),
)
_LONG = 200


async def _measure(urls: Sequence[str], scenario: Scenario, num_requests: int) -> float:
    """Server CPU in microseconds per request."""
    connections = [await Connection(url).open() for url in urls[: scenario.num_connections]]
    try:
        if scenario.setup == "tokens":
            await _streams(connections, len(connections))
        else:
            await _single_turns(connections, 4 * len(connections))
        before = await connections[0].get("/cpu")
        num_sent = await scenario.load(connections, int(num_requests * scenario.share))
        after = await connections[0].get("/cpu")
    finally:
        for connection in connections:
            connection.close()
    return float(after - before) / num_sent * 1e6


async def _measure_long(urls: Sequence[str]) -> tuple[float, float]:
    """Server CPU in milliseconds of one long conversation in a new session, and of the export of its rows."""
    connection = await Connection(urls[0]).open()
    try:
        opened = await connection.post("/rl/start_session", {"task_id": "long"}, key=ADMIN_KEY)
        session, key = opened["session_id"], opened["api_key"]
        start = await connection.get("/cpu")
        await converse(connection, "Let us talk for long.", num_turns=_LONG, session=session)
        said = await connection.get("/cpu")
        await connection.post(f"/{session}/rl/set_reward", {"reward": 1.0}, key=key)
        await connection.post(f"/{session}/rl/end_session", {}, key=key)
        ended = await connection.get("/cpu")
        await connection.post("/export_trajectories", {"session_id": session, "style": "concat"}, key=ADMIN_KEY)
        exported = await connection.get("/cpu")
    finally:
        connection.close()
    return (said - start) * 1e3, (exported - ended) * 1e3


class _Least:
    """The least of several measurements, by server and figure."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, str], float] = {}

    def note(self, server: str, figure: str, value: float) -> None:
        key = server, figure
        self._values[key] = min(value, self._values.get(key, value))

    def results(self, figure: str, *, unit: str, gate: float | None) -> list[Result]:
        """The figure of every server, and the proxy's as a multiple of each floor's."""
        value = {name: self._values[name, figure] for name in FACTORIES}
        figures = [
            Result(benchmark="proxy", name=f"{name}, {figure}", value=value[name], unit=unit) for name in FACTORIES
        ]
        ratios = [
            Result(
                benchmark="proxy",
                name=f"proxy against {floor}, {figure}",
                value=value["proxy"] / value[floor],
                unit="ratio",
                gate=gate if floor == "capture_floor" else None,
                baseline=f"{floor}, {figure}",
            )
            for floor in FACTORIES
            if not floor.startswith("proxy")
        ]
        return [*figures, *ratios, *self._journal(figure, value, has_gate=gate is not None)]

    def _journal(self, figure: str, value: Mapping[str, float], *, has_gate: bool) -> list[Result]:
        """What it costs that every turn is written down before it is answered."""
        return [
            Result(
                benchmark="proxy",
                name=f"proxy with a journal against {name}, {figure}",
                value=value["proxy_journaled"] / value[name],
                unit="ratio",
                gate=_JOURNAL_GATE if has_gate and name == "capture_floor" else None,
                baseline=f"{name}, {figure}",
            )
            for name in ("proxy", "capture_floor")
        ]


def run(quick: bool) -> list[Result]:  # noqa: FBT001 - the protocol of all benchmarks
    """Server CPU per request of the proxy and of its floors, and the ratios; the least of several rounds."""
    rounds, num_requests = (2, 400) if quick else (7, 1600)
    least = _Least()
    for setup in SETUPS:
        scenarios = [scenario for scenario in SCENARIOS if scenario.setup == setup]
        if scenarios:
            _run_rounds(setup, scenarios, least, rounds=rounds, num_requests=num_requests)
    results = [r for s in SCENARIOS for r in least.results(s.name, unit="µs/request", gate=s.gate)]
    for figure, gate in ((f"conversation of {_LONG} turns", _GATE), (f"export of {_LONG} turns", None)):
        results += least.results(figure, unit="ms", gate=gate)
    return results


def _run_rounds(setup: str, scenarios: Sequence[Scenario], least: _Least, *, rounds: int, num_requests: int) -> None:
    with ExitStack() as stack:
        urls = {name: stack.enter_context(serving(name, setup)) for name in FACTORIES}
        for _ in range(rounds):
            for scenario in scenarios:
                for name in FACTORIES:
                    least.note(name, scenario.name, asyncio.run(_measure(urls[name], scenario, num_requests)))
            for name in FACTORIES if setup == "idle" else ():
                conversation, export = asyncio.run(_measure_long(urls[name]))
                least.note(name, f"conversation of {_LONG} turns", conversation)
                least.note(name, f"export of {_LONG} turns", export)


if __name__ == "__main__":
    for result in run(quick="--quick" in sys.argv):
        print(f"{result.name:80} {result.value:9.2f} {result.unit}")
