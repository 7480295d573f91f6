"""Workers on a real cluster: placed, watched, ended; what a cluster may answer, and what a run may leave."""

from __future__ import annotations

import json
import shlex

import anyio
import pytest
from tests.schedulers.slurm_local.callers import SECRET, open_controller, open_scheduler, spec

from areal_actors.errors import SchedulerError
from areal_actors.schedulers.base import ControllerAddress, PlacementState, Resources

pytestmark = pytest.mark.anyio


def wrapped(cluster, directory, command, script):
    """A PATH in which ``command`` is a shell script that can call the real one as ``$real``."""
    path = cluster.environment["PATH"]
    directory.mkdir(exist_ok=True)
    program = directory / command
    program.write_text(f"#!/bin/bash\nreal=$(PATH={shlex.quote(path)} command -v {command})\n{script}\n")
    program.chmod(0o755)
    return {"PATH": f"{directory}:{path}"}


async def test_worker_calls_its_controller_and_ends_with_its_block(cluster, tmp_path, monkeypatch):
    """It has the resources and the environment of its spec, and no variables of Slurm from the controller's."""
    leaking = {"SBATCH_EXCLUSIVE": "1", "SLURM_CPU_BIND": "x", "SQUEUE_FORMAT": "%i", "CUDA_VISIBLE_DEVICES": "7"}
    shown = "CUDA_VISIBLE_DEVICES,SLURM_CPU_BIND,SLURM_CPUS_PER_TASK,KEY,SBATCH_EXCLUSIVE"
    async with (
        open_controller(cluster.address) as (listener, controller),
        open_scheduler(cluster, tmp_path, environment=leaking) as scheduler,
    ):
        resources = Resources(cpus=2, memory_mib=300, gpus=2)
        placing = scheduler.place(
            spec(controller, order=f"show={shown}", resources=resources, environment={"KEY": "a b'$c"}, life=3)
        )
        with anyio.fail_after(20):
            async with placing as placement:
                peer = await listener.wait_for("caller-0")
                await scheduler.refresh()
                status = placement.status
                record = json.loads(next((tmp_path / "slurm" / "jobs").iterdir()).read_text())
        found = json.loads((tmp_path / "slurm" / "shown-caller-0").read_text())

    assert peer.incarnation == 4
    assert status.state is PlacementState.RUNNING
    assert f"job {placement.job} on unit0" in status.where
    assert placement.job == record["job"]
    assert {"SLURM_CPUS_PER_TASK": "2", "KEY": "a b'$c"}.items() <= found.items()
    assert len(found["CUDA_VISIBLE_DEVICES"].split(",")) == 2
    assert not {"SLURM_CPU_BIND", "SBATCH_EXCLUSIVE"} & found.keys()
    assert placement.status.state is PlacementState.ENDED
    assert cluster.queue() == []
    assert cluster.processes(str(tmp_path)) == []
    assert list((tmp_path / "slurm" / "bootstrap").iterdir()) == []
    assert SECRET.hex() not in "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_ended_worker_is_reported_with_end_of_its_log(cluster, tmp_path):
    """A failed one with status and log, one cancelled externally, and 76 for one that finds no controller."""
    async with (
        open_controller(cluster.address) as (listener, controller),
        open_scheduler(cluster, tmp_path, preflight_seconds=1) as scheduler,
    ):
        nowhere = ControllerAddress(address="tcp://127.0.0.1:9", secret=SECRET)
        stranger = ControllerAddress(address=listener.address, secret=b"another secret, just as long...")
        with anyio.fail_after(30):
            async with (
                scheduler.place(spec(controller, "failing", order="exit=3")) as failing,
                scheduler.place(spec(controller, "cancelled")) as cancelled,
                scheduler.place(spec(nowhere, "lonely")) as lonely,
                scheduler.place(spec(stranger, "stranger")) as strange,
            ):
                await listener.wait_for("cancelled")
                await anyio.run_process(["scancel", str(cancelled.job)], env=cluster.environment)
                ends = [await one.wait_ended() for one in (failing, cancelled, lonely, strange)]

    assert [3, 75, 76, 76] == [one.exit_code for one in ends]
    assert "something went wrong here" in ends[0].reason
    assert "cancelled from outside" in ends[1].reason
    assert "the controller cannot be reached" in ends[2].reason
    assert "does not know the secret" in ends[3].reason
    assert cluster.queue() == []


