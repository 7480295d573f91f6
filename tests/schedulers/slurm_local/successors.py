"""Controllers that are killed or stopped, and their successors, on a real cluster: ``nox -s slurm``. Takes minutes.

The next controller keeps the jobs that it would submit again, no caller serves two controllers, and nothing is left.
"""

from __future__ import annotations

import logging
import signal
from pathlib import Path

import anyio
import pytest
from anyio import to_thread
from tests.schedulers.slurm_local.breaking import cluster, invoke, wait_for
from tests.schedulers.slurm_local.callers import open_controller, open_scheduler, spec
from tests.schedulers.slurm_local.cluster import Cluster
from tests.schedulers.slurm_local.controller import hear, shard_of

from areal_actors.errors import SchedulerError
from areal_actors.kernel.remote import Listener
from areal_actors.schedulers.base import PlacementState, Resources

__all__ = ["cluster"]

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]

OTHER_SECRET = b"what only the next controller knows..."


def drain(cluster: Cluster, state: str) -> None:
    """Have no node take another job, or all of them again (``RESUME``)."""
    nodes = ",".join(cluster.node(number) for number in range(1, 5))
    cluster.run("scontrol", "update", f"NodeName={nodes}", f"State={state}", "Reason=test")


def epochs(directory: Path, name: str = "caller-0") -> list[int]:
    """Whose every sign of life is, one after another."""
    return [int(line.split()[2]) for line in (directory / "slurm" / f"beats-{name}").read_text().splitlines()]


async def wait_life(listener: Listener, name: str) -> int:
    """Which life of a caller calls first."""
    return (await listener.wait_for(name)).incarnation - 1


async def test_nothing_is_left_of_a_controller_that_was_killed(cluster, tmp_path):
    """Its callers end within their lease; the records say what there was."""
    with shard_of(cluster, tmp_path, "a", "b") as controller:
        await hear(controller, "here", 2)
        controller.kill()
        with anyio.fail_after(4 + 5 + 5 + 5):
            while await to_thread.run_sync(cluster.queue) or cluster.processes(f"{tmp_path}/slurm/bootstrap"):
                await anyio.sleep(0.2)
    reaped = await to_thread.run_sync(invoke, cluster, "reap", str(tmp_path))

    assert reaped.exit_code == 0, reaped.output
    assert "Ended: " in reaped.stdout
    listed = await to_thread.run_sync(invoke, cluster, "status", str(tmp_path), "--json")
    assert '"gone"' in listed.stdout
    assert '"RUNNING"' not in listed.stdout


async def test_a_job_that_begins_after_its_controller_was_killed_gives_its_node_back(cluster, tmp_path):
    """It waited meanwhile; nobody answers it."""
    drain(cluster, "DRAIN")
    with shard_of(cluster, tmp_path, "a") as controller:
        (job,) = await hear(controller, "placed")
        controller.kill()
        drain(cluster, "RESUME")
        with anyio.fail_after(30):
            while await to_thread.run_sync(cluster.queue):
                await anyio.sleep(0.2)

    (record,) = (tmp_path / "slurm" / "exit").glob(f"*.{job}-0")
    assert record.read_text().startswith("76 ")
    assert "the controller cannot be reached" in (tmp_path / "logs" / "workers" / "a.log").read_text()


@pytest.mark.parametrize("seconds", [0.0, 7.0], ids=["within the lease", "after the lease"])
async def test_the_next_controller_keeps_the_jobs_of_one_that_was_killed(cluster, tmp_path, seconds):
    """The same jobs, in another incarnation, known to the next controller alone; ``status`` says what they wait for."""
    with shard_of(cluster, tmp_path, "caller-0", "b", rejoin_seconds=40) as former:
        jobs = await hear(former, "placed", 2)
        await hear(former, "here", 2)
        former.kill()
    await anyio.sleep(seconds)
    listed = await to_thread.run_sync(invoke, cluster, "status", str(tmp_path))
    async with open_controller(cluster.address, secret=OTHER_SECRET) as (listener, controller):
        wanted = [spec(controller, "caller-0", life=1000), spec(controller, "b", life=1000)]
        with anyio.fail_after(30):
            async with (
                open_scheduler(cluster, tmp_path, wanted=wanted, rejoin_seconds=40) as scheduler,
                scheduler.place(wanted[0]) as first,
                scheduler.place(wanted[1]) as second,
            ):
                lives = [await wait_life(listener, name) for name in ("caller-0", "b")]
                states = [first.status.state, second.status.state]
                reaped = await to_thread.run_sync(invoke, cluster, "reap", str(tmp_path))
                queued = await to_thread.run_sync(cluster.queue)

    assert jobs == [str(first.job), str(second.job)]
    assert [1000, 1000] == lives
    assert [PlacementState.RUNNING] * 2 == states
    assert "its controller is gone" in listed.stdout
    assert "There was nothing to end" in reaped.stdout
    assert 2 == len(queued)
    assert [1, 2] == sorted(set(epochs(tmp_path)))
    assert epochs(tmp_path) == sorted(epochs(tmp_path))
    assert PlacementState.ENDED is first.status.state


