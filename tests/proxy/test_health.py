"""Health says whether requests can be answered, and why not; who only asks whether the process lives learns that."""

from __future__ import annotations

import httpx
import pytest
from tests.stacks.shards import open_first

from areal_actors.sessions.shards import shard_journal

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("process", [0, 1])
async def test_a_journal_that_can_no_longer_be_written_is_unhealthy(tmp_path, process):
    """That of any process of the service, whichever process answers; its path is not told to clients without a key."""
    async with open_first(tmp_path) as service, service.second():
        path = service.journal if not process else shard_journal(service.journal, 1)
        async with httpx.AsyncClient(base_url=service.url) as http:
            before = await http.get("/health")
            # Its lock is another process's: what is written from now on is refused, and so is everything after it.
            other = tmp_path / "other"
            other.write_text("another process")
            other.rename(f"{path}.lock")
            admin = {"authorization": f"Bearer {service.inference.endpoint.admin_key}"}
            starts = [await http.post("/rl/start_session", json={}, headers=admin) for _ in range(2)]
        answers = []
        for _ in range(4):
            # Any of the processes may take a connection.
            async with httpx.AsyncClient(base_url=service.url) as http:
                answers.append([await http.get(path) for path in ("/health", "/livez", "/metrics")])

    assert (200, {"status": "ok", "requests": 0}) == (before.status_code, before.json())
    assert 503 in [start.status_code for start in starts]
    for health, life, metrics in answers:
        assert 503 == health.status_code
        assert {"status": "unavailable", "requests": 0, "reason": "journal_failed"} == health.json()
        assert 200 == life.status_code
        assert "areal_failed_journals 1.0" in metrics.text


async def test_sessions_that_cannot_be_reached_are_unhealthy(tmp_path):
    """The proxy is there, and can answer nothing."""
    async with open_first(tmp_path) as service, httpx.AsyncClient(base_url=service.url) as http:
        await service.inference.sessions.stop()
        health = await http.get("/health")

    assert 503 == health.status_code
    assert {"status": "unavailable", "requests": 0, "reason": "sessions_unreachable"} == health.json()
