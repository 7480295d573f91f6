"""A start is timed by what the agent notes, and one that fails says why."""

from __future__ import annotations

import pytest
from benchmarks.starting import measure_start


def test_a_run_that_does_not_start_says_why(tmp_path):
    """What it printed is in the error."""
    with (
        pytest.raises(RuntimeError, match=r"(?s)no completion.*model_of_nobody"),
        measure_start("tiny.yaml", tmp_path, settings=["model_of_nobody=1"]),
    ):
        pass
