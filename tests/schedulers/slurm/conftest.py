"""One real cluster for all tests of a session that need one; they skip where it cannot be."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.schedulers.slurm_local.cluster import Cluster, open_cluster, why_not


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Two nodes of this machine."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with (
        tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as directory,  # paths of unix sockets are short
        open_cluster(Path(directory) / "c", prefix="unit", num_nodes=2) as opened,
    ):
        yield opened
