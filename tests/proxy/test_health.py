"""``/health`` says whether requests can be answered, and why not; ``/livez`` whether the process lives."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import httpx
import pytest
from tests.stacks.shards import open_first

from areal_actors.sessions.shards import shard_journal

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("process", [0, 1])
async def test_a_journal_that_can_no_longer_be_written_is_unhealthy(tmp_path, process):
    """A journal of any process of the service. Its path is not told to clients without a key."""
    async with open_first(tmp_path) as service, service.second():
        path = service.journal if not process else shard_journal(service.journal, 1)
        async with httpx.AsyncClient(base_url=service.url, timeout=60) as http:
            before = await http.get("/health")
            # Another process has taken the file over, so that what is written from now on is refused.
            with closing(sqlite3.connect(path)) as taken, taken:
                taken.execute("UPDATE meta SET value = 99 WHERE key = 'fence'")
            admin = {"authorization": f"Bearer {service.inference.endpoint.admin_key}"}
            starts = [await http.post("/rl/start_session", json={}, headers=admin) for _ in range(2)]
            health, life, metrics = [await http.get(path) for path in ("/health", "/livez", "/metrics")]

    assert (200, {"status": "ok", "requests": 0}) == (before.status_code, before.json())
    assert 503 in [start.status_code for start in starts]
    assert (503, {"status": "unavailable", "requests": 0, "reason": "journal_failed"}) == (
        health.status_code,
        health.json(),
    )
    assert 200 == life.status_code
    assert "areal_failed_journals 1.0" in metrics.text


async def test_sessions_that_cannot_be_reached_are_unhealthy(tmp_path):
    """The proxy is there, and can answer nothing."""
    async with open_first(tmp_path) as service, httpx.AsyncClient(base_url=service.url, timeout=60) as http:
        await service.inference.sessions.stop()
        health = await http.get("/health")

    assert 503 == health.status_code
    assert {"status": "unavailable", "requests": 0, "reason": "sessions_unreachable"} == health.json()
