"""What the tests of whole runs share: models are made once a session, and torch keeps to one thread."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A cache of models of the tests' own."""
    before = os.environ.get("AREAL_CACHE")
    os.environ["AREAL_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield os.environ["AREAL_CACHE"]
    if before is None:
        del os.environ["AREAL_CACHE"]
    else:
        os.environ["AREAL_CACHE"] = before


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Tiny matrices gain nothing from threads, and sums keep their order."""
    torch.set_num_threads(1)
