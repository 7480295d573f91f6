"""What a stored call costs in the server's process: everything that stays, from ids and text to indices and keys.

The proxy is asked over HTTP, in sixteen sessions, by prompts that share nothing; its process counts what stays
allocated afterwards, once by Python's own tracing and once by the pages that the system gave it. Tokens are words of
four characters, and both kinds of log-probabilities are kept, which is the expensive case. ``cache`` measures the tree
alone.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Sequence

from attrs import frozen
from benchmarks.harness import Result
from benchmarks.load import Connection, serving
from benchmarks.null_engine import words

_NUM_FRAMING_TOKENS = 9  # of the template, around a prompt


@frozen(kw_only=True)
class Size:
    """Calls of so many prompt tokens; what is sampled is the set-up's."""

    setup: str
    num_prompt: int
    num_sampled: int
    gate: float
    num_calls: int
    """Enough of them to outweigh what a process does beside."""

    @property
    def name(self) -> str:
        """For the table."""
        return f"stored call of {self.num_prompt} + {self.num_sampled} tokens"


# Of a short call, 1.4 kB are arrays (ids, two kinds of log-probabilities) and 1 kB is text. Headers of arrays, texts
# and objects take 1.2 kB, the digest of the turn 0.25, the digests and ids that later requests are recognised by 0.35,
# and the answer that is kept for a retry 0.4. The gate of 4 KiB was from before there were digests and retries.
SIZES = (
    Size(setup="short", num_prompt=200, num_sampled=50, gate=5_000, num_calls=800),
    Size(setup="long", num_prompt=4000, num_sampled=300, gate=40 * 1024, num_calls=200),
)


async def _ask(connections: Sequence[Connection], size: Size, num_calls: int, source: random.Random) -> None:
    for index in range(num_calls):
        numbers = [source.randrange(1000) for _ in range(size.num_prompt - _NUM_FRAMING_TOKENS)]
        await connections[index % len(connections)].chat([{"role": "user", "content": words(numbers)}])


async def _measure(urls: Sequence[str], size: Size, num_calls: int) -> dict[str, float]:
    """Bytes per call, by how they are counted."""
    connections = [await Connection(url).open() for url in urls]
    source = random.Random(7)
    try:
        await _ask(connections, size, num_calls // 4, source)  # what grows once
        before = await connections[0].get("/memory")
        await _ask(connections, size, num_calls, source)
        after = await connections[0].get("/memory")
    finally:
        for connection in connections:
            connection.close()
    return {name: (after[name] - before[name]) / num_calls for name in after}


def _measure_in_server(size: Size, num_calls: int, *, is_traced: bool) -> dict[str, float]:
    with serving("proxy", size.setup, {"PYTHONTRACEMALLOC": "1"} if is_traced else {}) as urls:
        return asyncio.run(_measure(urls, size, num_calls))


def _results(size: Size, *, num_calls: int) -> list[Result]:
    traced = _measure_in_server(size, num_calls, is_traced=True)["traced"]
    resident = _measure_in_server(size, 4 * num_calls, is_traced=False)["resident"]
    return [
        Result(benchmark="memory", name=f"{size.name}, {how}", value=value, unit="bytes/call", gate=size.gate)
        for how, value in (("traced", traced), ("resident", resident))
    ]


def run(quick: bool) -> list[Result]:  # noqa: FBT001 - the protocol of all benchmarks
    """Bytes per stored call, by size."""
    return [result for size in SIZES for result in _results(size, num_calls=size.num_calls // (4 if quick else 1))]


if __name__ == "__main__":
    for result in run(quick="--quick" in sys.argv):
        print(f"{result.name:60} {result.value:9.0f} {result.unit} {'' if result.passed else 'MISSED'}")
