"""The model against the world: the same sessions over real sockets in real time, beside what the model says of them.

A process of its own serves: the proxy, the actors and the simulated engines, whose answers and latencies are those of
the model, because it is the same code on a real clock. This process is the agents, one socket each. What is compared is
what both can tell: requests, seconds and the CPU time of the server.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import anyio
from attrs import asdict, frozen
from benchmarks.floors import ADMIN_KEY, serve_as_the_proxy, served
from benchmarks.load import Connection
from benchmarks.simulation.agents import MAX_NEW_TOKENS, Message, Observed, Workload, converse
from benchmarks.simulation.model import Measured, Scenario, in_process_cores, open_service, run_scenario
from benchmarks.simulation.vocabulary import create_word_renderer
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from areal_actors.lib.process_limits import tuned_gc
from areal_actors.proxy import ProxyConfig, create_app

__all__ = ["Figures", "format_comparison", "validate"]


@frozen(kw_only=True)
class Figures:
    """What both the model and the world can tell."""

    requests_per_second: float
    turns_per_second: float
    latency_p50: float
    latency_p90: float
    latency_p99: float
    cpu_ms_per_request: float
    cores: float


class _Agents:
    """Agents that come and go over sockets."""

    def __init__(self, url: str, workload: Workload) -> None:
        self._url = url
        self._workload = workload
        self.observed = Observed(is_open=False)
        self.num_requests = 0

    async def come_and_go(self, number: int) -> None:
        """One session after the other, over one connection."""
        connection = await Connection(self._url).open()
        try:
            for episode in itertools.count():
                await self._live(connection, f"s{number}-{episode}")
        finally:
            connection.close()

    async def _live(self, connection: Connection, name: str) -> None:
        await self._post(connection, "/grant_capacity", {}, key=ADMIN_KEY)
        opened = await self._post(connection, "/rl/start_session", {"task_id": name}, key=ADMIN_KEY)
        session, key = opened["session_id"], opened["api_key"]
        await converse(
            _Chat(self, connection),
            session,
            workload=self._workload,
            key=name,
            observed=self.observed,
            clock=time.monotonic,
        )
        await self._post(connection, f"/{session}/rl/set_reward", {"reward": 1.0}, key=key)
        await self._post(connection, f"/{session}/rl/end_session", {}, key=key)
        await self._post(connection, "/export_trajectories", {"session_id": session}, key=ADMIN_KEY)

    async def ask(self, connection: Connection, session: str, messages: Sequence[Message]) -> str:
        """A turn."""
        document = {"model": "m", "messages": messages, "max_tokens": MAX_NEW_TOKENS}
        answer = await self._post(connection, f"/{session}/v1/chat/completions", document)
        return str(answer["choices"][0]["message"]["content"])

    async def _post(self, connection: Connection, path: str, document: dict[str, Any], **options: str) -> Any:
        self.num_requests += 1
        try:
            return await connection.post(path, document, **options)
        except (asyncio.IncompleteReadError, ConnectionError):
            # The server hangs up on who is silent for long, as any client of HTTP knows.
            return await (await connection.open()).post(path, document, **options)


@frozen
class _Chat:
    """The service as one agent reaches it."""

    _agents: _Agents
    _connection: Connection

    async def chat(self, session: str, messages: Sequence[Message]) -> str:
        """A turn."""
        return await self._agents.ask(self._connection, session, messages)


async def _measure(url: str, scenario: Scenario) -> Figures:
    agents = _Agents(url, scenario.workload)
    async with anyio.create_task_group() as tasks:
        for number in range(scenario.num_sessions):
            tasks.start_soon(agents.come_and_go, number)
        await anyio.sleep(scenario.warm_up_seconds)
        cpu, num_requests, started = await _read_cpu(url), agents.num_requests, time.monotonic()
        agents.observed.is_open = True
        await anyio.sleep(scenario.measured_seconds)
        agents.observed.is_open = False
        cpu, seconds = await _read_cpu(url) - cpu, time.monotonic() - started
        num_requests = agents.num_requests - num_requests
        tasks.cancel_scope.cancel()
    return _figures(agents.observed, num_requests=num_requests, cpu=cpu, seconds=seconds)


async def _read_cpu(url: str) -> float:
    connection = await Connection(url).open()
    try:
        return float(await connection.get("/cpu"))
    finally:
        connection.close()


def _figures(observed: Observed, *, num_requests: int, cpu: float, seconds: float) -> Figures:
    return Figures(
        requests_per_second=num_requests / seconds,
        turns_per_second=len(observed.seconds) / seconds,
        latency_p50=observed.percentile(50),
        latency_p90=observed.percentile(90),
        latency_p99=observed.percentile(99),
        cpu_ms_per_request=cpu / max(num_requests, 1) * 1e3,
        cores=cpu / seconds,
    )


def _predict(measured: Measured) -> Figures:
    seconds = measured.reading.at
    return _figures(
        measured.observed,
        num_requests=measured.num_requests,
        cpu=in_process_cores(measured.reading) * seconds,
        seconds=seconds,
    )


def validate(scenario: Scenario) -> dict[str, dict[str, float]]:
    """Figures by name: ``predicted``, ``measured``, and the ``deviation`` of the first as a share of the second."""
    predicted = _predict(run_scenario(scenario))
    with _serving(scenario) as url:
        measured = asyncio.run(_measure(url, scenario))
    return {
        name: {"predicted": value, "measured": seen, "deviation": value / seen - 1 if seen else 0.0}
        for (name, value), seen in zip(asdict(predicted).items(), asdict(measured).values(), strict=True)
    }


def format_comparison(comparison: dict[str, dict[str, float]]) -> str:
    """A table for people."""
    heading = f"{'':22}{'predicted':>12}{'measured':>12}{'deviation':>12}"
    rows = [
        f"{name:22}{row['predicted']:12.3f}{row['measured']:12.3f}{row['deviation']:+12.1%}"
        for name, row in comparison.items()
    ]
    return "\n".join((heading, *rows))


# ---------------------------------------------------------------------------------------------- the server


@contextmanager
def _serving(scenario: Scenario) -> Iterator[str]:
    """The server, in a process of its own, for the length of the block; yields its URL."""
    command = [sys.executable, "-m", "benchmarks.simulation.validation", str(scenario.num_engines)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield str(json.loads(process.stdout.readline()))
        finally:
            process.stdin.close()
            process.wait(timeout=20)


async def _tell_cpu(_: Request) -> Response:
    return PlainTextResponse(str(time.process_time()))


async def _serve(num_engines: int) -> None:
    """Serve until the standard input is closed."""
    scenario = Scenario(num_engines=num_engines, is_external=True)
    async with open_service(scenario, None, renderer=create_word_renderer()) as service:
        app = create_app(
            sessions=service.sessions,
            exports=service.exports,
            capacity=service.capacity,
            config=ProxyConfig(admin_key=ADMIN_KEY),
        )
        app.router.routes.append(Route("/cpu", _tell_cpu))
        async with served(app, serve_as_the_proxy) as url:
            with tuned_gc():
                print(json.dumps(url), flush=True)
                await anyio.to_thread.run_sync(sys.stdin.read)


if __name__ == "__main__":
    anyio.run(_serve, int(sys.argv[1]))
