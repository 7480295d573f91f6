"""A directory with the files that a run writes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.stacks.run_files import write_run

from areal_actors.dashboard import RunDirectory


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return write_run(tmp_path / "shown" / "trial")
