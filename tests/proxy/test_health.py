"""``/health`` says whether requests can be answered, and why not; ``/livez`` whether the process lives."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import httpx
import pytest
from tests.client.service import open_service

from areal_actors.journal import SqliteJournal
from areal_actors.run.inference import InferenceConfig
from areal_actors.sessions.intake import IntakeConfig

pytestmark = pytest.mark.anyio


async def test_health_reports_a_journal_that_can_no_longer_be_written(tmp_path):
    """The path of the journal is not told to clients without a key."""
    path = tmp_path / "journal.sqlite"
    async with (
        SqliteJournal.open(path) as journal,
        open_service(InferenceConfig(intake=IntakeConfig(grace_seconds=0.0)), journal=journal) as service,
        httpx.AsyncClient(base_url=service.endpoint.url, timeout=60) as http,
    ):
        before = await http.get("/health")
        # Another process has taken the file over, so that what is written from now on is refused.
        with closing(sqlite3.connect(path)) as taken, taken:
            taken.execute("UPDATE meta SET value = 99 WHERE key = 'fence'")
        admin = {"authorization": f"Bearer {service.endpoint.admin_key}"}
        start = await http.post("/rl/start_session", json={}, headers=admin)
        health, life, metrics = [await http.get(path) for path in ("/health", "/livez", "/metrics")]

    assert (200, {"status": "ok", "requests": 0}) == (before.status_code, before.json())
    assert 503 == start.status_code
    assert (503, {"status": "unavailable", "requests": 0, "reason": "journal_failed"}) == (
        health.status_code,
        health.json(),
    )
    assert 200 == life.status_code
    assert "areal_failed_journals 1.0" in metrics.text


async def test_health_reports_sessions_that_cannot_be_reached():
    """The proxy is there, and can answer nothing."""
    async with open_service() as service, httpx.AsyncClient(base_url=service.endpoint.url, timeout=60) as http:
        await service.sessions.stop()
        health = await http.get("/health")

    assert 503 == health.status_code
    assert {"status": "unavailable", "requests": 0, "reason": "sessions_unreachable"} == health.json()