async def test_jobs_that_lost_controller_end_if_no_other_comes(cluster, tmp_path):
    """They keep their nodes for as long as they may, and no longer, and say why they end."""
    with shard_of(cluster, tmp_path, "caller-0", rejoin_seconds=6) as controller:
        await hear(controller, "here")
        controller.kill()
    await anyio.sleep(6)
    held = await to_thread.run_sync(cluster.queue)
    with anyio.fail_after(4 + 6 + 10):
        while await to_thread.run_sync(cluster.queue) or cluster.processes(f"{tmp_path}/slurm/bootstrap"):
            await anyio.sleep(0.2)

    assert 1 == len(held)
    (record,) = (tmp_path / "slurm" / "exit").iterdir()
    assert record.read_text().startswith("77 ")
    assert "the controller cannot be reached" in (tmp_path / "logs" / "workers" / "caller-0.log").read_text()


async def test_jobs_that_lost_controller_can_be_reaped(cluster, tmp_path):
    """Whoever does not want to go on does not have to wait."""
    with shard_of(cluster, tmp_path, "caller-0", rejoin_seconds=600) as controller:
        await hear(controller, "here")
        controller.kill()
    await anyio.sleep(6)
    with anyio.fail_after(30):
        reaped = await to_thread.run_sync(invoke, cluster, "reap", str(tmp_path))

    assert "Ended: " in reaped.stdout


async def test_the_next_controller_keeps_a_place_in_the_queue(cluster, tmp_path):
    """A job that waits goes on waiting, and calls whoever is controller when it begins."""
    drain(cluster, "DRAIN")
    with shard_of(cluster, tmp_path, "caller-0", rejoin_seconds=40) as former:
        (job,) = await hear(former, "placed")
        former.kill()
    async with open_controller(cluster.address, secret=OTHER_SECRET) as (listener, controller):
        wanted = spec(controller, life=1000)
        with anyio.fail_after(40):
            async with (
                open_scheduler(cluster, tmp_path, wanted=[wanted], rejoin_seconds=40) as scheduler,
                scheduler.place(wanted) as placement,
            ):
                state = placement.status.state
                drain(cluster, "RESUME")
                life = await wait_life(listener, "caller-0")

    assert job == str(placement.job)
    assert PlacementState.PENDING is state
    assert 1000 == life
    assert {2} == set(epochs(tmp_path))


async def test_a_job_that_was_started_again_is_kept_in_the_life_that_is_asked_for(cluster, tmp_path):
    """How often the cluster had done so before is nothing to the next controller; another time is another life."""
    with shard_of(cluster, tmp_path, "caller-0", rejoin_seconds=60) as former:
        (job,) = await hear(former, "placed")
        await hear(former, "here")
        cluster.run("scontrol", "requeue", job)
        with anyio.fail_after(60):
            while " 1 " not in (tmp_path / "slurm" / "beats-caller-0").read_text().replace("\n1 ", " 1 "):
                await anyio.sleep(0.2)
        former.kill()
    async with open_controller(cluster.address, secret=OTHER_SECRET) as (listener, controller):
        wanted = spec(controller, life=1000)
        with anyio.fail_after(90):
            async with (
                open_scheduler(cluster, tmp_path, wanted=[wanted], rejoin_seconds=60) as scheduler,
                scheduler.place(wanted) as placement,
            ):
                life = await wait_life(listener, "caller-0")
                cluster.run("scontrol", "requeue", job)
                await wait_for(listener, "caller-0", 1001)

    assert job == str(placement.job)
    assert 1000 == life


