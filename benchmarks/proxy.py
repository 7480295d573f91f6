"""The proxy: server CPU of a turn beside a bare Starlette application on the same HTTP server.

Both servers are processes of their own and take turns. What counts is the CPU time of the thread that runs the event
loop: HTTP, parsing, trees, actors and tokenising, and an engine that answers at once.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from typing import IO, Any

import anyio
import anyio.lowlevel
import httpx
from anyio import from_thread, to_thread
from attrs import frozen
from benchmarks.harness import Result
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from areal_actors.lib.process_limits import tuned_gc
from areal_actors.models import resolve_model
from areal_actors.proxy import ProxyConfig
from areal_actors.proxy.server import bind, serve, url_of
from areal_actors.rendering import load_renderer
from areal_actors.run.inference import InferenceConfig, open_actors
from areal_actors.testing.engines import EchoEngine

_GATE = 3.0
_NUM_STREAMED = 32
_NUM_SESSIONS = 64
_BODY = {"model": "policy", "max_tokens": 1, "temperature": 1.0}
_CHUNK = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": "w"}}]}


@frozen(kw_only=True)
class Served:
    """A server in a child process."""

    sessions: Sequence[tuple[str, str]]
    """Base URLs and keys."""
    commands: IO[str]
    answers: IO[str]

    def cpu_seconds(self) -> float:
        """Return the CPU time of the thread that runs its event loop."""
        self.commands.write("\n")
        self.commands.flush()
        return float(self.answers.readline())


# ------------------------------------------------------------------------------------------------------ servers


async def serve_proxy() -> None:
    """Serve the complete proxy, for some sessions, with an engine that answers at once."""
    async with AsyncExitStack() as stack:
        renderer = load_renderer(resolve_model("tiny").path)
        opening = open_actors(InferenceConfig(), engine=EchoEngine(), renderer=renderer)
        inference = await stack.enter_async_context(opening)
        sessions = [await stack.enter_async_context(inference.session("benchmark")) for _ in range(_NUM_SESSIONS)]
        await _tell_cpu([(session.base_url, session.api_key) for session in sessions])


async def serve_bare() -> None:
    """Serve an application that reads the body and answers with a constant, on the server of the proxy."""
    message = {"role": "assistant", "content": "word"}
    choices = [{"index": 0, "finish_reason": "stop", "message": message}]
    constant = {"id": "chatcmpl-1", "object": "chat.completion", "choices": choices}

    async def play() -> Any:
        for _ in range(_NUM_STREAMED):
            await anyio.lowlevel.checkpoint()
            yield f"data: {json.dumps(_CHUNK)}\n\n"
        yield "data: [DONE]\n\n"

    async def answer(request: Request) -> Response:
        body = await request.json()
        return StreamingResponse(play(), media_type="text/event-stream") if "stream" in body else JSONResponse(constant)

    app = Starlette(routes=[Route("/v1/chat/completions", answer, methods=["POST"])])
    listener, stopping = bind(ProxyConfig()), anyio.Event()
    url = url_of(listener)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: serve(app, listener, shutdown=stopping.wait))
        await _tell_cpu([(f"{url}/v1", "key")])
        stopping.set()


async def _tell_cpu(sessions: Sequence[tuple[str, str]]) -> None:
    """Print the addresses and keys, then the CPU time of this thread for each line of standard input, until it ends."""
    print(json.dumps(sessions), flush=True)

    def listen() -> None:
        for _ in sys.stdin:
            print(from_thread.run_sync(time.thread_time), flush=True)

    await to_thread.run_sync(listen)


SERVERS: Mapping[str, Callable[[], Awaitable[None]]] = {"proxy": serve_proxy, "bare": serve_bare}


@contextmanager
def _open_server(name: str) -> Iterator[Served]:
    command = [sys.executable, "-m", "benchmarks.proxy", name]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=os.environ | _ENVIRONMENT) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            yield Served(sessions=json.loads(child.stdout.readline()), commands=child.stdin, answers=child.stdout)
        finally:
            child.stdin.close()


_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


# -------------------------------------------------------------------------------------------------------- loads


@frozen
class Client:
    """Sends turns to one session after another."""

    http: httpx.AsyncClient
    sessions: Iterator[tuple[str, str]]

    async def ask(self, messages: Sequence[object], session: tuple[str, str] | None = None) -> Any:
        """Return the message that answers."""
        url, key = session or next(self.sessions)
        headers = {"authorization": f"Bearer {key}"}
        answer = await self.http.post(f"{url}/chat/completions", json={**_BODY, "messages": messages}, headers=headers)
        return answer.raise_for_status().json()["choices"][0]["message"]

    async def read_stream(self, messages: Sequence[object]) -> None:
        """Read a streamed answer to its end."""
        url, key = next(self.sessions)
        body = {**_BODY, "max_tokens": _NUM_STREAMED, "stream": True, "messages": messages}
        headers = {"authorization": f"Bearer {key}"}
        async with self.http.stream("POST", f"{url}/chat/completions", json=body, headers=headers) as answer:
            async for _ in answer.aiter_bytes():
                pass


def _question(number: int) -> dict[str, str]:
    return {"role": "user", "content": f"What comes after question {number}, and how many more are there to come?"}


async def _single_turns(client: Client, number: int) -> None:
    for index in range(number):
        await client.ask([_question(index)])


async def _turns_at_once(client: Client, number: int) -> None:
    async with anyio.create_task_group() as tasks:
        for _ in range(16):
            tasks.start_soon(_single_turns, client, number // 16)


async def _conversations(client: Client, number: int) -> None:
    for index in range(number // 16):
        session, messages = next(client.sessions), [_question(index)]
        for turn in range(16):
            messages += [await client.ask(messages, session), _question(turn)]


async def _streams(client: Client, number: int) -> None:
    for index in range(number):
        await client.read_stream([_question(index)])


LOADS = {
    "single turn, 1 connection": _single_turns,
    "single turn, 16 connections": _turns_at_once,
    "turn of a conversation of 16": _conversations,
    f"stream of {_NUM_STREAMED} tokens": _streams,
}


async def _measure(served: Served, load: Callable[[Client, int], Awaitable[None]], number: int) -> float:
    async with httpx.AsyncClient(timeout=60) as http:
        client = Client(http, itertools.cycle(served.sessions))
        await load(client, 16)
        start = await to_thread.run_sync(served.cpu_seconds)
        await load(client, number)
        return (await to_thread.run_sync(served.cpu_seconds) - start) / number * 1e6


def run(quick: bool) -> list[Result]:  # noqa: FBT001 - the signature of every benchmark
    """Return the server CPU per request of both servers, and the ratio: the least of several alternating rounds."""
    rounds, number = (2, 160) if quick else (7, 480)
    least: dict[tuple[str, str], float] = {}
    with ExitStack() as stack:
        servers = {name: stack.enter_context(_open_server(name)) for name in SERVERS}
        for _ in range(rounds):
            for title, load in LOADS.items():
                for name, served in servers.items():
                    spent = anyio.run(_measure, served, load, number)
                    least[name, title] = min(spent, least.get((name, title), spent))
    results = []
    for title in LOADS:
        results += [
            Result(benchmark="proxy", name=f"{name}, {title}", value=least[name, title], unit="µs/request")
            for name in SERVERS
        ]
        ratio, gate = least["proxy", title] / least["bare", title], _GATE if title.startswith("single") else None
        results.append(
            Result(benchmark="proxy", name=f"proxy over bare, {title}", value=ratio, unit="ratio",
                   baseline=f"bare, {title}", gate=gate)
        )  # fmt: skip
    return results


if __name__ == "__main__":
    with tuned_gc():
        anyio.run(SERVERS[sys.argv[1]])
