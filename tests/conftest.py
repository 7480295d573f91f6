"""Fixtures of the whole suite: async tests run on both event loops."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("ci", max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("fuzz", max_examples=3_000, deadline=None, suppress_health_check=list(HealthCheck))
settings.register_profile("nightly", max_examples=100_000, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Every test marked ``anyio`` runs on asyncio and on trio."""
    return str(request.param)