async def test_what_has_changed_is_submitted_anew(cluster, tmp_path, caplog):
    """Other resources, a worker that is not wanted, one that does not let go: it is ended first, and why is said."""
    caplog.set_level(logging.INFO)
    with shard_of(cluster, tmp_path, "caller-0", "b", "deaf", rejoin_seconds=12) as former:
        jobs = await hear(former, "placed", 3)
        await hear(former, "here", 3)
        former.kill()
    async with open_controller(cluster.address, secret=OTHER_SECRET) as (listener, controller):
        wanted = [
            spec(controller, life=1000, resources=Resources(cpus=2)),
            spec(controller, "deaf", life=1000, order="deaf", lease=600),
        ]
        with anyio.fail_after(60):
            async with open_scheduler(cluster, tmp_path, wanted=wanted, rejoin_seconds=12) as scheduler:
                left = await to_thread.run_sync(cluster.queue)
                async with scheduler.place(wanted[0]) as placement:
                    await wait_for(listener, "caller-0", 1000)

    assert [] == left
    assert str(placement.job) not in jobs
    assert (
        f"job_not_kept job={jobs[0]} worker=caller-0 reason=it would be submitted with other --cpus-per-task, script"
        in caplog.text
    )
    assert f"job_not_kept job={jobs[1]} worker=b reason=the run wants no such worker" in caplog.text
    assert f"job_not_kept job={jobs[2]} worker=deaf reason=it has not released" in caplog.text


async def test_a_controller_that_is_stopped_keeps_the_next_one_out(cluster, tmp_path):
    """It holds its lock: the other one says who lives there, and does nothing. Continued, it goes on."""
    with shard_of(cluster, tmp_path, "caller-0", rejoin_seconds=40) as former:
        await hear(former, "here")
        former.send_signal(signal.SIGSTOP)
        with pytest.raises(
            SchedulerError, match=rf"process {former.pid} on .* is the controller of the jobs of .*; end that run"
        ):
            async with open_scheduler(cluster, tmp_path, rejoin_seconds=40):
                pass
        former.send_signal(signal.SIGCONT)
        num_beats = len(epochs(tmp_path))
        with anyio.fail_after(20):
            while len(epochs(tmp_path)) < num_beats + 6:
                await anyio.sleep(0.2)
        former.kill()
    reaped = await to_thread.run_sync(invoke, cluster, "reap", str(tmp_path))

    assert "Ended: " in reaped.stdout
    assert {1} == set(epochs(tmp_path))


async def test_a_controller_that_has_lost_its_lock_leaves_its_jobs_to_the_next(cluster, tmp_path):
    """Where locks are not kept, there may be two controllers: the earlier one ends and touches nothing."""
    with shard_of(cluster, tmp_path, "caller-0", "second", rejoin_seconds=40) as former:
        jobs = await hear(former, "placed", 2)
        await hear(former, "here", 2)
        former.send_signal(signal.SIGSTOP)
        (tmp_path / "slurm" / "home").unlink()
        async with open_controller(cluster.address, secret=OTHER_SECRET) as (listener, controller):
            wanted = [spec(controller, life=1000), spec(controller, "second", life=1000)]
            with anyio.fail_after(60):
                async with (
                    open_scheduler(cluster, tmp_path, wanted=wanted, rejoin_seconds=40) as scheduler,
                    scheduler.place(wanted[0]) as first,
                    scheduler.place(wanted[1]) as second,
                ):
                    for name in ("caller-0", "second"):
                        await wait_for(listener, name, 1000)
                    former.send_signal(signal.SIGCONT)
                    (said,) = await hear(former, "ended")
                    await to_thread.run_sync(former.wait)
                    await anyio.sleep(2)
                    await scheduler.refresh()
                    states = [first.status.state, second.status.state]

    assert "another controller has taken over the jobs" in said
    assert [PlacementState.RUNNING] * 2 == states
    assert jobs == [str(first.job), str(second.job)]
    assert [1, 2] == sorted(set(epochs(tmp_path)))
