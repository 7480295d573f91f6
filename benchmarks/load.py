"""Servers in processes of their own, and the load on them: what all benchmarks of the proxy share.

The load comes over raw keep-alive sockets, because an HTTP library would cost more than what is measured. A server
tells its own CPU time, so that none of the load's is counted.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import anyio
import orjson
from benchmarks.floors import ADMIN_KEY, FACTORIES
from benchmarks.null_engine import SETUPS

from areal_actors.lib import loops
from areal_actors.lib.loops import EventLoop
from areal_actors.lib.process_limits import tuned_gc

__all__ = ["Connection", "converse", "live", "server_process", "serving"]


_SDK_HEADERS = "".join(
    f"{name}: {value}\r\n"
    for name, value in {
        "host": "127.0.0.1",
        "accept-encoding": "gzip, deflate",
        "connection": "keep-alive",
        "accept": "application/json",
        "content-type": "application/json",
        "user-agent": "AsyncOpenAI/Python 2.8.0",
        "x-stainless-lang": "python",
        "x-stainless-package-version": "2.8.0",
        "x-stainless-os": "Linux",
        "x-stainless-arch": "x64",
        "x-stainless-runtime": "CPython",
        "x-stainless-runtime-version": "3.11.7",
        "x-stainless-async": "async:asyncio",
        "x-stainless-retry-count": "0",
        "x-stainless-read-timeout": "600",
    }.items()
)
"""What OpenAI's SDK sends with every request: some of it decides how a request is treated."""


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

    async def get(self, path: str) -> Any:
        """The JSON at ``path``."""
        return orjson.loads(await self._exchange(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode()))

    async def chat(self, messages: list[dict[str, str]], *, session: str | None = None) -> str:
        """What the assistant says, in the session of this connection or in another one."""
        path = self._path if session is None else f"/{session}"
        answer = await self.post(f"{path}/v1/chat/completions", {"model": "m", "messages": messages})
        return str(answer["choices"][0]["message"]["content"])

    async def start_chat(self, messages: list[dict[str, str]]) -> dict[str, Any]:
        """The first event with text of a streamed answer, which is read to its end by ``finish_chat``."""
        document = {"model": "m", "messages": messages, "stream": True}
        self._writer.write(_format_post(f"{self._path}/v1/chat/completions", document, "sk-placeholder"))
        while True:
            line = await self._reader.readline()
            if line.startswith(b"data: {"):
                event: dict[str, Any] = orjson.loads(line[len(b"data: ") :])
                if event["choices"][0]["delta"].get("content"):
                    return event

    async def finish_chat(self) -> None:
        """Read the rest of a streamed answer."""
        await self._reader.readuntil(b"data: [DONE]\n\n")
        await self._reader.readuntil(b"0\r\n\r\n")

    async def post(self, path: str, document: dict[str, Any], *, key: str = "sk-placeholder") -> Any:
        """The JSON that answers the JSON ``document``."""
        return orjson.loads(await self._exchange(_format_post(path, document, key)))

    async def _exchange(self, request: bytes) -> bytes:
        self._writer.write(request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        _, _, rest = head.lower().partition(b"content-length: ")
        body = await self._reader.readexactly(int(rest.split(b"\r\n", 1)[0]))
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"the server answered {head!r} {body!r}")
        return body


def _format_post(path: str, document: dict[str, Any], key: str) -> bytes:
    body = orjson.dumps(document)
    head = f"POST {path} HTTP/1.1\r\n{_SDK_HEADERS}authorization: Bearer {key}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def converse(connection: Connection, opening: str, *, num_turns: int, session: str | None = None) -> None:
    """A conversation in which every answer is echoed and followed by a question."""
    messages = [{"role": "user", "content": opening}]
    for _ in range(num_turns):
        content = await connection.chat(messages, session=session)
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "Go on."}]


async def live(connection: Connection, name: str, *, num_turns: int) -> None:
    """The life of one session: capacity, start, turns, a reward, the end and its rows."""
    await connection.post("/grant_capacity", {}, key=ADMIN_KEY)
    opened = await connection.post("/rl/start_session", {"task_id": name}, key=ADMIN_KEY)
    session, key = opened["session_id"], opened["api_key"]
    await converse(connection, f"What is question {name}?", num_turns=num_turns, session=session)
    await connection.post(f"/{session}/rl/set_reward", {"reward": 1.0}, key=key)
    await connection.post(f"/{session}/rl/end_session", {}, key=key)
    await connection.post("/export_trajectories", {"session_id": session, "style": "concat"}, key=ADMIN_KEY)


@contextmanager
def serving(name: str, setup: str, environment: Mapping[str, str] | None = None) -> Iterator[list[str]]:
    """``FACTORIES[name]`` with ``SETUPS[setup]`` in a process of its own; yields its base URLs, one per session."""
    with server_process("benchmarks.load", name, setup, environment=environment) as urls:
        yield urls


@contextmanager
def server_process(module: str, *arguments: str, environment: Mapping[str, str] | None = None) -> Iterator[Any]:
    """Run a module that serves until its standard input is closed; yields the JSON of the first line that it prints."""
    command = [sys.executable, "-m", module, *arguments]
    environment = os.environ | (environment or {})
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())
        finally:
            process.stdin.close()
            process.wait(timeout=20)


def serve(name: str, setup: str) -> None:
    """Serve until the standard input is closed, on the event loop that ``BENCHMARK_LOOP`` names: also uvloop."""

    async def run() -> None:
        async with FACTORIES[name](SETUPS[setup]) as urls:
            with tuned_gc():  # as in a process of ours; the floors have it, too
                print(json.dumps(urls), flush=True)
                await anyio.to_thread.run_sync(sys.stdin.read)

    loop = os.environ.get("BENCHMARK_LOOP", "asyncio")
    event_loop = EventLoop.UVLOOP if loop == "uvloop" else None
    loops.run(run, event_loop=event_loop, backend="trio" if loop == "trio" else "asyncio")


if __name__ == "__main__":
    serve(*sys.argv[1:])
