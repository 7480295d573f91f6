"""Agents know one address, whichever proxies serve behind it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx
import psutil
import pytest
from openai import AsyncOpenAI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from areal_actors.config import load_config
from areal_actors.domain import Role
from areal_actors.kernel import ActorSystem, Ref
from areal_actors.messages import (
    CountLostProxies,
    Directory,
    DismissWorker,
    Endpoint,
    ExpectWorker,
    Report,
    ReportReady,
    RoleSpec,
)
from areal_actors.proxy import ProxyConfig
from areal_actors.proxy.server import bind, serve, url_of
from areal_actors.run.control_plane import DirectoryActor
from areal_actors.run.forwarding import forwarding
from areal_actors.run.training import Trainer

pytestmark = pytest.mark.anyio
TINY = Path(__file__).parents[2] / "examples" / "tiny.yaml"
SECONDS = 240.0
SPEC = RoleSpec(role=Role.PROXY, config=Path("c"), directory=Path("r"), lease_seconds=60.0, is_replaced_alone=True)


@asynccontextmanager
async def open_proxy(name: str, hanging: anyio.Event | None = None) -> AsyncIterator[str]:
    """Serve a proxy that answers with ``name`` and the body. Requests to ``/hang`` set ``hanging``. Yields its URL."""

    async def answer(request: Request) -> Response:
        body = await request.body()
        if request.url.path == "/hang" and hanging is not None:
            hanging.set()
            await anyio.sleep_forever()
        return Response(name.encode() + body)

    listener, stopping = bind(ProxyConfig()), anyio.Event()
    app = Starlette(routes=[Route("/{path:path}", answer, methods=["POST"])])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(serve, app, listener, shutdown=stopping.wait))
        yield url_of(listener)
        stopping.set()


@asynccontextmanager
async def open_forwarding() -> AsyncIterator[tuple[Ref[Directory], httpx.AsyncClient]]:
    """Open a directory, and a client of the address from which requests are forwarded to the proxies that it knows."""
    config = ProxyConfig(drain_seconds=0.0)
    with bind(config) as listener, anyio.fail_after(SECONDS):
        async with (
            ActorSystem.open() as system,
            httpx.AsyncClient(base_url=url_of(listener), timeout=SECONDS) as http,
        ):
            directory = await system.spawn(DirectoryActor())
            async with forwarding(listener, directory, config):
                yield directory, http


async def report(directory: Ref[Directory], worker: str, incarnation: int, url: str) -> None:
    """A proxy serves."""
    endpoint = Endpoint(url=url, admin_key="k")
    await directory.ask(ExpectWorker(worker=worker, incarnation=incarnation, spec=SPEC))
    wanted = ReportReady(worker=worker, incarnation=incarnation, report=Report(address="unix:/a", endpoint=endpoint))
    await directory.ask(wanted)


async def test_forwarding_waits_for_a_proxy_and_ends_its_requests_when_it_is_lost() -> None:
    """The first proxy answers what came before it; its end cuts its requests; the next one has the next."""
    answers, big, hanging = [], bytes(range(256)) * 4096, anyio.Event()

    async def ask(path: str, content: bytes) -> None:
        answers.append(await http.post(path, content=content))

    async with open_forwarding() as (directory, http), open_proxy("1", hanging) as first, open_proxy("2") as second:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, "/early", b"a")
            await anyio.wait_all_tasks_blocked()
            await report(directory, "proxy-0", 1, first)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, "/hang", b"b")
            await ask("/late", b"c")
            await hanging.wait()
            await directory.ask(DismissWorker(worker="proxy-0", incarnation=1))
        await report(directory, "proxy-0", 2, second)
        await ask("/last", big)
        num_lost = await directory.ask(CountLostProxies())

    assert [answer.content for answer in answers if answer.is_success] == [b"1a", b"1c", b"2" + big]
    assert [answer.status_code for answer in answers if not answer.is_success] == [503]
    assert num_lost == 1


async def test_forwarding_spreads_requests_over_proxies() -> None:
    """Those of a proxy that refuses connections go to another one."""
    hanging = anyio.Event()
    async with open_forwarding() as (directory, http), open_proxy("2", hanging) as second:
        async with open_proxy("1", hanging) as first:
            await report(directory, "proxy-0", 1, first)
            await report(directory, "proxy-1", 1, second)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(partial(http.post, "/hang"))
                await hanging.wait()
                seen = {(await http.post("/")).text for _ in range(2)}
                tasks.cancel_scope.cancel()
        seen |= {(await http.post("/")).text for _ in range(2)}

    assert "2" in seen
    assert seen <= {"1", "2"}


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
async def test_killed_proxy_fails_no_episode(tmp_path: Path) -> None:
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
