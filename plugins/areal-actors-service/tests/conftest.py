"""Where the tests of users keep keys."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def keys_path(tmp_path: Path) -> Path:
    """A file that does not exist yet."""
    return tmp_path / "keys.sqlite"
