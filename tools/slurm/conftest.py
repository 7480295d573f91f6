"""One cluster of four nodes for all that is broken, and all that is trained, on one."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conftest import anyio_backend
from tests.schedulers.slurm_local.cluster import Cluster, open_cluster, why_no_namespaces, why_not

__all__ = ["anyio_backend"]


@pytest.fixture(scope="session")
def shared() -> Iterator[Cluster]:
    """Four nodes, each a host of its own where that is allowed."""
    if why_not():
        pytest.skip(why_not())
    options = () if why_no_namespaces() else ("--netns",)
    with (
        tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as directory,  # paths of unix sockets are short
        open_cluster(Path(directory) / "c", prefix="sim", num_nodes=4, options=options) as opened,
    ):
        yield opened
