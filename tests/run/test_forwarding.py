"""Agents know one address, whichever proxies serve behind it."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
from anyio.abc import SocketAttribute, SocketStream
from openai import AsyncOpenAI

from areal_actors.config import load_config
from areal_actors.domain import Role
from areal_actors.kernel import ActorSystem, Ref
from areal_actors.messages import (
    AwaitEndpoint,
    CountLostProxies,
    Directory,
    DismissWorker,
    Endpoint,
    EndpointChanged,
    ExpectWorker,
    Report,
    ReportReady,
    RoleSpec,
)
from areal_actors.run.control_plane import DirectoryActor
from areal_actors.run.forwarding import forwarding
from areal_actors.run.training import Trainer

pytestmark = pytest.mark.anyio
TINY = Path(__file__).parents[2] / "examples" / "tiny.yaml"
SECONDS = 240.0
SPEC = RoleSpec(role=Role.PROXY, config=Path("c"), directory=Path("r"), lease_seconds=60.0, is_replaced_alone=True)


@asynccontextmanager
async def open_echo(name: bytes) -> AsyncIterator[str]:
    """Serve connections that answer each message with ``name`` and the message. Yields the URL."""

    async def answer(stream: SocketStream) -> None:
        async with stream:
            async for item in stream:
                await stream.send(name + item)

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, answer)
        yield f"http://127.0.0.1:{listener.extra(SocketAttribute.local_port)}"
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def open_forwarding() -> AsyncIterator[tuple[Ref[Directory], int]]:
    """A directory, and the port from which connections are forwarded to the proxies that it knows."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    with listener, anyio.fail_after(SECONDS):
        async with ActorSystem.open() as system:
            directory = await system.spawn(DirectoryActor())
            async with forwarding(listener, directory):
                yield directory, listener.getsockname()[1]


async def report(directory: Ref[Directory], worker: str, incarnation: int, url: str) -> None:
    """A proxy serves."""
    endpoint = Endpoint(url=url, admin_key="k")
    await directory.ask(ExpectWorker(worker=worker, incarnation=incarnation, spec=SPEC))
    wanted = ReportReady(worker=worker, incarnation=incarnation, report=Report(address="unix:/a", endpoint=endpoint))
    await directory.ask(wanted)


async def test_connections_wait_for_a_proxy_and_end_with_it() -> None:
    """The first proxy answers what came before it; its end closes its connections; the next one has the next."""
    big, echo = bytes(range(256)) * 4096, b""
    async with open_forwarding() as (directory, port), open_echo(b"1") as first, open_echo(b"2") as second:
        async with await anyio.connect_tcp("127.0.0.1", port) as early:
            await early.send(b"a")
            await report(directory, "proxy-0", 1, first)
            answers = [await early.receive()]
            await early.send_eof()
            with pytest.raises(anyio.EndOfStream):
                await early.receive()
        async with await anyio.connect_tcp("127.0.0.1", port) as late:
            await late.send(b"b")
            answers.append(await late.receive())
            await directory.ask(DismissWorker(worker="proxy-0", incarnation=1))
            with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                await late.receive()
        await report(directory, "proxy-0", 2, second)
        async with await anyio.connect_tcp("127.0.0.1", port) as last, anyio.create_task_group() as tasks:
            tasks.start_soon(last.send, big)
            while len(echo.replace(b"2", b"")) < len(big.replace(b"2", b"")):
                echo += await last.receive()
        num_lost = await directory.ask(CountLostProxies())

    assert [b"1a", b"1b"] == answers
    assert big.replace(b"2", b"") == echo.replace(b"2", b"")
    assert 1 == num_lost


