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
from typing import Any
from urllib.parse import urlsplit

import anyio
import orjson
from benchmarks.floors import ADMIN_KEY, FACTORIES
from benchmarks.harness import Result

_NUM_TURNS = 50
_NUM_CALLS = 8
_GATE = 1.3
"""Keys, checks, trees, actors and errors in the client's own words may cost a third of what capturing costs anyway."""


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

    async def chat(self, messages: list[dict[str, str]], *, session: str | None = None) -> str:
        """What the assistant says, in the session of this connection or in another one."""
        path = self._path if session is None else f"/{session}"
        answer = await self.post(f"{path}/v1/chat/completions", {"model": "m", "messages": messages})
        return str(answer["choices"][0]["message"]["content"])

    async def post(self, path: str, document: dict[str, Any], *, key: str = "sk-placeholder") -> Any:
        """The JSON that answers the JSON ``document``."""
        body = orjson.dumps(document)
        head = (
            f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            f"authorization: Bearer {key}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        return orjson.loads(await self._exchange(head.encode() + body))

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


async def _lifecycles(connection: Connection, number: int, num_requests: int) -> None:
    """Eight calls a session: capacity, start, three turns, a reward, the end and its rows."""
    for index in range(num_requests // _NUM_CALLS):
        await connection.post("/grant_capacity", {}, key=ADMIN_KEY)
        opened = await connection.post("/rl/start_session", {"task_id": f"t{number}-{index}"}, key=ADMIN_KEY)
        session = opened["session_id"]
        messages = [{"role": "user", "content": f"What is question {number} of round {index}?"}]
        for _ in range(3):
            content = await connection.chat(messages, session=session)
            messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "Go on."}]
        await connection.post(f"/{session}/rl/set_reward", {"reward": 1.0})
        await connection.post(f"/{session}/rl/end_session", {})
        await connection.post("/export_trajectories", {"session_id": session, "style": "concat"}, key=ADMIN_KEY)


SCENARIOS = {
    "single turn, 1 connection": (_single_turns, 1),
    "single turn, 16 connections": (_single_turns, 16),
    f"turn of {_NUM_TURNS}, 1 connection": (_conversation, 1),
    f"lifecycle of {_NUM_CALLS} calls, 16 connections": (_lifecycles, 16),
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
            unit="ratio",
            gate=gate,
            baseline=f"{floor}, {scenario}",
        )
        for floor, gate in (("http_floor", None), ("capture_floor", _GATE))
    ]
    return [*figures, *ratios]


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2])
    else:
        for result in run(quick="--quick" in sys.argv):
            print(f"{result.name:60} {result.value:9.2f} {result.unit}")
