"""Fixtures of the core's suite for the tests of plug-ins, which skip where their plug-in is not installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.conftest import anyio_backend, auto_dtype, max_gap, pytest_collection_finish

__all__ = ["anyio_backend", "auto_dtype", "max_gap", "pytest_collection_finish"]

HERE = Path(__file__).parent


class _Uninstalled(pytest.Module):
    """Tests of a plug-in that is not installed."""

    def collect(self) -> list[pytest.Item]:
        pytest.skip(f"needs a plug-in: pip install -e plugins/{self.path.relative_to(HERE).parts[0]}")


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Skip the tests in ``plugins/<distribution>`` without importing them if its package is not installed."""
    distribution = module_path.relative_to(HERE).parts[0]
    if find_spec(distribution.replace("-", "_")) is not None:
        return None
    skipped: pytest.Module = _Uninstalled.from_parent(parent, path=module_path)
    return skipped