async def test_connections_are_spread_over_proxies() -> None:
    """And those of a proxy that refuses connections go to another one."""
    async with open_forwarding() as (directory, port), open_echo(b"1") as first, open_echo(b"2") as second:
        await report(directory, "proxy-0", 1, first)
        await report(directory, "proxy-1", 1, second)
        async with await anyio.connect_tcp("127.0.0.1", port) as one:
            await one.send(b"a")
            seen = {await one.receive()}
            async with await anyio.connect_tcp("127.0.0.1", port) as other:
                await other.send(b"a")
                seen.add(await other.receive())

    assert {b"1a", b"2a"} == seen


async def test_agents_are_told_the_address_that_forwards() -> None:
    """Once a proxy serves."""
    stable = Endpoint(url="http://front:1", admin_key="k")
    async with ActorSystem.open() as system:
        directory = await system.spawn(DirectoryActor())
        await directory.ask(EndpointChanged(endpoint=stable, is_forwarded=True))
        with anyio.move_on_after(0.02) as patience:
            await directory.ask(AwaitEndpoint())
        await report(directory, "proxy-0", 1, "http://node:2")
        found = await directory.ask(AwaitEndpoint())

    assert patience.cancelled_caught
    assert stable == found


class TwoTurns:
    """Takes two turns, with the proxy killed between those of the first episodes. Every other one never retries."""

    def __init__(self) -> None:
        self.urls: set[str] = set()
        self.num_begun = 0
        self.num_waiting = 0
        self.num_restarted = 0
        self.has_killed = anyio.Event()

    async def run(self, data: dict[str, Any], **extra: Any) -> float:
        """Ask twice, by an SDK that repeats requests, or by a client that does not."""
        self.num_begun += 1
        is_patient = self.num_begun % 2 == 0
        self.urls.add(extra["base_url"].split("/task-")[0].rsplit("/", 2)[0])
        text, messages = "", [{"role": "user", "content": data["question"]}]
        headers = {"authorization": f"Bearer {extra['api_key']}"}
        sdk = AsyncOpenAI(
            base_url=extra["base_url"], api_key=extra["api_key"], http_client=extra["http_client"], max_retries=8
        )
        for turn in range(2):
            asked = {"model": "policy", "messages": messages, "max_tokens": 4}
            if is_patient:
                text = (await sdk.chat.completions.create(**asked)).choices[0].message.content or ""
            else:
                url = f"{extra['base_url']}/chat/completions"
                answer = await extra["http_client"].post(url, json=asked, headers=headers)
                text = answer.raise_for_status().json()["choices"][0]["message"]["content"] or ""
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "again"}]
            if turn == 0 and not self.has_killed.is_set():
                self.num_waiting += 1
                await self.has_killed.wait()
        return float(len(text))


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_killed_proxy_fails_no_episode(tmp_path: Path) -> None:
    """In the middle of episodes of two turns: those of an SDK go on, and the others are run again."""
    settings = (
        *("total_steps=2", "batch_size=2", "rollout.group_size=2", "eval_dataset=null"),
        *("logging={display: none, trackers: []}", "scheduler.roles={proxy: {}}"),
        *("scheduler.local.oversubscribe=true", "scheduler.address=tcp://127.0.0.1:0"),
    )
    agent, run_dir = TwoTurns(), tmp_path / "run"
    with anyio.fail_after(SECONDS):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(Trainer(load_config(TINY, settings)).run, agent, run_dir=run_dir))
            while agent.num_waiting < 4:  # noqa: ASYNC110
                await anyio.sleep(0.05)
            (proxy,) = [
                child for child in psutil.Process().children(recursive=True) if "areal_actors.worker" in child.cmdline()
            ]
            os.kill(proxy.pid, signal.SIGKILL)
            agent.has_killed.set()
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    events = [json.loads(line)["event"] for line in (run_dir / "logs" / "run.jsonl").read_text().splitlines()]

    assert [(1, 0, 4), (2, 0, 4)] == [(one["step"], one["failed_episodes"], one["episodes"]) for one in steps]
    assert "attempt_restarted" not in events
    # Eight episodes, and two that were cut off.
    assert 10 == agent.num_begun
    assert 1 == len(agent.urls)
