"""Engines whose workers come back at another address, in the same place of their scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.abc import TaskStatus
from tests.stacks.replica_stack import CountingEngine, ids_of, request

from areal_actors.domain import Role
from areal_actors.generation.replicas import ReplicaSetConfig
from areal_actors.kernel import ActorSystem, Ref
from areal_actors.kernel.remote import listen
from areal_actors.messages import ExpectWorker, FetchRoleSpec, Generate, Generation, Report, ReportReady, RoleSpec
from areal_actors.run.control_plane import DirectoryActor, connect_to_worker
from areal_actors.run.controller import ReadyReplicas
from areal_actors.run.inference import spawn_generation
from areal_actors.run.plan import REPLICA

SECRET = b"a secret of the test, long enough"
NAME = "generation-0"
SPEC = RoleSpec(
    role=Role.GENERATION,
    config=Path("c.yaml"),
    directory=Path("run"),
    lease_seconds=30.0,
    is_replaced_alone=True,
)


@pytest.mark.anyio
async def test_engine_serves_again_when_its_worker_listens_elsewhere():
    """A job that the cluster requeues has another port, and is the same worker."""
    replicas, sampled, addresses = ReadyReplicas(), [], []
    near: Ref[Any]
    with anyio.fail_after(30):
        async with (
            ActorSystem.open() as system,
            replicas.routed(system, ReplicaSetConfig(), version=0) as near,
            anyio.create_task_group() as tasks,
        ):
            directory = await system.spawn(DirectoryActor(), name="directory")
            await directory.ask(ExpectWorker(worker=NAME, incarnation=1000, spec=SPEC))

            async def serve(incarnation: int, ends: anyio.Event, *, task_status: TaskStatus[None]) -> None:
                """One life of the worker."""
                ref = await spawn_generation(system, CountingEngine(), name=f"engine-{incarnation}")
                options = {"secret": SECRET, "expose": {REPLICA: ref}, "node": NAME, "incarnation": incarnation}
                async with listen("tcp://127.0.0.1:0", **options) as listener:
                    addresses.append(listener.address)
                    await directory.ask(FetchRoleSpec(worker=NAME, incarnation=incarnation))
                    report = Report(address=listener.address)
                    await directory.ask(ReportReady(worker=NAME, incarnation=incarnation, report=report))
                    task_status.started()
                    await ends.wait()

            ends = anyio.Event()
            await tasks.start(serve, 1000, ends)
            async with (
                connect_to_worker(directory, NAME, secret=SECRET, node="near") as connection,
                replicas.add(NAME, connection.ref(Generation, REPLICA)),
            ):

                async def generate() -> None:
                    async with near.stream(Generate(request=request())) as chunks:
                        sampled.append(ids_of([chunk async for chunk in chunks]))

                await generate()
                ends.set()
                await tasks.start(serve, 1001, anyio.Event())
                await generate()
            tasks.cancel_scope.cancel()

    assert addresses[0] != addresses[1]
    assert sampled[0] == sampled[1]
    assert 8 == len(sampled[0])
