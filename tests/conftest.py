"""Fixtures of the whole suite: both event loops, and a ``dtype: auto`` that is the same on every machine."""

from __future__ import annotations

import gc
import os
import re
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Before any test or subprocess reads it. AREAL_AUTO_DTYPE=bfloat16 runs the whole suite in bfloat16.
os.environ.setdefault("AREAL_AUTO_DTYPE", "float32")
# Each HTTP client that is created reads the root certificates, which takes 40 ms of CPU time: a twentieth of that of
# the suite. Tests ask this machine alone, so they trust one certificate, whose key was thrown away.
os.environ["SSL_CERT_FILE"] = str(Path(__file__).with_name("certificate.pem"))

settings.register_profile("ci", max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
settings.register_profile("fuzz", max_examples=3_000, deadline=None, suppress_health_check=list(HealthCheck))
settings.register_profile("nightly", max_examples=100_000, deadline=None, suppress_health_check=list(HealthCheck))


_NOT_QUICK = re.compile(
    r"""\b(subprocess|Popen|executable|multiprocessing|open_process|ForkedProcess|CliRunner|Child|OwnThread
    |torch|transformers|open_inference|load_renderer|resolve_model|Trainer|train|open_stage|slow|uvloop)\b""",
    re.VERBOSE,
)
"""Words of test modules that start processes or load models."""
_IMPORTED = re.compile(r"^from (tests[.\w]*|tools[.\w]*) import", re.MULTILINE)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--quick``: one event loop, and only modules that start no process and load no model."""
    parser.addoption("--quick", action="store_true", help="asyncio only, no process start, no model")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out modules that are not quick, without importing them; helpers that a module imports count as well."""
    is_module = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    if config.getoption("--quick") and is_module and not is_quick(collection_path):
        return True
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With ``--quick``, leave out tests on trio, slow ones, and those that need the pretrained model or Slurm."""
    if not config.getoption("--quick"):
        return

    def is_chosen(item: pytest.Item) -> bool:
        is_marked = any(item.get_closest_marker(name) for name in ("model", "slow"))
        needs_slurm = "cluster" in getattr(item, "fixturenames", ())
        return not (is_marked or needs_slurm) and re.search(r"\btrio\b", item.name) is None

    config.hook.pytest_deselected(items=[item for item in items if not is_chosen(item)])
    items[:] = [item for item in items if is_chosen(item)]


@cache
def is_quick(path: Path) -> bool:
    """Return whether neither the module nor a helper that it imports starts processes or loads models."""
    text = path.read_text(encoding="utf-8")
    root = Path(__file__).parents[1]
    helpers = (root.joinpath(*name.split(".")).with_suffix(".py") for name in _IMPORTED.findall(text))
    return _NOT_QUICK.search(text) is None and all(is_quick(helper) for helper in helpers if helper.exists())


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
