"""A real cluster whose controller or munge is away, and killed controllers of runs: ``nox -s slurm``. Takes minutes.

An unknown state ends no job, no command waits indefinitely, and a killed controller leaves nothing behind.
"""

from __future__ import annotations

import os
import signal
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import pytest
from anyio import to_thread
from tests.schedulers.slurm_local.callers import SECRET, open_controller, open_scheduler, spec
from tests.schedulers.slurm_local.cluster import Cluster, open_cluster, why_no_namespaces, why_not
from tools.slurm.breaking import act, assert_no_two_lives_at_once, beats, cluster, invoke, wait_state
from tools.slurm.controller import hear, shard_of

from areal_actors.errors import SchedulerError
from areal_actors.schedulers.base import ControllerAddress, PlacementState

__all__ = ["cluster"]

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]


async def test_controller_that_is_away_ends_nothing(cluster, tmp_path):
    """Killed and started again: the state is unknown, the caller goes on; leaving waits for the controller."""
    async with (
        open_controller(cluster.address) as (listener, controller),
        open_scheduler(cluster, tmp_path, command_timeout_seconds=2.0) as scheduler,
    ):
        with anyio.fail_after(150):
            async with scheduler.place(spec(controller)) as placement:
                await listener.wait_for("caller-0")
                await wait_state(placement, PlacementState.RUNNING)
                await anyio.sleep(8)  # its state is saved a few seconds after it began
                await act(cluster, "kill-ctld")
                await wait_state(placement, PlacementState.UNKNOWN)
                await anyio.sleep(10)
                await act(cluster, "start-ctld")
                await wait_state(placement, PlacementState.RUNNING)

                assert {0} == {life for life, _ in beats(tmp_path)}
                await act(cluster, "kill-ctld")
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(_start_controller, cluster)
                    await placement.stop(grace=0)
    assert placement.status.state is PlacementState.ENDED


async def _start_controller(cluster: Cluster) -> None:
    await anyio.sleep(6)
    await act(cluster, "start-ctld")


async def test_slurm_controller_killed_after_a_start_makes_no_second_worker(cluster, tmp_path):
    """It may have forgotten that the job began, and start it again: then the older life is refused.

    Or it has forgotten all of the job, which is lost then: controller places another one.
    """
    await anyio.sleep(8)  # or it would believe that the job of the test before still runs
    async with (
        open_controller(cluster.address) as (listener, controller),
        open_scheduler(cluster, tmp_path, lost_seconds=10.0) as scheduler,
        AsyncExitStack() as stack,
    ):
        with anyio.fail_after(150):
            placement = await stack.enter_async_context(scheduler.place(spec(controller)))
            await listener.wait_for("caller-0")
            await act(cluster, "kill-ctld")
            await act(cluster, "start-ctld")
            await anyio.sleep(5)
            await to_thread.run_sync(cluster.mend)
            while not any(peer.node == "caller-0" for peer in listener.peers):
                if placement.status.state is PlacementState.ENDED:
                    placement = await stack.enter_async_context(scheduler.place(spec(controller, life=1)))
                    await listener.wait_for("caller-0")
                await anyio.sleep(0.1)
            await anyio.sleep(2)
    assert_no_two_lives_at_once(tmp_path)


async def test_stopped_munge_only_delays(cluster, tmp_path):
    """No command answers: states are unknown, a submission fails in bounded time, and the event loop never waits."""
    munged = int((cluster.directory / "run" / "munged.pid").read_text().split()[0])
    async with (
        open_controller(cluster.address) as (listener, controller),
        open_scheduler(
            cluster, tmp_path, command_timeout_seconds=1.0, submit_timeout_seconds=3.0, cancel_timeout_seconds=20.0
        ) as scheduler,
    ):
        with anyio.fail_after(90):
            async with AsyncExitStack() as stack:
                placement = await stack.enter_async_context(scheduler.place(spec(controller)))
                await listener.wait_for("caller-0")
                os.kill(munged, signal.SIGSTOP)
                try:
                    await wait_state(placement, PlacementState.UNKNOWN)
                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(_continue_after, munged, 8.0)
                        with pytest.raises(SchedulerError, match="could not be submitted"):
                            async with scheduler.place(spec(controller, "late")):
                                pass
                finally:
                    os.kill(munged, signal.SIGCONT)
                await wait_state(placement, PlacementState.RUNNING)

                assert {0} == {life for life, _ in beats(tmp_path)}


async def _continue_after(process: int, seconds: float) -> None:
    await anyio.sleep(seconds)
    os.kill(process, signal.SIGCONT)


async def test_unshared_directory_is_named(tmp_path):
    """The node cannot even open the log: the end says what to look at."""
    if why_not() or why_no_namespaces():
        pytest.skip(why_not() or why_no_namespaces())
    nowhere = ControllerAddress(address="tcp://127.0.0.1:9", secret=SECRET)
    with (
        tempfile.TemporaryDirectory(prefix="private-", dir="/tmp") as directory,
        open_cluster(
            Path(directory) / "c", prefix="private", num_nodes=1, options=("--netns", "--private-tmp")
        ) as cluster,
    ):
        async with open_scheduler(cluster, tmp_path) as scheduler:
            with anyio.fail_after(60):
                async with scheduler.place(spec(nowhere)) as placement:
                    ended = await placement.wait_ended()

    assert "file system that nodes share" in ended.reason


def drain(cluster: Cluster, state: str) -> None:
    """Have no node take another job, or all of them again (``RESUME``)."""
    nodes = ",".join(cluster.node(number) for number in range(1, 5))
    cluster.run("scontrol", "update", f"NodeName={nodes}", f"State={state}", "Reason=test")


async def test_workers_of_killed_controller_end_with_their_lease(cluster, tmp_path):
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
    assert not await to_thread.run_sync(cluster.queue)


async def test_job_that_starts_after_its_controller_was_killed_frees_its_node(cluster, tmp_path):
    """It finds no controller."""
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


async def test_second_controller_is_refused_while_first_is_stopped(cluster, tmp_path):
    """It holds its lock: the other one says who lives there, and does nothing. Continued, it goes on."""
    with shard_of(cluster, tmp_path, "caller-0") as former:
        await hear(former, "here")
        former.send_signal(signal.SIGSTOP)
        with pytest.raises(
            SchedulerError, match=rf"process {former.pid} on .* is the controller of the jobs of .*; end that run"
        ):
            async with open_scheduler(cluster, tmp_path):
                pass
        former.send_signal(signal.SIGCONT)
        num_beats = len(beats(tmp_path))
        with anyio.fail_after(20):
            while len(beats(tmp_path)) < num_beats + 6:
                await anyio.sleep(0.2)
        former.kill()
    reaped = await to_thread.run_sync(invoke, cluster, "reap", str(tmp_path))

    assert "Ended: " in reaped.stdout
    assert {0} == {life for life, _ in beats(tmp_path)}
