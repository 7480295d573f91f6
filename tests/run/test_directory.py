"""The directory accepts messages of the latest incarnation of each worker only."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest
from attrs import evolve

from areal_actors.domain import Role
from areal_actors.errors import Conflict, NotFound
from areal_actors.kernel import ActorSystem
from areal_actors.messages import (
    AwaitEndpoint,
    AwaitGang,
    AwaitLapse,
    AwaitReady,
    AwaitWeights,
    DismissWorker,
    Endpoint,
    ExpectWorker,
    FetchRoleSpec,
    KeepLease,
    Report,
    ReportFailure,
    ReportGang,
    ReportReady,
    RoleSpec,
    WeightsPublished,
)
from areal_actors.run.control_plane import DirectoryActor

SPEC = RoleSpec(
    role=Role.PROXY, config=Path("c.yaml"), directory=Path("run"), lease_seconds=0.01, is_replaced_alone=True
)
NAME = "proxy-0"
REPORT = Report(address="unix:/a", endpoint=Endpoint(url="http://h:1", admin_key="k"))


@pytest.mark.anyio
async def test_directory_refuses_older_incarnation():
    """An incarnation that the cluster started by itself replaces it."""
    async with ActorSystem.open() as system:
        directory = await system.spawn(DirectoryActor())
        with pytest.raises(NotFound):
            await directory.ask(FetchRoleSpec(worker=NAME, incarnation=1))
        await directory.ask(ExpectWorker(worker=NAME, incarnation=1000, spec=SPEC))
        await directory.ask(ReportReady(worker=NAME, incarnation=1000, report=REPORT))
        again = await directory.ask(FetchRoleSpec(worker=NAME, incarnation=1001))
        words = [
            KeepLease(worker=NAME, incarnation=1000),
            ReportReady(worker=NAME, incarnation=1000, report=REPORT),
            ReportFailure(worker=NAME, incarnation=1000, error={}),
            ExpectWorker(worker=NAME, incarnation=1001, spec=SPEC),
        ]
        for word in words:
            with pytest.raises(Conflict):
                await directory.ask(word)
        await directory.ask(ExpectWorker(worker=NAME, incarnation=2000, spec=SPEC))
        with pytest.raises(Conflict):
            await directory.ask(KeepLease(worker=NAME, incarnation=1001))

    assert SPEC == again


@pytest.mark.anyio
async def test_directory_waits_until_worker_serves():
    """After it is dismissed, the directory waits for the next incarnation."""
    found = []
    async with ActorSystem.open() as system, anyio.create_task_group() as tasks:
        directory = await system.spawn(DirectoryActor())

        async def look(message):
            found.append(await directory.ask(message))

        tasks.start_soon(look, AwaitReady(worker=NAME))
        tasks.start_soon(look, AwaitEndpoint())
        await directory.ask(ExpectWorker(worker=NAME, incarnation=1, spec=SPEC))
        await anyio.wait_all_tasks_blocked()
        before = list(found)
        await directory.ask(ReportReady(worker=NAME, incarnation=1, report=REPORT))
        await anyio.wait_all_tasks_blocked()
        after = len(found)
        await directory.ask(DismissWorker(worker=NAME, incarnation=1))
        tasks.start_soon(look, AwaitReady(worker=NAME))
        await anyio.wait_all_tasks_blocked()
        dismissed = len(found)
        await directory.ask(ExpectWorker(worker=NAME, incarnation=2, spec=SPEC))
        await directory.ask(ReportReady(worker=NAME, incarnation=2, report=REPORT))

    assert ([], 2, 2, 3) == (before, after, dismissed, len(found))


@pytest.mark.anyio
async def test_directory_gives_up_silent_worker():
    """Not before it was heard of, and not before its lease is over. Its last words are kept."""
    async with ActorSystem.open() as system:
        directory = await system.spawn(DirectoryActor())
        await directory.ask(ExpectWorker(worker=NAME, incarnation=1, spec=SPEC))
        with anyio.move_on_after(0.03) as patience:
            await directory.ask(AwaitLapse(worker=NAME, incarnation=1))
        await directory.ask(ReportFailure(worker=NAME, incarnation=1, error={"a": 1}))
        reason = await directory.ask(AwaitLapse(worker=NAME, incarnation=1))
        failure = await directory.ask(DismissWorker(worker=NAME, incarnation=1))

    assert patience.cancelled_caught
    assert "0.01 s" in reason
    assert {"a": 1} == failure


@pytest.mark.anyio
async def test_directory_gives_up_hanging_worker_before_lease_ends():
    """But only once it serves: while it imports and loads, it may be silent for longer."""
    spec = evolve(SPEC, lease_seconds=600.0, hang_seconds=0.02)
    async with ActorSystem.open() as system:
        directory = await system.spawn(DirectoryActor())
        await directory.ask(ExpectWorker(worker=NAME, incarnation=1, spec=spec))
        await directory.ask(KeepLease(worker=NAME, incarnation=1))
        with anyio.move_on_after(0.1) as patience:
            await directory.ask(AwaitLapse(worker=NAME, incarnation=1))
        await directory.ask(ReportReady(worker=NAME, incarnation=1, report=REPORT))
        with anyio.fail_after(10):
            reason = await directory.ask(AwaitLapse(worker=NAME, incarnation=1))

    assert patience.cancelled_caught
    assert "has not answered" in reason


@pytest.mark.anyio
async def test_directory_waits_for_weights_of_attempt():
    """Those of an earlier attempt are not meant."""
    async with ActorSystem.open() as system:
        directory = await system.spawn(DirectoryActor())
        await directory.ask(WeightsPublished(attempt=1))
        await directory.ask(AwaitWeights(attempt=1))
        with anyio.move_on_after(0.01) as patience:
            await directory.ask(AwaitWeights(attempt=2))

    assert patience.cancelled_caught


@pytest.mark.anyio
async def test_directory_returns_address_of_gang():
    """Specs fetched by other processes of the gang do not renew its lease; an older incarnation is refused."""
    spec = evolve(SPEC, role=Role.TRAINER)
    found = []
    async with ActorSystem.open() as system, anyio.create_task_group() as tasks:
        directory = await system.spawn(DirectoryActor())

        async def join(life):
            try:
                found.append(await directory.ask(AwaitGang(worker=NAME, incarnation=life)))
            except Conflict:
                found.append("refused")

        await directory.ask(ExpectWorker(worker=NAME, incarnation=1, spec=spec))
        told = await directory.ask(FetchRoleSpec(worker=NAME, incarnation=1, rank=1))
        with anyio.move_on_after(0.03) as patience:
            await directory.ask(AwaitLapse(worker=NAME, incarnation=1))
        tasks.start_soon(join, 1)
        await anyio.wait_all_tasks_blocked()
        await directory.ask(ExpectWorker(worker=NAME, incarnation=2, spec=spec))
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(join, 2)
        await anyio.wait_all_tasks_blocked()
        await directory.ask(ReportGang(worker=NAME, incarnation=2, address="tcp://h:1"))

    assert spec == told
    assert patience.cancelled_caught
    assert ["refused", "tcp://h:1"] == found


@pytest.mark.anyio
async def test_restart_by_cluster_ends_attempt_of_dependent_worker():
    """Whatever its role: a proxy whose address changes takes everybody with it who was told the former one."""
    async with ActorSystem.open() as system:
        directory = await system.spawn(DirectoryActor())
        spec = evolve(SPEC, is_replaced_alone=False, lease_seconds=600)
        await directory.ask(ExpectWorker(worker=NAME, incarnation=1000, spec=spec))
        await directory.ask(ReportReady(worker=NAME, incarnation=1000, report=REPORT))
        with pytest.raises(Conflict, match="cannot be replaced alone"):
            await directory.ask(FetchRoleSpec(worker=NAME, incarnation=1001))
        reason = await directory.ask(AwaitLapse(worker=NAME, incarnation=1000))

    assert "started it again" in reason


@pytest.mark.anyio
@pytest.mark.parametrize("ended", ["dismissed", "expected"])
async def test_directory_forgets_proxy_of_ended_incarnation(ended: str):
    """A later attempt waits for its own proxy, however long that takes to start."""
    found = []
    later = Report(address="unix:/b", endpoint=Endpoint(url="http://h:2", admin_key="k"))
    async with ActorSystem.open() as system, anyio.create_task_group() as tasks:
        directory = await system.spawn(DirectoryActor())

        async def look():
            found.append(await directory.ask(AwaitEndpoint()))

        await directory.ask(ExpectWorker(worker=NAME, incarnation=1, spec=SPEC))
        await directory.ask(ReportReady(worker=NAME, incarnation=1, report=REPORT))
        if ended == "dismissed":
            await directory.ask(DismissWorker(worker=NAME, incarnation=1))
        await directory.ask(ExpectWorker(worker=NAME, incarnation=2, spec=SPEC))
        tasks.start_soon(look)
        await anyio.wait_all_tasks_blocked()
        before = list(found)
        await directory.ask(ReportReady(worker=NAME, incarnation=2, report=later))

    assert [] == before
    assert [later.endpoint] == found
