"""How soon a client reads what the engine sampled: from the first token in the engine to the first text at the client.

The engine notes when it samples its first token, and goes on a while later. The client reads the stream over a socket
in another process and notes when the first event with text is there; both read the clock of the system. These are the
figures of the proxy that are wall-clock time, and therefore medians of many.

How long a short request waits beside prompts of 94,000 tokens: for each of them, the slowest of the short requests that
were answered meanwhile.

What the proxy adds to the time of a request when 1,000 sessions ask 150 times a second: requests come at random times
whether others are answered or not, each continues the conversation of its session, and the 100 ms that the engine
takes are subtracted. How late the engine's timer is counts as added, for the floor as well.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import Result
from benchmarks.load import Connection, serving
from benchmarks.null_engine import SETUPS

_GATE_MS = 2.0
_PAUSE_GATE_MS = 30.0
_LONG_CHARACTERS = 94_000 * 4
_RATE = 150.0
_ADDED_GATES_MS = {"median": 2.0, "p99": 8.0}


async def _measure(urls: Sequence[str], num_streams: int, num_connections: int) -> list[float]:
    """Milliseconds between the engine's first token and the client's first text, of every stream."""
    connections = [await Connection(url).open() for url in urls[:num_connections]]
    read_at: dict[str, float] = {}

    async def stream(connection: Connection, number: int) -> None:
        for index in range(num_streams // num_connections):
            event = await connection.start_chat([{"role": "user", "content": f"Question {number} of {index}?"}])
            read_at[event["id"]] = time.monotonic()
            await connection.finish_chat()

    try:
        await asyncio.gather(*(stream(connection, number) for number, connection in enumerate(connections)))
        sampled_at = await connections[0].get("/first_tokens")
    finally:
        for connection in connections:
            connection.close()
    return sorted((read_at[name] - sampled_at[name]) * 1e3 for name in read_at)


async def _measure_pauses(urls: Sequence[str], num_prompts: int) -> list[float]:
    """Milliseconds of the slowest short request beside each of ``num_prompts`` long ones, sorted."""
    short, long = [await Connection(url).open() for url in urls[:2]]
    slowest: list[float] = []

    async def ask_long(number: int) -> None:
        # English: words are as frequent, and tokens as long, as in prompts of agents.
        text = (f"{number} of {num_prompts}. " + Path(__file__).with_name("README.md").read_text()) * 100
        await long.chat([{"role": "user", "content": text[:_LONG_CHARACTERS]}])

    try:
        await short.chat([{"role": "user", "content": "Hello"}])
        for number in range(num_prompts):
            asking = asyncio.create_task(ask_long(number))
            waited = []
            while not asking.done():
                began = time.monotonic()
                await short.chat([{"role": "user", "content": f"Question {len(waited)} of {number}?"}])
                waited.append(time.monotonic() - began)
            await asking
            slowest.append(max(waited) * 1e3)
    finally:
        short.close()
        long.close()
    return sorted(slowest)


async def _measure_added(urls: Sequence[str], num_requests: int) -> list[float]:
    """Milliseconds that each request took beyond the engine's, at ``_RATE`` a second over all sessions, sorted."""
    connections = [await Connection(url).open() for url in urls]
    conversations = [[{"role": "user", "content": f"Let us talk about {number}."}] for number in range(len(urls))]
    rng, added = random.Random(1), []

    async def ask(number: int) -> None:
        messages, began = conversations[number], time.monotonic()
        content = await connections[number].chat(messages)
        added.append((time.monotonic() - began - SETUPS["busy"].delay_seconds) * 1e3)
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "Go on."}]

    try:
        async with asyncio.TaskGroup() as tasks:
            due = time.monotonic()
            for number in range(num_requests):
                due += rng.expovariate(_RATE)
                await asyncio.sleep(due - time.monotonic())
                tasks.create_task(ask(number % len(urls)))
    finally:
        for connection in connections:
            connection.close()
    return sorted(added)


def _results_under_load(num_requests: int) -> list[Result]:
    results = []
    for server in ("capture_floor", "proxy", "proxy_journaled"):
        with serving(server, "busy") as urls:
            added = asyncio.run(_measure_added(urls, num_requests))
        values = {"median": statistics.median(added), "p99": added[int(len(added) * 0.99)]}
        for name, value in values.items():
            results.append(
                Result(
                    benchmark="latency",
                    name=f"{server}, added at 150 requests a second of 1,000 sessions, {name}",
                    value=value,
                    unit="ms",
                    gate=None if server == "capture_floor" else _ADDED_GATES_MS[name],
                    detail={"max": added[-1], "requests": len(added)},
                )
            )
    return results


def run(quick: bool) -> list[Result]:  # noqa: FBT001 - the protocol of all benchmarks
    """The median over many streams, alone and sixteen at once, with the slowest of a hundred as a detail."""
    results = []
    for num_connections in (1, 16):
        num_streams = (64 if quick else 320) * (1 if num_connections == 1 else 4)
        with serving("proxy", "streaming") as urls:
            waited = asyncio.run(_measure(urls, num_streams, num_connections))
        results.append(
            Result(
                benchmark="latency",
                name=f"first text after the engine's first token, {num_connections} at once",
                value=statistics.median(waited),
                unit="ms",
                gate=_GATE_MS,
                detail={"p99": waited[int(len(waited) * 0.99)], "streams": len(waited)},
            )
        )
    num_prompts = 5 if quick else 25
    with serving("proxy", "idle") as urls:
        slowest = asyncio.run(_measure_pauses(urls, num_prompts))
    results.append(
        Result(
            benchmark="latency",
            name="the slowest short request beside a prompt of 94,000 tokens",
            value=statistics.median(slowest),
            unit="ms",
            gate=_PAUSE_GATE_MS,
            detail={"max": slowest[-1], "prompts": num_prompts},
        )
    )
    return [*results, *_results_under_load(1500 if quick else 6000)]


if __name__ == "__main__":
    for result in run(quick="--quick" in sys.argv):
        print(f"{result.name:60} {result.value:9.3f} {result.unit} {result.detail}")
