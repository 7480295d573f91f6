"""What a cluster can do to a run, on a real one: ``nox -s slurm``, or ``pytest tests/schedulers/slurm_local/chaos.py``.

Each test breaks something while callers live, and sees that no caller is given up without need, that no two lives of
one ever serve at once, and that at the end no job and no process is left. Takes minutes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import pytest
from anyio import to_thread
from click.testing import CliRunner, Result
from tests.schedulers.slurm_local.callers import SECRET, open_home, open_scheduler, spec
from tests.schedulers.slurm_local.cluster import ROOT, Cluster, open_cluster, why_no_namespaces, why_not

from areal_actors.__main__ import cli
from areal_actors.core.remote import Listener
from areal_actors.errors import SchedulerError
from areal_actors.schedulers.base import Home, PlacementState, Resources
from areal_actors.schedulers.slurm import SlurmPlacement
from areal_actors.schedulers.statuses import RUN_AGAIN

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]

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
    """Until nobody of this name is connected."""
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


async def test_a_node_daemon_that_is_back_soon_is_not_missed(cluster, tmp_path):
    """Its tasks live on, and nobody hears of it."""
    async with open_home(cluster.address) as (listener, home), open_scheduler(cluster, tmp_path) as scheduler:
        with anyio.fail_after(60):
            async with scheduler.place(spec(home)) as placement:
                await listener.wait_for("caller-0")
                await wait_state(placement, PlacementState.RUNNING)
                node = node_of(placement)
                await act(cluster, "kill-slurmd", node)
                await anyio.sleep(4)
                await act(cluster, "start-node", node)
                await anyio.sleep(3)
                await scheduler.look()

                assert placement.status.state is PlacementState.RUNNING
                assert {0} == {life for life, _ in beats(tmp_path)}


async def test_a_node_daemon_that_stays_away_has_its_job_run_elsewhere(cluster, tmp_path):
    """The cluster starts the job again while the old tasks live: the old life is refused and leaves by itself."""
    async with open_home(cluster.address) as (listener, home), open_scheduler(cluster, tmp_path) as scheduler:
        with anyio.fail_after(150):
            async with scheduler.place(spec(home)) as placement:
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


async def test_a_node_that_crashes_is_noticed_at_once_and_its_job_runs_elsewhere(hosts, tmp_path):
    """Home hears no heartbeat long before Slurm does; another life comes, and other jobs do not notice."""
    async with open_home(hosts.address) as (listener, home), open_scheduler(hosts, tmp_path) as scheduler:
        with anyio.fail_after(150):
            async with (
                scheduler.place(spec(home, resources=WHOLE_NODE)) as crashed,
                scheduler.place(spec(home, "other", resources=WHOLE_NODE)) as other,
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


async def test_a_node_that_crashes_for_good_ends_its_job(hosts, tmp_path):
    """Where the cluster is not to start it again, it has ended, and another one can be placed elsewhere at once."""
    async with (
        open_home(hosts.address) as (listener, home),
        open_scheduler(hosts, tmp_path, max_requeues=0) as scheduler,
    ):
        with anyio.fail_after(120):
            async with scheduler.place(spec(home)) as placement:
                await listener.wait_for("caller-0")
                await wait_state(placement, PlacementState.RUNNING)
                node = node_of(placement)
                await act(hosts, "crash-node", node)
                async with scheduler.place(spec(home, life=1)) as successor:
                    with anyio.fail_after(20):
                        await wait_for(listener, "caller-0", 1)
                    await wait_state(successor, PlacementState.RUNNING)
                    ended = await placement.wait_ended()
                    others = node_of(successor)
                await act(hosts, "start-node", node)

    assert others != node
    assert "NODE_FAIL" in ended.reason
    assert ended.exit_code is None


async def test_a_job_of_a_dead_node_is_left_to_the_cluster(hosts, tmp_path):
    """Its end cannot be confirmed: leaving does not wait for the cluster to give the node up, which is avoided."""
    async with (
        open_home(hosts.address) as (listener, home),
        open_scheduler(hosts, tmp_path, completing_seconds=2.0) as scheduler,
    ):
        with anyio.fail_after(60):
            async with scheduler.place(spec(home)) as placement:
                await listener.wait_for("caller-0")
                await wait_state(placement, PlacementState.RUNNING)
                node = node_of(placement)
                await act(hosts, "crash-node", node)
                with anyio.fail_after(15):
                    await placement.stop(grace=0)
            async with scheduler.place(spec(home, life=1)) as successor:
                await wait_for(listener, "caller-0", 1)
                await wait_state(successor, PlacementState.RUNNING)
                others = node_of(successor)
                while any(name.endswith(".0 COMPLETING") for name in await to_thread.run_sync(hosts.queue)):
                    await anyio.sleep(0.5)
            await act(hosts, "start-node", node)

    assert "does not confirm" in placement.status.reason
    assert others != node


async def test_a_short_cut_is_mended_by_the_same_life(hosts, tmp_path):
    """Four seconds without a network: the caller calls again, and neither Slurm nor home gives it up."""
    async with open_home(hosts.address) as (listener, home), open_scheduler(hosts, tmp_path) as scheduler:
        with anyio.fail_after(60):
            async with scheduler.place(spec(home, lease=30)) as placement:
                await listener.wait_for("caller-0")
                await wait_state(placement, PlacementState.RUNNING)
                node = node_of(placement)
                await act(hosts, "cut-node", node)
                await anyio.sleep(4)
                await wait_until_gone(listener, "caller-0")
                await act(hosts, "heal-node", node)
                await wait_for(listener, "caller-0", 0)
                await scheduler.look()

                assert placement.status.state is PlacementState.RUNNING


async def test_a_long_cut_fences_the_old_life(hosts, tmp_path):
    """Forty-five seconds: the old life ends itself within its lease, before another one serves elsewhere."""
    async with open_home(hosts.address) as (listener, home), open_scheduler(hosts, tmp_path) as scheduler:
        with anyio.fail_after(150):
            async with scheduler.place(spec(home, lease=4)) as placement:
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


async def test_a_controller_that_is_away_ends_nothing(cluster, tmp_path):
    """Killed and started again: the state is unknown, the caller goes on; leaving waits for the controller."""
    async with (
        open_home(cluster.address) as (listener, home),
        open_scheduler(cluster, tmp_path, command_timeout_seconds=2.0) as scheduler,
    ):
        with anyio.fail_after(150):
            async with scheduler.place(spec(home)) as placement:
                await listener.wait_for("caller-0")
                await wait_state(placement, PlacementState.RUNNING)
                await anyio.sleep(8)  # its state is saved a few seconds after it began
                await act(cluster, "kill-ctld")
                await wait_state(placement, PlacementState.UNKNOWN)
                await anyio.sleep(10)
                await act(cluster, "start-ctld")
                await wait_state(placement, PlacementState.RUNNING)

                assert scheduler.num_silences > 0
                assert {0} == {life for life, _ in beats(tmp_path)}
                await act(cluster, "kill-ctld")
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(_start_controller, cluster)
                    await placement.stop(grace=0)
    assert placement.status.state is PlacementState.ENDED


async def _start_controller(cluster: Cluster) -> None:
    await anyio.sleep(6)
    await act(cluster, "start-ctld")


async def test_a_controller_killed_just_after_a_start_makes_no_two(cluster, tmp_path):
    """It may have forgotten that the job began, and start it again: then the older life is refused.

    Or it has forgotten all of the job, which is lost then: home places another one.
    """
    await anyio.sleep(8)  # or it would believe that the job of the test before still runs
    async with (
        open_home(cluster.address) as (listener, home),
        open_scheduler(cluster, tmp_path, lost_seconds=10.0) as scheduler,
        AsyncExitStack() as stack,
    ):
        with anyio.fail_after(150):
            placement = await stack.enter_async_context(scheduler.place(spec(home)))
            await listener.wait_for("caller-0")
            await act(cluster, "kill-ctld")
            await act(cluster, "start-ctld")
            await anyio.sleep(5)
            await to_thread.run_sync(cluster.mend)
            while not any(peer.node == "caller-0" for peer in listener.peers):
                if placement.status.state is PlacementState.ENDED:
                    placement = await stack.enter_async_context(scheduler.place(spec(home, life=1)))
                    await listener.wait_for("caller-0")
                await anyio.sleep(0.1)
            await anyio.sleep(2)
    assert_no_two_lives_at_once(tmp_path)


async def test_a_drained_node_keeps_its_job_and_takes_no_other(cluster, tmp_path):
    """What waits for it says why; mended, it runs."""
    async with open_home(cluster.address) as (listener, home), open_scheduler(cluster, tmp_path) as scheduler:
        with anyio.fail_after(90):
            async with scheduler.place(spec(home)) as first:
                await listener.wait_for("caller-0")
                nodes = ",".join(cluster.node(number) for number in range(1, 5))
                cluster.run("scontrol", "update", f"NodeName={nodes}", "State=DRAIN", "Reason=test")
                async with scheduler.place(spec(home, "second")) as second:
                    await wait_state(second, PlacementState.PENDING)
                    while "ReqNodeNotAvail" not in second.status.reason:
                        await anyio.sleep(0.1)
                    assert "drained" in second.status.reason
                    await wait_state(first, PlacementState.RUNNING)
                    cluster.run("scontrol", "update", f"NodeName={nodes}", "State=RESUME")
                    await listener.wait_for("second")


async def test_the_time_limit_is_met_with_a_checkpoint(cluster, tmp_path):
    """The caller is warned, keeps what it has, asks to run again, and does."""
    async with (
        open_home(cluster.address) as (listener, home),
        open_scheduler(cluster, tmp_path, time_minutes=1, margin_seconds=50) as scheduler,
    ):
        with anyio.fail_after(150):
            async with scheduler.place(spec(home)) as placement:
                await listener.wait_for("caller-0")
                await wait_for(listener, "caller-0", 1)
                checkpoint = (tmp_path / "slurm" / "checkpoint-caller-0").read_text()
                record = (tmp_path / "slurm" / "exit" / f"{placement.job}-0").read_text()
                log = placement.log.read_text()

    assert checkpoint.startswith("0 ")
    assert record.startswith(f"{RUN_AGAIN} ")
    assert "told to end by SIGUSR1" in log
    assert_no_two_lives_at_once(tmp_path)


@pytest.mark.parametrize("partition", ["low", "grace"])
async def test_a_preempted_job_is_put_back_with_a_checkpoint(cluster, tmp_path, partition):
    """With grace or without, it is told, and runs again when the other one has ended."""
    async with (
        open_home(cluster.address) as (listener, home),
        open_scheduler(cluster, tmp_path, partition=partition) as scheduler,
    ):
        with anyio.fail_after(200):
            async with scheduler.place(spec(home)) as placement:
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


async def test_what_is_cancelled_from_outside_is_not_started_again(cluster, tmp_path):
    """Running or waiting, it has ended, and says by whom."""
    async with open_home(cluster.address) as (listener, home), open_scheduler(cluster, tmp_path) as scheduler:
        with anyio.fail_after(60):
            async with scheduler.place(spec(home)) as running:
                await listener.wait_for("caller-0")
                cluster.run("scontrol", "update", f"NodeName={cluster.node(1)}", "State=DRAIN", "Reason=test")
                async with (
                    scheduler.place(spec(home, "b", resources=WHOLE_NODE)),
                    scheduler.place(spec(home, "c", resources=WHOLE_NODE)),
                    scheduler.place(spec(home, "d", resources=WHOLE_NODE)),
                    scheduler.place(spec(home, "waiting", resources=WHOLE_NODE)) as waiting,
                ):
                    await wait_state(waiting, PlacementState.PENDING)
                    cluster.run("scancel", str(running.job), str(waiting.job))
                    ends = [await running.wait_ended(), await waiting.wait_ended()]

    assert all("cancelled from outside" in one.reason for one in ends)


async def test_nothing_is_left_of_a_home_that_was_killed(cluster, tmp_path):
    """Its callers end within their lease; a job that begins later finds nobody; the records say what there was."""
    environment = cluster.environment | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    command = [sys.executable, "-m", "tests.schedulers.slurm_local.home", cluster.address, str(tmp_path), "a", "b"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, cwd=ROOT) as home:
        said: list[str] = []
        while sum(line.startswith("here") for line in said) < 2:
            said.append(await to_thread.run_sync(home.stdout.readline))
        os.kill(home.pid, signal.SIGKILL)
    with anyio.fail_after(4 + 5 + 5 + 5):
        while await to_thread.run_sync(cluster.queue) or cluster.processes(f"{tmp_path}/slurm/bootstrap"):
            await anyio.sleep(0.2)
    reaped = await to_thread.run_sync(invoke, cluster, "reap", str(tmp_path))

    assert reaped.exit_code == 0, reaped.output
    assert "Ended: " in reaped.stdout
    listed = await to_thread.run_sync(invoke, cluster, "status", str(tmp_path), "--json")
    assert '"gone"' in listed.stdout
    assert '"RUNNING"' not in listed.stdout


async def test_a_job_that_begins_after_its_home_was_killed_gives_its_node_back(cluster, tmp_path):
    """It waited meanwhile; nobody answers it."""
    nodes = ",".join(cluster.node(number) for number in range(1, 5))
    cluster.run("scontrol", "update", f"NodeName={nodes}", "State=DRAIN", "Reason=test")
    command = [sys.executable, "-m", "tests.schedulers.slurm_local.home", cluster.address, str(tmp_path), "a"]
    with subprocess.Popen(command, env=cluster.environment, stdout=subprocess.PIPE, text=True, cwd=ROOT) as home:
        job = (await to_thread.run_sync(home.stdout.readline)).split()[1]
        os.kill(home.pid, signal.SIGKILL)
    cluster.run("scontrol", "update", f"NodeName={nodes}", "State=RESUME")
    with anyio.fail_after(30):
        while await to_thread.run_sync(cluster.queue):
            await anyio.sleep(0.2)

    assert (tmp_path / "slurm" / "exit" / f"{job}-0").read_text().startswith("76 ")
    assert "home cannot be reached" in (tmp_path / "logs" / "workers" / "a.log").read_text()


async def test_a_stopped_munge_costs_time_limits_and_nothing_else(cluster, tmp_path):
    """No command answers: states are unknown, a submission fails in bounded time, and the event loop never waits."""
    munged = int((cluster.directory / "run" / "munged.pid").read_text().split()[0])
    async with (
        open_home(cluster.address) as (listener, home),
        open_scheduler(
            cluster, tmp_path, command_timeout_seconds=1.0, submit_timeout_seconds=3.0, cancel_timeout_seconds=20.0
        ) as scheduler,
    ):
        with anyio.fail_after(90):
            async with AsyncExitStack() as stack:
                placement = await stack.enter_async_context(scheduler.place(spec(home)))
                await listener.wait_for("caller-0")
                os.kill(munged, signal.SIGSTOP)
                try:
                    await wait_state(placement, PlacementState.UNKNOWN)
                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(_continue_after, munged, 8.0)
                        with pytest.raises(SchedulerError, match="could not be submitted"):
                            async with scheduler.place(spec(home, "late")):
                                pass
                finally:
                    os.kill(munged, signal.SIGCONT)
                await wait_state(placement, PlacementState.RUNNING)

                assert {0} == {life for life, _ in beats(tmp_path)}


async def _continue_after(process: int, seconds: float) -> None:
    await anyio.sleep(seconds)
    os.kill(process, signal.SIGCONT)


async def test_a_directory_that_nodes_do_not_share_is_said_so(tmp_path):
    """The node cannot even open the log: the end says what to look at."""
    if why_not() or why_no_namespaces():
        pytest.skip(why_not() or why_no_namespaces())
    nowhere = Home(addresses=("tcp://127.0.0.1:9",), secret=SECRET)
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
