"""Servers that hang: real processes that are stopped, as a deadlock or a lost GPU would stop them."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import psutil
import pytest
from attrs import evolve
from tests.generation.servers.server_stack import (
    CONFIG,
    WHOLE,
    ReplicatedServers,
    ask,
    ids_of,
    open_replicated,
    open_server_stack,
)

from areal_actors.domain import Snapshot
from areal_actors.generation.servers.config import Backend, ServerConfig
from areal_actors.generation.servers.launching import LaunchedServers, find_kind, launch_servers
from areal_actors.generation.servers.sglang import SGLangDialect
from areal_actors.models.built_in import create_tiny

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).parents[3]


@asynccontextmanager
async def open_processes(tmp_path: Path, **settings: float) -> AsyncIterator[tuple[ReplicatedServers, LaunchedServers]]:
    """Two servers, each of which counts as silent after 0.6 to 0.65 s."""
    model = create_tiny(tmp_path / "models")
    config = ServerConfig(
        num_servers=2,
        command=(sys.executable, "-m", "tests.generation.servers.fake_process"),
        environment={
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
            "OMP_NUM_THREADS": "1",
            "FAKE_HOLD": str(tmp_path / "hold"),
        },
        health_interval_seconds=0.05,
        health_timeout_seconds=0.3,
        **settings,
    )
    kind = find_kind(Backend.SGLANG)
    with anyio.fail_after(60):
        async with (
            launch_servers(kind, config, model=model, logs=tmp_path / "logs") as launched,
            open_replicated(
                SGLangDialect(stream_interval=4),
                config,
                urls=launched.urls,
                model=model,
                snapshot=Snapshot(version=0, path=model),
                publish_directory=tmp_path / "published",
                processes=launched,
            ) as engine,
        ):
            try:
                yield engine, launched
            finally:
                for process in launched.processes.values():
                    os.killpg(process, signal.SIGCONT)


async def test_answers_continue_elsewhere_when_a_server_hangs(tmp_path: Path) -> None:
    """Each of two answers is at a server; one server is stopped after the first tokens of both. No token is missing."""
    heard: dict[int, list] = {0: [], 1: []}
    begun = [anyio.Event(), anyio.Event()]

    async def read(engine: ReplicatedServers, number: int) -> None:
        async with engine.generate(ask(number)) as chunks:
            async for chunk in chunks:
                heard[number].append(chunk)
                begun[number].set()

    async with open_processes(tmp_path) as (engine, launched):
        async with anyio.create_task_group() as tasks:
            for number in (0, 1):
                tasks.start_soon(read, engine, number)
            for event in begun:
                await event.wait()
            stopped = launched.processes[launched.urls[0]]
            os.killpg(stopped, signal.SIGSTOP)
        assert psutil.STATUS_STOPPED == psutil.Process(stopped).status()

    assert [WHOLE, WHOLE] == [ids_of(chunks) for chunks in heard.values()]


async def test_server_that_hangs_does_not_hold_an_update_and_is_replaced(tmp_path: Path) -> None:
    """The other one serves the new weights, however long the successor of the stopped process takes to start.

    The successor has the newest weights as soon as it serves.
    """
    async with open_processes(tmp_path, hang_timeout_seconds=1.0) as (engine, launched):
        first, second = launched.urls
        (tmp_path / "hold").touch()
        stopped = launched.processes[first]
        os.killpg(stopped, signal.SIGSTOP)
        await engine.load(Snapshot(version=1, path=create_tiny(tmp_path / "models")))
        async with engine.generate(ask(0)) as chunks:
            updated = [chunk async for chunk in chunks]
        while launched.processes.get(first) in (stopped, None):
            await anyio.lowlevel.checkpoint()
        assert not psutil.pid_exists(stopped)

        await engine.load(Snapshot(version=2, path=create_tiny(tmp_path / "models")))
        async with engine.generate(ask(1)) as chunks:
            meanwhile = [chunk async for chunk in chunks]
        (tmp_path / "hold").unlink()
        os.killpg(launched.processes[second], signal.SIGSTOP)
        async with engine.generate(ask(2)) as chunks:
            replaced = [chunk async for chunk in chunks]

    assert [WHOLE, WHOLE, WHOLE] == [ids_of(updated), ids_of(meanwhile), ids_of(replaced)]
    assert [{1}, {2}, {2}] == [{chunk.version for chunk in chunks} for chunks in (updated, meanwhile, replaced)]


async def test_server_that_answers_but_samples_nothing_loses_its_requests(tmp_path: Path) -> None:
    """A pause is not a reason to give it up. It gets nothing but probes until it samples again."""
    model = create_tiny(tmp_path / "models")
    config = evolve(CONFIG, stall_timeout_seconds=0.5)
    async with open_server_stack(model, tmp_path, num_servers=2, config=config, is_gated=True) as (engine, servers):
        heard: list = []
        with anyio.fail_after(60):
            async with engine.generate(ask(0)) as chunks:
                for server in servers:
                    server.engine.release(10)
                # Two events, from which its speed is known.
                while len(ids_of(heard)) < 9:
                    heard.append(await anext(chunks))
                (stalled,) = [each for each in servers if each.engine.statistics().running]
                (other,) = [each for each in servers if each is not stalled]
                await engine.pause()
                await anyio.sleep(1.0)
                assert stalled.engine.statistics().running
                await engine.resume()
                other.engine.release(1000)
                heard += [chunk async for chunk in chunks]
            async with engine.generate(ask(1)) as chunks:
                elsewhere = [chunk async for chunk in chunks]
            prompts = [request.prompt.tolist() for request in stalled.engine.requests]
            while len(stalled.engine.requests) == 1:  # noqa: ASYNC110 - no message tells
                await anyio.sleep(0.01)
            stalled.engine.release(1000)
            await engine.wait_until_all_serve()

    assert [WHOLE, WHOLE] == [ids_of(heard), ids_of(elsewhere)]
    assert [5, 6, 7] == prompts[0]
    assert [0] == stalled.engine.requests[-1].prompt.tolist()
    assert 2 == len(other.engine.requests)
