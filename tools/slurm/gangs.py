"""A trainer that is a gang over several nodes of one job: ``nox -s slurm``. It trains as one process does."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.schedulers.slurm_local.cluster import Cluster, why_no_namespaces
from tools.slurm.training import TINY, cluster, nodes, steps, training, wait_until

__all__ = ["cluster"]

SETTINGS = (
    *TINY,
    "total_steps=4",
    "batch_size=2",
    "rollout.group_size=6",
    "eval_dataset=null",
    "checkpoint.every_steps=1",
    "engine.max_concurrent=12",
    "engine.deterministic=true",
    "logging.trackers=[]",
    "trainer.dtype=float32",
    "trainer.max_packed_tokens=128",
    "trainer.optimizer={learning_rate: 0.001, num_warmup_steps: 0}",  # one of AdamW has the sign of mere rounding
    "scheduler.lease_seconds=15",
    "scheduler.slurm.completing_seconds=40",  # a controller finds out slowly that one of several nodes is gone
    "scheduler.roles.generation={replicas: 1, cpus: 8}",
    "scheduler.roles.proxy=null",  # at controller, with the agents: one node of four is left for a lost one
    "proxy.host=127.0.0.1",
)
GANG = ("trainer.gang={num_processes: 2, backend: gloo, timeout_seconds: 60}", "scheduler.slurm.ranks_per_node=1")
COMPARED = ("reward", "loss", "kl", "entropy", "trained_tokens", "packed_tokens", "grad_norm")


def metrics(directory: Path) -> list[dict[str, Any]]:
    """The records of all steps."""
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def finish(run: subprocess.Popen[str]) -> dict[str, Any]:
    """Wait for the end of a run, which is a good one; what it says last."""
    said, _ = run.communicate(timeout=600)
    assert run.returncode == 0
    summary: dict[str, Any] = json.loads(said.splitlines()[-1])
    return summary


def trainer_nodes(cluster: Cluster) -> list[str]:
    """Where the trainer's job runs, the node of its first process first."""
    placed = nodes(cluster).get("trainer-0")
    return [] if placed is None else cluster.run("scontrol", "show", "hostnames", placed).split()


def test_two_nodes_train_as_one_process_does(cluster, tmp_path):
    """One job with a process on each of two nodes: the same losses step for step, to the rounding of sums."""
    alone, gang = tmp_path / "run" / "alone", tmp_path / "run" / "gang"
    with training(cluster, alone, *SETTINGS) as run:
        finish(run)
    with training(cluster, gang, *SETTINGS, *GANG) as run:
        wait_until(run, lambda: len(trainer_nodes(cluster)) == 2)
        finish(run)

    rows, others = metrics(alone), metrics(gang)
    assert [1, 2, 3, 4] == [row["step"] for row in others]
    for name in COMPARED:
        assert [row[name] for row in rows] == pytest.approx([row[name] for row in others], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("lost", [0, 1])
def test_gang_fails_as_one_and_goes_on(cluster, tmp_path, lost):
    """The node of one of its processes dies: the whole gang is placed anew; no step is missing or made twice."""
    if not cluster.has_namespaces:
        pytest.skip(why_no_namespaces())
    directory = tmp_path / "run"
    with training(cluster, directory, *SETTINGS, *GANG, "total_steps=12") as run:
        wait_until(run, lambda: len(steps(directory)) >= 2 and len(trainer_nodes(cluster)) == 2)
        first = trainer_nodes(cluster)
        began = time.monotonic()
        cluster.act("crash-node", first[lost])
        wait_until(run, lambda: len(steps(directory)) >= 5)
        seconds = time.monotonic() - began
        summary = finish(run)
        cluster.act("start-node", first[lost])
    print(f"a gang without its rank {lost} trains again after {seconds:.0f} s")

    assert 12 == summary["steps"]
    assert list(range(1, 13)) == steps(directory)


def test_killed_process_of_a_gang_is_named_and_replaced(cluster, tmp_path):
    """The trainer says which one it has lost, and where; the job ends as one, and another one goes on."""
    directory = tmp_path / "run"
    with training(cluster, directory, *SETTINGS, *GANG, "total_steps=8") as run:
        wait_until(run, lambda: len(steps(directory)) >= 2 and len(trainer_nodes(cluster)) == 2)
        for process in ranks(directory):
            process.kill()
        summary = finish(run)
    said = (directory / "logs" / "workers" / "trainer-0.log").read_text()

    assert 8 == summary["steps"]
    assert list(range(1, 9)) == steps(directory)
    assert "Rank 1 of the 2 processes that train together failed (task 1 of job" in said.replace("\n0: ", "")


def ranks(directory: Path) -> list[psutil.Process]:
    """The processes of gangs that are not their first ones."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            environment = process.environ()
            is_ours = f"{directory}/slurm" in environment.get("AREAL_BOOTSTRAP", "")
            if is_ours and environment.get("SLURM_PROCID") == "1" and "areal_actors.worker" in process.cmdline():
                found.append(process)
    return found
