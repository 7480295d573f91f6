"""Each fault at the job of each role, one after the other: ``nox -s slurm -- faults``, as root (an hour and more).

With ``FAULTS_SAMPLE``, only so many pairs of a fault and a role are tried, which ``FAULTS_SEED`` draws
(``nox -s slurm -- faults --sample 3 --seed 7``, which leaves out gangs and controllers).

Every run makes each step once, in one lineage, with the rewards and tokens of a run without faults. The seconds from a
fault to the end of the second step after it are printed; with ``FAULTS_RESULTS``, they are appended to that file, for
``python -m tools.faults``. ``FAULTS_ROLES`` limits the roles. ``tools/faults/matrix.toml`` says which fault is tested
where.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.schedulers.slurm_local.cluster import ROOT, Cluster, why_no_namespaces
from tools.placement.play import COMPARED
from tools.slurm.gangs import COMPARED as COMPARED_BY_GANGS
from tools.slurm.gangs import GANG, metrics
from tools.slurm.gangs import SETTINGS as GANG_SETTINGS
from tools.slurm.training import (
    TINY,
    cluster,
    jobs,
    nodes,
    steps,
    train_command,
    training,
    wait_until,
)

__all__ = ["cluster"]

NUM_STEPS = 60
NUM_GANG_STEPS = 8
"""Those of the run without faults; the others may make more, which are not compared."""
COMMON = (
    "rollout.group_size=4",
    "checkpoint.every_steps=1",
    "eval_dataset=null",
    "engine.dtype=float32",
    "trainer.dtype=float32",
    "logging.trackers=[]",
)
ROLES = {"trainer": 8, "generation": 8, "proxy": 2, "sessions": 2, "rollout": 2}
"""CPUs of each role: one node of four is left."""
LEASE_SECONDS = 15
SLOW_SECONDS = 30
Fault = Callable[[Cluster, Path, str], Callable[[], None]]
"""Breaks what a role needs; returns what mends it."""


def requeue(cluster: Cluster, directory: Path, role: str) -> Callable[[], None]:
    """Put the job back into the queue."""
    cluster.run("scontrol", "requeue", job_of(cluster, role))
    return lambda: None


def cancel(cluster: Cluster, directory: Path, role: str) -> Callable[[], None]:
    """Cancel the job."""
    cluster.run("scancel", job_of(cluster, role))
    return lambda: None


def drain(cluster: Cluster, directory: Path, role: str) -> Callable[[], None]:
    """Let its node take no other job."""
    node = node_of(cluster, role)
    cluster.run("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=test")
    return cluster.mend


def stop(cluster: Cluster, directory: Path, role: str) -> Callable[[], None]:
    """Stop its processes with SIGSTOP, as if they hung."""
    for process in processes_of(directory, role):
        process.send_signal(signal.SIGSTOP)
    return lambda: None


def kill(cluster: Cluster, directory: Path, role: str) -> Callable[[], None]:
    """Kill its processes."""
    for process in processes_of(directory, role):
        process.kill()
    return lambda: None


def crash(cluster: Cluster, directory: Path, role: str) -> Callable[[], None]:
    """Crash its node, with all that runs there."""
    node = node_of(cluster, role)
    cluster.act("crash-node", node)
    return lambda: cluster.act("start-node", node)


def cut(cluster: Cluster, directory: Path, role: str) -> Callable[[], None]:
    """Unplug the network of its node for longer than a lease."""
    node = node_of(cluster, role)
    cluster.act("cut-node", node)
    time.sleep(LEASE_SECONDS + 10)
    cluster.act("heal-node", node)
    return cluster.mend


def slow(cluster: Cluster, directory: Path, role: str) -> Callable[[], None]:
    """Cancel the job; the one in its place takes 30 s to start."""
    marker = directory.parent / f"slow-{role}"
    marker.touch()
    cluster.run("scancel", job_of(cluster, role))
    return marker.unlink


def limit(cluster: Cluster, directory: Path, role: str) -> Callable[[], None]:
    """Let the job have no more than a minute from now, and wait until it has ended."""
    job = job_of(cluster, role)
    *minutes, _ = cluster.run("squeue", "-h", "-j", job, "-o", "%M").strip().split(":")
    cluster.run("scontrol", "update", f"JobId={job}", f"TimeLimit={int(minutes[-1]) + 1}")
    deadline = time.monotonic() + 180
    while job in jobs(cluster, "RUNNING").values():
        assert time.monotonic() < deadline
        time.sleep(0.5)
    return lambda: None


FAULTS: Mapping[str, Fault] = {
    function.__name__: function for function in (kill, requeue, cancel, crash, drain, stop, slow, cut, limit)
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The steps of a run in one process, without faults."""
    directory = tmp_path_factory.mktemp("undisturbed") / "run"
    command = [
        *(
            sys.executable,
            "-m",
            "areal_actors",
            "train",
            "examples/tiny.yaml",
            *COMMON,
            f"total_steps={NUM_STEPS}",
            "--run-dir",
            str(directory),
        )
    ]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, cwd=ROOT, env=environment, timeout=900, stdout=subprocess.DEVNULL)
    return compared(directory)


