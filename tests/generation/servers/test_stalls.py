"""A server that answers health checks and samples nothing has stalled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import httpx
import pytest
from attrs import define, field

from areal_actors.errors import EngineError
from areal_actors.generation.servers.config import ServerConfig
from areal_actors.generation.servers.server import Server
from areal_actors.lib.change_signal import ChangeSignal
from areal_actors.testing.virtual_time import virtual_backend


class Dialect:
    """Answers health checks."""

    name = "simulated"

    async def is_ready(self, client: Any) -> bool:
        await anyio.lowlevel.checkpoint()
        return True


@define
class Processes:
    """Notes when a server is killed."""

    killed_at: list[float] = field(factory=list)

    def diagnose(self, url: str) -> str | None:
        return None

    def kill(self, url: str) -> None:
        self.killed_at.append(anyio.current_time())


async def watch_until(condition: Callable[[Server], bool], **config: float) -> tuple[float, Server, Processes]:
    """Let a server sample and hang; return the seconds until the condition holds."""
    processes = Processes()
    async with httpx.AsyncClient() as client:
        server = Server(
            url="http://server",
            dialect=Dialect(),  # type: ignore[arg-type] - what is used of it
            config=ServerConfig(**config),
            generating=client,
            control=client,
            processes=processes,
            changed=ChangeSignal(),
        )
        server.peers = [server]
        server.is_ready = server.has_served = True
        server.await_tokens("a")
        server.note_tokens("a")
        server.await_tokens("a")
        hung_at = anyio.current_time()

        async def ask() -> None:
            with pytest.raises(EngineError):
                await server.until_silent(anyio.sleep_forever())
            server.end_attempt("a")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            tasks.start_soon(server.watch, anyio.sleep_forever)
            while not condition(server):
                await server.changed.wait()
            seconds = anyio.current_time() - hung_at
            tasks.cancel_scope.cancel()
    return seconds, server, processes


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request):
    """Virtual time."""
    return virtual_backend(request.param)


@pytest.mark.anyio
async def test_server_that_samples_nothing_loses_its_requests_and_is_killed():
    """After the time of its settings and the next health check; it is killed after twice that time."""
    seconds, server, processes = await watch_until(lambda server: not server.is_ready, stall_timeout_seconds=30)
    assert 30.0 <= seconds <= 34.0
    assert server.answers
    assert processes.killed_at == []

    seconds, _, processes = await watch_until(lambda server: not server.has_served, stall_timeout_seconds=30)
    assert 60.0 <= seconds <= 64.0
    assert len(processes.killed_at) == 1


@pytest.mark.anyio
async def test_server_may_be_silent_while_no_token_is_awaited():
    """Before its first token, between reads of a slow client, and during a pause."""
    async with httpx.AsyncClient() as client:
        server = Server(
            url="http://server",
            dialect=Dialect(),  # type: ignore[arg-type] - what is used of it
            config=ServerConfig(),
            generating=client,
            control=client,
            changed=ChangeSignal(),
        )
        server.peers = [server]
        server.is_ready = True
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.watch, anyio.sleep_forever)
            server.await_tokens("a")
            await anyio.sleep(1000)
            server.note_tokens("a")
            await anyio.sleep(1000)
            server.is_paused = True
            server.await_tokens("a")
            await anyio.sleep(1000)
            assert server.is_ready
            assert server.stalled_since is None
            tasks.cancel_scope.cancel()
