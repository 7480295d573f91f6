"""What a real cluster and its people do to jobs by right: drains, limits, preemption, scancel. ``nox -s slurm``."""

from __future__ import annotations

import anyio
import pytest
from tests.schedulers.slurm_local.callers import open_controller, open_scheduler, spec
from tools.slurm.breaking import (
    WHOLE_NODE,
    assert_no_two_lives_at_once,
    cluster,
    wait_for,
    wait_state,
)

from areal_actors.schedulers.base import RUN_AGAIN, PlacementState

__all__ = ["cluster"]

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]


async def test_drained_node_keeps_its_job_and_takes_no_other(cluster, tmp_path):
    """What waits for it says why; mended, it runs."""
    async with (
        open_controller(cluster.address) as (listener, controller),
        open_scheduler(cluster, tmp_path) as scheduler,
    ):
        with anyio.fail_after(90):
            async with scheduler.place(spec(controller)) as first:
                await listener.wait_for("caller-0")
                nodes = ",".join(cluster.node(number) for number in range(1, 5))
                cluster.run("scontrol", "update", f"NodeName={nodes}", "State=DRAIN", "Reason=test")
                async with scheduler.place(spec(controller, "second")) as second:
                    await wait_state(second, PlacementState.PENDING)
                    while "ReqNodeNotAvail" not in second.status.reason:
                        await anyio.sleep(0.1)
                    assert "drained" in second.status.reason
                    await wait_state(first, PlacementState.RUNNING)
                    cluster.run("scontrol", "update", f"NodeName={nodes}", "State=RESUME")
                    await listener.wait_for("second")


async def test_time_limit_is_met_with_a_checkpoint(cluster, tmp_path):
    """The caller is warned, keeps what it has, asks to run again, and does."""
    async with (
        open_controller(cluster.address) as (listener, controller),
        open_scheduler(cluster, tmp_path, time_minutes=1, margin_seconds=50) as scheduler,
    ):
        with anyio.fail_after(150):
            async with scheduler.place(spec(controller)) as placement:
                await listener.wait_for("caller-0")
                await wait_for(listener, "caller-0", 1)
                checkpoint = (tmp_path / "slurm" / "checkpoint-caller-0").read_text()
                record = (tmp_path / "slurm" / "exit" / f"{placement.name}.{placement.job}-0").read_text()
                log = placement.log.read_text()

    assert checkpoint.startswith("0 ")
    assert record.startswith(f"{RUN_AGAIN} ")
    assert "told to end by SIGUSR1" in log
    assert_no_two_lives_at_once(tmp_path)


@pytest.mark.parametrize("partition", ["low", "grace"])
async def test_preempted_job_is_put_back_with_a_checkpoint(cluster, tmp_path, partition):
    """With grace or without, it is told, and runs again when the other one has ended."""
    async with (
        open_controller(cluster.address) as (listener, controller),
        open_scheduler(cluster, tmp_path, partition=partition) as scheduler,
    ):
        with anyio.fail_after(200):
            async with scheduler.place(spec(controller)) as placement:
                await listener.wait_for("caller-0")
                await wait_state(placement, PlacementState.RUNNING)
                other = cluster.run(
                    "sbatch", "--parsable", "-p", "high", "-N4", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 300"
                ).strip()
                try:
                    while not placement.status.is_requeued:
                        await anyio.sleep(0.1)
                    checkpoint = (tmp_path / "slurm" / "checkpoint-caller-0").read_text()
                finally:
                    cluster.run("scancel", other)
                await wait_for(listener, "caller-0", 1)

    assert checkpoint.startswith("0 ")
    assert_no_two_lives_at_once(tmp_path)


async def test_externally_cancelled_job_is_not_restarted(cluster, tmp_path):
    """Running or waiting, it has ended, and says by whom."""
    async with (
        open_controller(cluster.address) as (listener, controller),
        open_scheduler(cluster, tmp_path) as scheduler,
    ):
        with anyio.fail_after(60):
            async with scheduler.place(spec(controller)) as running:
                await listener.wait_for("caller-0")
                cluster.run("scontrol", "update", f"NodeName={cluster.node(1)}", "State=DRAIN", "Reason=test")
                async with (
                    scheduler.place(spec(controller, "b", resources=WHOLE_NODE)),
                    scheduler.place(spec(controller, "c", resources=WHOLE_NODE)),
                    scheduler.place(spec(controller, "d", resources=WHOLE_NODE)),
                    scheduler.place(spec(controller, "waiting", resources=WHOLE_NODE)) as waiting,
                ):
                    await wait_state(waiting, PlacementState.PENDING)
                    cluster.run("scancel", str(running.job), str(waiting.job))
                    ends = [await running.wait_ended(), await waiting.wait_ended()]

    assert all("cancelled from outside" in one.reason for one in ends)
