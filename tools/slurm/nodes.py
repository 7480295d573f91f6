"""Nodes of a real cluster that die, are cut off, or lose their daemon: ``nox -s slurm``. Takes minutes.

No caller is given up without need, no two lives of one ever serve at once, and nothing is left.
"""

from __future__ import annotations

import anyio
import pytest
from anyio import to_thread
from tests.schedulers.slurm_local.callers import open_controller, open_scheduler, spec
from tools.slurm.breaking import (
    WHOLE_NODE,
    act,
    assert_no_two_lives_at_once,
    beats,
    cluster,
    hosts,
    node_of,
    wait_for,
    wait_state,
    wait_until_gone,
)

from areal_actors.schedulers.base import PlacementState

__all__ = ["cluster", "hosts"]

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]


async def test_node_daemon_that_is_back_soon_is_not_missed(cluster, tmp_path):
    """Its tasks continue, and it is not reported."""
    async with (
        open_controller(cluster.address) as (listener, controller),
        open_scheduler(cluster, tmp_path) as scheduler,
    ):
        with anyio.fail_after(60):
            async with scheduler.place(spec(controller)) as placement:
                await listener.wait_for("caller-0")
                await wait_state(placement, PlacementState.RUNNING)
                node = node_of(placement)
                await act(cluster, "kill-slurmd", node)
                await anyio.sleep(4)
                await act(cluster, "start-node", node)
                await anyio.sleep(3)
                await scheduler.refresh()

                assert placement.status.state is PlacementState.RUNNING
                assert {0} == {life for life, _ in beats(tmp_path)}


async def test_node_daemon_that_stays_away_has_its_job_run_elsewhere(cluster, tmp_path):
    """The cluster starts the job again while the old tasks live: the old life is refused and leaves by itself."""
    async with (
        open_controller(cluster.address) as (listener, controller),
        open_scheduler(cluster, tmp_path) as scheduler,
    ):
        with anyio.fail_after(150):
            async with scheduler.place(spec(controller)) as placement:
                await listener.wait_for("caller-0")
                await wait_state(placement, PlacementState.RUNNING)
                node = node_of(placement)
                await act(cluster, "kill-slurmd", node)
                await wait_for(listener, "caller-0", 1)
                await anyio.sleep(6)
                await wait_state(placement, PlacementState.RUNNING)

                assert node != node_of(placement)
                assert beats(tmp_path)[-1][0] == 1
                await act(cluster, "start-node", node)
    assert_no_two_lives_at_once(tmp_path)


async def test_node_that_crashes_is_noticed_at_once_and_its_job_runs_elsewhere(hosts, tmp_path):
    """The controller hears no heartbeat long before Slurm does; another life comes, and other jobs do not notice."""
    async with open_controller(hosts.address) as (listener, controller), open_scheduler(hosts, tmp_path) as scheduler:
        with anyio.fail_after(150):
            async with (
                scheduler.place(spec(controller, resources=WHOLE_NODE)) as crashed,
                scheduler.place(spec(controller, "other", resources=WHOLE_NODE)) as other,
            ):
                for name in ("caller-0", "other"):
                    await listener.wait_for(name)
                await wait_state(crashed, PlacementState.RUNNING)
                node = node_of(crashed)
                await act(hosts, "crash-node", node)
                with anyio.fail_after(4):
                    await wait_until_gone(listener, "caller-0")
                await wait_for(listener, "caller-0", 1)
                await wait_state(crashed, PlacementState.RUNNING)

                assert node != node_of(crashed)
                assert other.status.state is PlacementState.RUNNING
                assert {0} == {life for life, _ in beats(tmp_path, "other")}
                await act(hosts, "start-node", node)
    assert_no_two_lives_at_once(tmp_path)


async def test_node_that_crashes_for_good_ends_its_job(hosts, tmp_path):
    """Where the cluster is not to start it again, it has ended, and another one can be placed elsewhere at once."""
    async with (
        open_controller(hosts.address) as (listener, controller),
        open_scheduler(hosts, tmp_path, max_requeues=0) as scheduler,
    ):
        with anyio.fail_after(120):
            async with scheduler.place(spec(controller)) as placement:
                await listener.wait_for("caller-0")
                await wait_state(placement, PlacementState.RUNNING)
                node = node_of(placement)
                await act(hosts, "crash-node", node)
                async with scheduler.place(spec(controller, life=1)) as successor:
                    with anyio.fail_after(20):
                        await wait_for(listener, "caller-0", 1)
                    await wait_state(successor, PlacementState.RUNNING)
                    ended = await placement.wait_ended()
                    others = node_of(successor)
                await act(hosts, "start-node", node)

    assert others != node
    assert "NODE_FAIL" in ended.reason
    assert ended.exit_code is None


async def test_job_of_a_dead_node_is_left_to_the_cluster(hosts, tmp_path):
    """Its end cannot be confirmed: leaving does not wait for the cluster to give the node up, which is avoided."""
    async with (
        open_controller(hosts.address) as (listener, controller),
        open_scheduler(hosts, tmp_path, completing_seconds=2.0) as scheduler,
    ):
        with anyio.fail_after(60):
            async with scheduler.place(spec(controller)) as placement:
                await listener.wait_for("caller-0")
                await wait_state(placement, PlacementState.RUNNING)
                node = node_of(placement)
                await act(hosts, "crash-node", node)
                with anyio.fail_after(15):
                    await placement.stop(grace=0)
            async with scheduler.place(spec(controller, life=1)) as successor:
                await wait_for(listener, "caller-0", 1)
                await wait_state(successor, PlacementState.RUNNING)
                others = node_of(successor)
                while any(name.endswith(".0 COMPLETING") for name in await to_thread.run_sync(hosts.queue)):
                    await anyio.sleep(0.5)
            await act(hosts, "start-node", node)

    assert "does not confirm" in placement.status.reason
    assert others != node


async def test_worker_survives_a_short_disconnection(hosts, tmp_path):
    """Four seconds without a network: the caller calls again, and neither Slurm nor controller gives it up."""
    async with open_controller(hosts.address) as (listener, controller), open_scheduler(hosts, tmp_path) as scheduler:
        with anyio.fail_after(60):
            async with scheduler.place(spec(controller, lease=30)) as placement:
                await listener.wait_for("caller-0")
                await wait_state(placement, PlacementState.RUNNING)
                node = node_of(placement)
                await act(hosts, "cut-node", node)
                await anyio.sleep(4)
                await wait_until_gone(listener, "caller-0")
                await act(hosts, "heal-node", node)
                await wait_for(listener, "caller-0", 0)
                await scheduler.refresh()

                assert placement.status.state is PlacementState.RUNNING


async def test_long_disconnection_fences_the_old_incarnation(hosts, tmp_path):
    """Forty-five seconds: the old life ends itself within its lease, before another one serves elsewhere."""
    async with open_controller(hosts.address) as (listener, controller), open_scheduler(hosts, tmp_path) as scheduler:
        with anyio.fail_after(150):
            async with scheduler.place(spec(controller, lease=4)) as placement:
                await listener.wait_for("caller-0")
                await wait_state(placement, PlacementState.RUNNING)
                node = node_of(placement)
                await act(hosts, "cut-node", node)
                await anyio.sleep(12)
                left = hosts.processes(f"{tmp_path}/slurm/bootstrap")
                await anyio.sleep(33)
                await act(hosts, "heal-node", node)
                await wait_for(listener, "caller-0", 1)

    assert not [line for line in left if "slurm_local.caller" in line]
    assert_no_two_lives_at_once(tmp_path)
