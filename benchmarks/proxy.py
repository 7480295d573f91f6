"""The proxy: server CPU per request, beside the floors of ``floors``, in the same run.

Each server runs in a process of its own and tells its CPU time; the load comes from here, over raw keep-alive sockets,
because an HTTP library would cost more than what is measured. ``serve`` names what is served, so that other stacks
can be measured in the same way.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import anyio
import orjson
from benchmarks.floors import FACTORIES
from benchmarks.harness import Result

_NUM_TURNS = 50


class Connection:
    """A keep-alive connection that sends a request and reads its answer, and knows no more of HTTP than that."""

    def __init__(self, base_url: str) -> None:
        parts = urlsplit(base_url)
        self._address = (parts.hostname, parts.port)
        self._path = parts.path
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    async def open(self) -> Connection:
        """Connect."""
        self._reader, self._writer = await asyncio.open_connection(*self._address)
        return self

    def close(self) -> None:
        """Hang up."""
        self._writer.close()

    async def get(self, path: str) -> bytes:
        """The body at ``path``."""
        return await self._exchange(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())

    async def chat(self, messages: list[dict[str, str]]) -> str:
        """What the assistant says."""
        body = orjson.dumps({"model": "m", "messages": messages})
        head = (
            f"POST {self._path}/v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            f"authorization: Bearer sk-placeholder\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        answer = orjson.loads(await self._exchange(head.encode() + body))
        return str(answer["choices"][0]["message"]["content"])

    async def _exchange(self, request: bytes) -> bytes:
        self._writer.write(request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        _, _, rest = head.lower().partition(b"content-length: ")
        body = await self._reader.readexactly(int(rest.split(b"\r\n", 1)[0]))
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"the server answered {head!r} {body!r}")
        return body


async def _single_turns(connection: Connection, number: int, num_requests: int) -> None:
    for index in range(num_requests):
        await connection.chat([{"role": "user", "content": f"What is question {number} of round {index}?"}])


async def _conversation(connection: Connection, number: int, num_requests: int) -> None:
    for start in range(0, num_requests, _NUM_TURNS):
        messages = [{"role": "user", "content": f"Let us talk about {number} and {start}."}]
        for _ in range(_NUM_TURNS):
            content = await connection.chat(messages)
            messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "Go on."}]


SCENARIOS = {
    "single turn, 1 connection": (_single_turns, 1),
    "single turn, 16 connections": (_single_turns, 16),
    f"turn of {_NUM_TURNS}, 1 connection": (_conversation, 1),
}


async def _measure(urls: list[str], scenario: str, num_requests: int) -> float:
    """Server CPU in microseconds per request."""
    load, num_connections = SCENARIOS[scenario]
    connections = [await Connection(url).open() for url in urls[:num_connections]]
    try:
        each = num_requests // num_connections
        await asyncio.gather(*(load(connection, -1, _NUM_TURNS) for connection in connections))
        before = float(await connections[0].get("/cpu"))
        await asyncio.gather(*(load(connection, number, each) for number, connection in enumerate(connections)))
        after = float(await connections[0].get("/cpu"))
    finally:
        for connection in connections:
            connection.close()
    return (after - before) / (each * num_connections) * 1e6


@contextmanager
def serving(name: str) -> Iterator[list[str]]:
    """A server in a process of its own; yields its base URLs, one per session."""
    command = [sys.executable, "-m", "benchmarks.proxy", "serve", name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())
        finally:
            process.stdin.close()
            process.wait(timeout=20)


def serve(name: str) -> None:
    """Serve ``floors.FACTORIES[name]`` until the standard input is closed."""

    async def run() -> None:
        async with FACTORIES[name]() as urls:
            print(json.dumps(urls), flush=True)
            await anyio.to_thread.run_sync(sys.stdin.read)

    anyio.run(run)


def run(quick: bool) -> list[Result]:  # noqa: FBT001 - the protocol of all benchmarks
    """Server CPU per request of the proxy and of its floors, and the ratios; the least of several rounds."""
    rounds, num_requests = (2, 400) if quick else (5, 1600)
    best: dict[tuple[str, str], float] = {}
    for _ in range(rounds):
        for name in FACTORIES:
            with serving(name) as urls:
                for scenario in SCENARIOS:
                    value = asyncio.run(_measure(urls, scenario, num_requests))
                    best[name, scenario] = min(value, best.get((name, scenario), value))
    return [result for scenario in SCENARIOS for result in _results(best, scenario)]


def _results(best: dict[tuple[str, str], float], scenario: str) -> list[Result]:
    figures = [
        Result(benchmark="proxy", name=f"{name}, {scenario}", value=best[name, scenario], unit="µs/request")
        for name in FACTORIES
    ]
    ratios = [
        Result(
            benchmark="proxy",
            name=f"proxy against {floor}, {scenario}",
            value=best["proxy", scenario] / best[floor, scenario],
            unit="x",
            baseline=f"{floor}, {scenario}",
        )
        for floor in ("http_floor", "capture_floor")
    ]
    return [*figures, *ratios]


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2])
    else:
        for result in run(quick="--quick" in sys.argv):
            print(f"{result.name:60} {result.value:9.2f} {result.unit}")