async def test_refusal_names_the_requested_resources(cluster, tmp_path):
    """What can never be placed raises at once, and leaves no record."""
    nowhere = ControllerAddress(address="tcp://127.0.0.1:9", secret=SECRET)
    async with open_scheduler(cluster, tmp_path) as scheduler:
        with pytest.raises(SchedulerError, match=r"refuses big.*99 GPUs.*sinfo") as caught:
            async with scheduler.place(spec(nowhere, "big", resources=Resources(gpus=99))):
                pass

    assert "scheduler.slurm" in str(caught.value)
    assert list((tmp_path / "slurm" / "jobs").iterdir()) == []


@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_submission_that_timed_out_is_found_and_not_repeated(cluster, tmp_path):
    """A call of sbatch takes the job and then says nothing: there is one job, which is adopted by its name."""
    slow = wrapped(cluster, tmp_path / "bin", "sbatch", '"$real" "$@" >>"$0.said"; exec sleep 60')
    async with (
        open_controller(cluster.address) as (listener, controller),
        open_scheduler(cluster, tmp_path, environment=slow, command_timeout_seconds=1.0) as scheduler,
    ):
        with anyio.fail_after(20):
            async with scheduler.place(spec(controller)) as placement:
                await listener.wait_for("caller-0")
                submitted = (tmp_path / "bin" / "sbatch.said").read_text().split()

    assert [str(placement.job)] == submitted
    assert cluster.queue() == []


@pytest.mark.parametrize(
    ("said", "anyio_backend"), [("exec sleep 60", "trio"), ('"$real" "$@" | sed s/RUNNING/LEVITATING/', "asyncio")]
)
async def test_queue_that_cannot_be_read_ends_nothing(cluster, tmp_path, said, anyio_backend):
    """It hangs or reports unknown states: the state is unknown, the worker continues, and leaving works."""
    switch = tmp_path / "broken"
    broken = wrapped(cluster, tmp_path / "bin", "squeue", f'[ -e {switch} ] || exec "$real" "$@"\n{said}')
    async with (
        open_controller(cluster.address) as (listener, controller),
        open_scheduler(cluster, tmp_path, environment=broken, command_timeout_seconds=0.5) as scheduler,
    ):
        with anyio.fail_after(20):
            async with scheduler.place(spec(controller)) as placement:
                await listener.wait_for("caller-0")
                switch.touch()
                await scheduler.refresh()
                status = placement.status
                num_peers = len(listener.peers)
                switch.unlink()

    assert status.state is PlacementState.UNKNOWN
    assert status.reason
    assert num_peers == 1
    assert cluster.queue() == []


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_next_controller_ends_jobs_of_a_killed_one(cluster, tmp_path):
    """A record of a job is enough; and of two controllers in one directory, the second is refused."""
    async with (
        open_controller(cluster.address) as (listener, controller),
        open_scheduler(cluster, tmp_path) as scheduler,
    ):
        with pytest.raises(SchedulerError, match="is the controller of the jobs"):
            async with open_scheduler(cluster, tmp_path):
                pass
        with anyio.fail_after(20):
            async with scheduler.place(spec(controller)) as placement:
                await listener.wait_for("caller-0")
                copy = tmp_path / "copy"
                for name in ("jobs", "bootstrap", "stop", "exit", "scripts"):
                    (copy / "slurm" / name).mkdir(parents=True)
                (copy / "slurm").chmod(0o700)
                for path in (tmp_path / "slurm" / "jobs").iterdir():
                    (copy / "slurm" / "jobs" / path.name).write_text(path.read_text())
                async with open_scheduler(cluster, copy):
                    ended = await placement.wait_ended()
                    assert cluster.queue() == []

    assert "CANCELLED" in ended.reason
