"""Fixtures of the core's suite, for the tests of plug-ins."""

from __future__ import annotations

from tests.conftest import anyio_backend, auto_dtype, max_gap, pytest_collection_finish

__all__ = ["anyio_backend", "auto_dtype", "max_gap", "pytest_collection_finish"]
