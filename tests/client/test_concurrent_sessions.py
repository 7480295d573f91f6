"""Many sessions at once, by every library: what each of them remembers is its own, and all of its own."""

from __future__ import annotations

from contextlib import asynccontextmanager

import anyio
import httpx
import httpx2
import pytest
from anyio import to_thread
from tests.client.service import open_service

from areal_actors.client import AgentSession
from areal_actors.messages import CollectSession

requests = pytest.importorskip("requests")

pytestmark = pytest.mark.anyio

NUM_SESSIONS = 20
NUM_TURNS = 3
PATIENCE = 120.0
"""Seconds that a client waits for an answer: three hundred others ask at the same time, perhaps on a busy machine."""


def body(marker, turn):
    """The request of a turn; its own text says where it belongs."""
    return {"model": "policy", "messages": [{"role": "user", "content": f"{marker} turn {turn}"}], "max_tokens": 4}


class Everybody:
    """One client of each kind, which all sessions share: connections say nothing about who uses them."""

    def __init__(self, url, stack, blocking):
        self.url = f"{url}/v1/chat/completions"
        self.blocking = blocking
        self.httpx = stack[0]
        self.httpx2 = stack[1]
        self.aiohttp = stack[2] if len(stack) > 2 else None

    async def by_httpx(self, question):
        return (await self.httpx.post(self.url, json=question)).json()

    async def by_httpx2(self, question):
        return (await self.httpx2.post(self.url, json=question)).json()

    async def by_httpx_in_a_thread(self, question):
        return await to_thread.run_sync(lambda: self.blocking[0].post(self.url, json=question).json())

    async def by_httpx2_in_a_thread(self, question):
        return await to_thread.run_sync(lambda: self.blocking[1].post(self.url, json=question).json())

    async def by_requests_in_a_thread(self, question):
        return await to_thread.run_sync(lambda: requests.post(self.url, json=question, timeout=PATIENCE).json())

    async def by_aiohttp(self, question):
        async with self.aiohttp.post(self.url, json=question) as response:
            return await response.json()

    @property
    def ways(self):
        """All that work on this event loop."""
        ways = [
            self.by_httpx,
            self.by_requests_in_a_thread,
            self.by_httpx2,
            self.by_httpx_in_a_thread,
            self.by_httpx2_in_a_thread,
        ]
        return ways if self.aiohttp is None else [*ways, self.by_aiohttp]


@asynccontextmanager
async def everybody(url, backend):
    """The shared clients, made outside of every session."""
    async with (
        httpx.AsyncClient(trust_env=False, timeout=PATIENCE) as first,
        httpx2.AsyncClient(trust_env=False, timeout=PATIENCE) as second,
    ):
        with (
            httpx.Client(trust_env=False, timeout=PATIENCE) as third,
            httpx2.Client(trust_env=False, timeout=PATIENCE) as fourth,
        ):
            async with _aiohttp(backend) as fifth:
                yield Everybody(url, (first, second, *fifth), (third, fourth))


@asynccontextmanager
async def _aiohttp(backend):
    if backend != "asyncio":
        yield ()
    else:
        aiohttp = pytest.importorskip("aiohttp")
        async with aiohttp.ClientSession() as session:
            yield (session,)


async def test_concurrent_sessions_never_mix(anyio_backend):
    """Twenty sessions, every turn by another library, in tasks and in threads, over shared connections."""
    seen = {}
    async with open_service() as inference, everybody(inference.endpoint.url, anyio_backend) as clients:

        async def play(number):
            options = {"base_url": inference.endpoint.url, "api_key": inference.endpoint.admin_key}
            async with AgentSession(task_id=f"s{number}", **options) as session:
                async with anyio.create_task_group() as turns:
                    for turn in range(NUM_TURNS * len(clients.ways)):
                        way = clients.ways[(number + turn) % len(clients.ways)]
                        turns.start_soon(way, body(f"session{number}", turn))
                await session.finalize(number)
            record = await inference.sessions.ask(CollectSession(session=session.session_id))
            seen[number] = [interaction.messages[-1].content for interaction in record.interactions]

        async with anyio.create_task_group() as players:
            for number in range(NUM_SESSIONS):
                players.start_soon(play, number)
        num_turns = NUM_TURNS * len(clients.ways)

    expected = {n: sorted(f"session{n} turn {turn}" for turn in range(num_turns)) for n in range(NUM_SESSIONS)}
    assert expected == {number: sorted(texts) for number, texts in seen.items()}