def draw_pairs(environment: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the faults that are tried, each with the role that it hits, in the order of ``FAULTS``."""
    chosen = environment.get("FAULTS_ROLES", " ".join(ROLES)).split()
    pairs = [(fault, role) for fault in FAULTS for role in chosen]
    if number := int(environment.get("FAULTS_SAMPLE", "0")):
        drawn = random.Random(int(environment.get("FAULTS_SEED", "1"))).sample(pairs, min(number, len(pairs)))
        return [pair for pair in pairs if pair in drawn]
    return pairs


DRAWN = draw_pairs(os.environ)


@pytest.mark.parametrize("fault", dict.fromkeys(fault for fault, _ in DRAWN))
def test_run_goes_on(cluster, tmp_path, undisturbed, fault):
    """Each role is hit after a further step. The steps are those of the undisturbed run."""
    if fault in ("crash", "cut") and not cluster.has_namespaces:
        pytest.skip(why_no_namespaces())
    directory = tmp_path / "run"
    hit = [role for other, role in DRAWN if other == fault]
    roles = []
    for role, cpus in ROLES.items():
        python = tmp_path / f"python-{role}"
        python.write_text(
            f'#!/bin/sh\n[ ! -e {tmp_path}/slow-{role} ] || sleep {SLOW_SECONDS}\nexec {sys.executable} "$@"\n'
        )
        python.chmod(0o755)
        replicas = "replicas: 1, " if role == "generation" else ""
        roles.append(f"scheduler.roles.{role}={{{replicas}cpus: {cpus}, python: {python}}}")
    settings = (
        *TINY,
        *COMMON,
        "total_steps=100000",
        f"scheduler.lease_seconds={LEASE_SECONDS}",
        "scheduler.slurm.margin_seconds=20",
        # Five faults in minutes. A busy machine adds some: a worker without CPU for the length of a lease is replaced.
        "scheduler.restarts.max=20",
    )
    with training(cluster, directory, *settings, roles=tuple(roles)) as run:
        for role in hit:
            num_steps = len(steps(directory))
            wait_until(run, lambda: len(steps(directory)) > num_steps and len(nodes(cluster)) == len(ROLES))  # noqa: B023
            began = time.monotonic()
            mend = FAULTS[fault](cluster, directory, role)
            before = len(steps(directory))
            # One more than the step that may have been about to end.
            wait_until(run, lambda: len(steps(directory)) > before + 1)  # noqa: B023
            seconds = time.monotonic() - began
            mend()
            note(fault, role, seconds)
        run.terminate()
        run.communicate(timeout=300)
    made = compared(directory)

    assert list(range(1, len(made) + 1)) == [record["step"] for record in made]
    assert undisturbed[: len(made)] == made[:NUM_STEPS]


@pytest.mark.parametrize("fault", ["crash", "cut"])
def test_run_goes_on_without_its_controller(cluster, tmp_path, undisturbed, fault):
    """It loses all nodes at once for longer than a lease; or its own node crashes, and it is started on another one."""
    if not cluster.has_namespaces:
        pytest.skip(why_no_namespaces())
    directory = tmp_path / "run"
    roles = tuple(
        f"scheduler.roles.{role}={{{'replicas: 1, ' if role == 'generation' else ''}cpus: {cpus}}}"
        for role, cpus in ROLES.items()
    )
    settings = (*TINY, *COMMON, "total_steps=100000", f"scheduler.lease_seconds={LEASE_SECONDS}")
    resumed: tuple[str, ...] = ()
    if fault == "crash":
        command = shlex.join(train_command(directory, *settings[:1], *roles, *settings[1:]))
        # With a name as that of a worker's job, for nodes().
        node = cluster.node(1)
        conf = (cluster.directory / "etc" / "slurm.conf").read_text()
        address = next(line for line in conf.splitlines() if line.startswith(f"NodeName={node} "))
        address = address.partition("NodeAddr=")[2].split()[0]
        options = (
            "--no-requeue",
            "-c8",
            f"--nodelist={node}",
            "--job-name=a-run-controller.0",
            f"--output={tmp_path}/controller.log",
        )
        cluster.run(
            *("sbatch", *options, f"--chdir={ROOT}", "--wrap"),
            f"{command} scheduler.address=tcp://{address}:0",
        )
        deadline = time.monotonic() + 300
        while len(steps(directory)) < 2:
            assert time.monotonic() < deadline, (tmp_path / "controller.log").read_text()
            time.sleep(0.5)
        before, began = len(steps(directory)), time.monotonic()
        cluster.act("crash-node", node)
        resumed = ("--resume",)
    with training(cluster, directory, *settings, *resumed, roles=roles) as run:
        if fault == "cut":
            wait_until(run, lambda: len(steps(directory)) >= 2)
            before, began = len(steps(directory)), time.monotonic()
            for number in range(1, 5):
                cluster.act("cut-node", cluster.node(number))
            time.sleep(LEASE_SECONDS + 10)
            for number in range(1, 5):
                cluster.act("heal-node", cluster.node(number))
            cluster.mend()
        wait_until(run, lambda: len(steps(directory)) > before + 1)
        note(fault, "controller", time.monotonic() - began)
        if fault == "crash":
            cluster.act("start-node", node)
        run.terminate()
        run.communicate(timeout=300)
    made = compared(directory)

    assert list(range(1, len(made) + 1)) == [record["step"] for record in made]
    assert undisturbed[: len(made)] == made[:NUM_STEPS]


def compared(directory: Path) -> list[dict[str, Any]]:
    """What all runs of a seed have in common, for each step."""
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{name: record[name] for name in COMPARED} for record in records]


def note(fault: str, role: str, seconds: float) -> None:
    """Say how long it took until the next step, or write it down."""
    line = json.dumps({"fault": fault, "role": role, "seconds": round(seconds), "load": round(os.getloadavg()[0])})
    print(line, flush=True)
    if path := os.environ.get("FAULTS_RESULTS"):
        with Path(path).open("a") as file:
            file.write(line + "\n")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The steps of the trainer that is a gang below, in one process."""
    directory = tmp_path_factory.mktemp("alone") / "run"
    settings = [setting for setting in GANG_SETTINGS[1:] if not setting.startswith("scheduler.")]
    command = [sys.executable, "-m", "areal_actors", "train", "examples/tiny.yaml", *settings]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    command += [f"total_steps={NUM_GANG_STEPS}", "--run-dir", str(directory)]
    subprocess.run(command, check=True, cwd=ROOT, env=environment, timeout=900, stdout=subprocess.DEVNULL)
    return metrics(directory)


@pytest.mark.parametrize("fault", ["requeue", "cancel", "drain", "slow", "cut", "limit"])
def test_gang_goes_on(cluster, tmp_path, alone, fault):
    """The job of two processes that train together, or the node of the second one, is hit. The steps stay the same."""
    if fault == "cut" and not cluster.has_namespaces:
        pytest.skip(why_no_namespaces())
    directory = tmp_path / "run"
    python = tmp_path / "python"
    is_slow = f'[ -e {tmp_path}/slow-trainer ] && [ "$SLURM_PROCID" = 1 ]'
    python.write_text(f'#!/bin/sh\n{is_slow} && sleep {SLOW_SECONDS}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    roles = (f"scheduler.roles.trainer={{cpus: 8, python: {python}}}",)
    settings = (*GANG_SETTINGS, *GANG, "total_steps=100000", "scheduler.slurm.margin_seconds=20")
    with training(cluster, directory, *settings, roles=roles) as run:
        wait_until(run, lambda: len(steps(directory)) >= 1 and len(nodes(cluster)) == 2)
        began = time.monotonic()
        mend = FAULTS[fault](cluster, directory, "trainer")
        before = len(steps(directory))
        # One more than the step that may have been about to end.
        wait_until(run, lambda: len(steps(directory)) > before + 1)
        note(fault, "rank", time.monotonic() - began)
        mend()
        run.terminate()
        run.communicate(timeout=300)
    made = metrics(directory)

    assert list(range(1, len(made) + 1)) == [record["step"] for record in made]
    num = min(len(made), NUM_GANG_STEPS)
    for name in COMPARED_BY_GANGS:
        expected = [record[name] for record in alone[:num]]
        assert expected == pytest.approx([record[name] for record in made[:num]], rel=1e-4, abs=1e-5)


def node_of(cluster: Cluster, role: str) -> str:
    """The node of a role; the last one of a gang."""
    return cluster.run("scontrol", "show", "hostnames", nodes(cluster)[f"{role}-0"]).split()[-1]


def job_of(cluster: Cluster, role: str) -> str:
    """The number of the job that runs a role."""
    return next(job for name, job in jobs(cluster, "RUNNING").items() if f"-{role}-0." in name)


def processes_of(directory: Path, role: str) -> list[psutil.Process]:
    """The processes of the worker of a role."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            bootstrap = process.environ().get("AREAL_BOOTSTRAP", "")
            if f"{directory}/slurm" in bootstrap and f"-{role}-0." in bootstrap and "worker" in str(process.cmdline()):
                found.append(process)
    assert found
    return found
