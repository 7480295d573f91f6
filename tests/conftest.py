"""Fixtures of the whole suite: both event loops, and a ``dtype: auto`` that is the same on every machine."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Before any test or subprocess reads it. AREAL_AUTO_DTYPE=bfloat16 runs the whole suite in bfloat16.
os.environ.setdefault("AREAL_AUTO_DTYPE", "float32")
# Each HTTP client that is created reads the root certificates, which takes 40 ms of CPU time: a twentieth of that of
# the suite. Tests ask this machine alone, so they trust one certificate, whose key was thrown away.
os.environ["SSL_CERT_FILE"] = str(Path(__file__).with_name("certificate.pem"))

settings.register_profile("ci", max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("fuzz", max_examples=3_000, deadline=None, suppress_health_check=list(HealthCheck))
settings.register_profile("nightly", max_examples=100_000, deadline=None, suppress_health_check=list(HealthCheck))


def pytest_collection_finish() -> None:
    """Leave all that has been imported out of garbage collections, which took a quarter of the suite's CPU time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Every test marked ``anyio`` runs on asyncio and on trio."""
    return str(request.param)


@pytest.fixture(params=["float32", "bfloat16"])
def auto_dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test with each format as ``dtype: auto``, in this process and in those that it starts."""
    monkeypatch.setenv("AREAL_AUTO_DTYPE", str(request.param))
    return str(request.param)


@pytest.fixture
def max_gap(auto_dtype: str) -> float:
    """How far one token's log-probability by the engine may be from the trainer's, for the ``tiny`` model.

    The largest of 16 steps with 3,000 tokens was 2e-6 in float32 and 0.037 in bfloat16.
    """
    return {"float32": 1e-4, "bfloat16": 0.1}[auto_dtype]
