"""Workers on this machine: what they are given, how they end, and that nothing of them is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import anyio
import pytest
from attrs import evolve

from areal_actors.errors import SchedulerError
from areal_actors.schedulers.base import ControllerAddress, PlacementState, Resources, WorkerSpec
from areal_actors.schedulers.bootstrap import Bootstrap, read_bootstrap
from areal_actors.schedulers.config import LocalConfig
from areal_actors.schedulers.local import LocalScheduler

CONTROLLER = ControllerAddress(address="unix:/nowhere/home.sock", secret=b"0123456789abcdef")

TELLS = """
import json, os, sys
told = json.loads(sys.stdin.readline())
facts = {"told": told, "gpus": os.environ["CUDA_VISIBLE_DEVICES"], "x": os.environ.get("X")}
open(sys.argv[1], "w").write(json.dumps(facts))
print("some words")
"""
WAITS = "import sys; sys.stdin.read()"
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[1], "w").write(str(child.pid))
time.sleep(600)
"""


def spec_of(name="worker-0", **options):
    return WorkerSpec(name=name, controller=CONTROLLER, **options)


def scheduler_of(tmp_path, program, *arguments, **config):
    """A scheduler whose workers run ``program``."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return LocalScheduler.open(LocalConfig(**config), logs=tmp_path / "logs", command=lambda _: command)


@pytest.mark.anyio
async def test_worker_gets_bootstrap_message_and_resources(tmp_path):
    """Its order comes on standard input, and its GPUs and environment are its own."""
    facts = tmp_path / "facts.json"
    spec = spec_of(resources=Resources(gpus=2), environment={"X": "1"}, life=3)
    async with scheduler_of(tmp_path, TELLS, facts, gpus=("a", "b", "c")) as scheduler:
        async with scheduler.place(spec) as placement:
            status = await placement.wait_ended()
        free = scheduler.inventory.free

    told = json.loads(facts.read_text())
    assert (PlacementState.ENDED, 0) == (status.state, status.exit_code)
    assert ("a,b", "1") == (told["gpus"], told["x"])
    assert Bootstrap.of(spec) == Bootstrap.from_line(json.dumps(told["told"]))
    assert ("a", "b", "c") == free.gpus
    assert "some words" in (tmp_path / "logs" / "worker-0.log").read_text()


@pytest.mark.anyio
async def test_gang_gets_resources_of_all_its_processes(tmp_path):
    """The first of them is started, and starts the others; what does not fit is refused."""
    facts = tmp_path / "facts.json"
    spec = spec_of(resources=Resources(cpus=2, gpus=1), num_tasks=2)
    async with scheduler_of(tmp_path, TELLS, facts, cpus=4, gpus=("a", "b", "c")) as scheduler:
        async with scheduler.place(spec) as placement:
            await placement.wait_ended()
        with pytest.raises(SchedulerError, match="6 CPUs"):
            async with scheduler.place(evolve(spec, num_tasks=3)):
                raise AssertionError

    assert "a,b" == json.loads(facts.read_text())["gpus"]


def test_process_of_a_gang_knows_its_rank(tmp_path):
    """All of them read the same file; which one it is, the cluster says. A worker on this machine has no rank."""
    path = tmp_path / "bootstrap.json"
    path.write_text(Bootstrap.of(spec_of(life=1000)).to_line())
    path.chmod(0o600)
    job = {"AREAL_BOOTSTRAP": str(path), "SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_RESTART_COUNT": "1"}
    told = read_bootstrap("", job)
    here = read_bootstrap(Bootstrap.of(spec_of()).to_line(), {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4"})

    assert (2, 4, 1001) == (told.rank, told.num_tasks, told.life)
    assert ("worker-0-rank-2", "worker-0") == (told.node, told.name_of(0))
    assert (0, 1, "worker-0") == (here.rank, here.num_tasks, here.node)


@pytest.mark.anyio
async def test_failed_worker_is_described_by_end_of_its_log(tmp_path):
    """The reason has the status and the end of the log."""
    failing = scheduler_of(tmp_path, "raise RuntimeError('no such luck')")
    async with failing as scheduler, scheduler.place(spec_of()) as placement:
        status = await placement.wait_ended()

    assert 1 == status.exit_code
    assert "no such luck" in status.reason


@pytest.mark.anyio
async def test_missing_program_ends_the_placement(tmp_path):
    """The worker has ended, and says why."""
    scheduler = LocalScheduler.open(logs=tmp_path)
    async with scheduler as opened, opened.place(spec_of(python=Path("/no/such/python"))) as placement:
        status = await placement.wait_ended()

    assert PlacementState.ENDED is status.state
    assert "/no/such/python could not be started" in status.reason


@pytest.mark.anyio
async def test_workers_wait_in_order_of_arrival(tmp_path):
    """A worker that does not fit waits, a later one does not overtake it, and one that is stopped leaves the queue."""
    async with scheduler_of(tmp_path, WAITS, cpus=2) as scheduler:
        async with (
            scheduler.place(spec_of("a", resources=Resources(cpus=1))) as first,
            scheduler.place(spec_of("b", resources=Resources(cpus=2))) as large,
            scheduler.place(spec_of("c", resources=Resources(cpus=1))) as small,
        ):
            await anyio.wait_all_tasks_blocked()
            waiting = [large.status, small.status]
            await large.stop(grace=0)
            await _running(small)
            await _running(first)
            states = [first.status.state, large.status.state]

        assert 2 == scheduler.inventory.free.cpus
    assert [PlacementState.PENDING] * 2 == [status.state for status in waiting]
    assert "It waits for 2 CPUs" in waiting[0].reason
    assert [PlacementState.RUNNING, PlacementState.ENDED] == states


async def _running(placement):
    while placement.status.state is PlacementState.PENDING:
        await anyio.lowlevel.checkpoint()


@pytest.mark.anyio
async def test_worker_that_never_fits_is_refused(tmp_path):
    """At once, with what there is."""
    async with scheduler_of(tmp_path, WAITS, cpus=2, gpus=()) as scheduler:
        with pytest.raises(SchedulerError, match="3 CPUs and 0 GPUs are wanted, and this machine has 2 CPUs"):
            async with scheduler.place(spec_of(resources=Resources(cpus=3))):
                pass


@pytest.mark.anyio
@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_worker_ends_with_its_block_and_its_children_with_it(tmp_path, is_cancelled):
    """Also if it does not want to, and if the block is cancelled."""
    pid_file = tmp_path / "pid"
    async with scheduler_of(tmp_path, STUBBORN, pid_file) as scheduler:
        with anyio.CancelScope() as scope:
            async with scheduler.place(spec_of()) as placement:
                await _appears(pid_file)
                # The worker may be quicker than the scheduler, which otherwise ends it as one that had not begun.
                while placement.status.state is not PlacementState.RUNNING:
                    await anyio.lowlevel.checkpoint()
                if is_cancelled:
                    scheduler_stop = partial(placement.stop, grace=0)
                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(scheduler_stop)
                    scope.cancel()
                    await anyio.lowlevel.checkpoint()
                else:
                    await placement.stop(grace=0)
                    await placement.stop(grace=0)
        status = placement.status

    assert PlacementState.ENDED is status.state
    assert -signal.SIGKILL == status.exit_code
    await _is_gone(int(pid_file.read_text()))


async def _appears(path):
    with anyio.fail_after(30):
        while not path.exists() or not path.read_text():  # noqa: ASYNC110 - a file has no event
            await anyio.sleep(0.01)


def _is_alive(pid):
    """Return whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


PARENT = """
import anyio, sys
from pathlib import Path
from tests.schedulers.test_local import STUBBORN, scheduler_of, spec_of

async def main():
    async with scheduler_of(Path(sys.argv[1]), STUBBORN, sys.argv[2]) as scheduler, scheduler.place(spec_of()):
        await anyio.sleep_forever()

anyio.run(main)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is up to the worker to see that its parent is gone")
def test_nothing_is_left_when_the_parent_is_killed(tmp_path):
    """Kill -9: the kernel ends the worker's whole group."""
    pid_file = tmp_path / "pid"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(["src", "."])}
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path), str(pid_file)], env=environment)
    try:
        anyio.run(_appears, pid_file)
    finally:
        parent.kill()
        parent.wait()
    pid = int(pid_file.read_text())

    anyio.run(_is_gone, pid)


async def _is_gone(pid):
    with anyio.fail_after(10):
        while _is_alive(pid):  # noqa: ASYNC110 - it is not a child of ours
            await anyio.sleep(0.01)
