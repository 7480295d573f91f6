"""What tests need that break a real cluster while callers live: how to break it, and how to see what became of them.

Of each test that uses ``cluster``, no job and no process may be left.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
from anyio import to_thread
from click.testing import CliRunner, Result
from tests.schedulers.slurm_local.cluster import Cluster, why_no_namespaces

from areal_actors.cli import cli
from areal_actors.kernel.remote import Listener
from areal_actors.schedulers.base import PlacementState, Resources
from areal_actors.schedulers.slurm import SlurmPlacement

__all__ = [
    "WHOLE_NODE",
    "act",
    "assert_no_two_lives_at_once",
    "beats",
    "cluster",
    "hosts",
    "invoke",
    "node_of",
    "wait_for",
    "wait_state",
    "wait_until_gone",
]

WHOLE_NODE = Resources(cpus=8)


@pytest.fixture
def cluster(shared: Cluster, tmp_path: Path) -> Iterator[Cluster]:
    """The cluster with all its nodes; afterwards, no job and no process of this test is left."""
    shared.mend()
    yield shared

    assert shared.queue() == []
    assert shared.processes(str(tmp_path)) == []


@pytest.fixture
def hosts(cluster: Cluster) -> Cluster:
    """A cluster whose nodes have networks of their own."""
    if not cluster.has_namespaces:
        pytest.skip(why_no_namespaces())
    return cluster


async def act(cluster: Cluster, *words: str) -> None:
    """Break or mend something, while the event loop goes on."""
    await to_thread.run_sync(lambda: cluster.act(*words))


def invoke(cluster: Cluster, *words: str) -> Result:
    """``areal-actors slurm``."""
    return CliRunner().invoke(cli, ["slurm", *words], env=cluster.environment)


async def wait_for(listener: Listener, name: str, life: int) -> None:
    """Until this life of a caller is connected."""
    while (await listener.wait_for(name)).incarnation != life + 1:
        await anyio.sleep(0.1)


async def wait_until_gone(listener: Listener, name: str) -> None:
    """Wait until no peer of this name is connected."""
    while any(peer.node == name for peer in listener.peers):
        await anyio.sleep(0.1)


async def wait_state(placement: SlurmPlacement, state: PlacementState) -> None:
    """Until a job is seen so."""
    while placement.status.state is not state:
        await anyio.sleep(0.1)


def node_of(placement: SlurmPlacement) -> str:
    """Where it runs."""
    return placement.status.where.rpartition(" ")[2]


def beats(directory: Path, name: str = "caller-0") -> list[tuple[int, float]]:
    """Life and time of every sign of life."""
    lines = (directory / "slurm" / f"beats-{name}").read_text().splitlines()
    return [(int(line.split()[0]), float(line.split()[1])) for line in lines]


def assert_no_two_lives_at_once(directory: Path) -> None:
    """Once a life has begun, earlier ones are silent, up to the beat that is under way."""
    found = beats(directory)
    begun = {life: min(at for one, at in found if one == life) for life, _ in found}
    for life, at in found:
        assert not [later for later in begun if later > life and at > begun[later] + 1.0], found
