"""The other ranks of a training gang: child processes of the first one, or tasks of one job of a cluster.

Each is started as ``areal_actors.worker``, makes the same policy from the same files, and offers its actor: a child
over a unix socket, and ends with us (``open_ranks``); a task, which the cluster has started with us on whichever node,
where we have said at home that we listen (``expect_ranks``). What a rank does is ``rank_worker``.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio
from anyio import to_thread
from anyio.streams.buffered import BufferedByteReceiveStream
from attrs import field, frozen

from areal_actors.actors.gang import GangMembers
from areal_actors.core import Ref
from areal_actors.core.children import BoundedLog, Child
from areal_actors.core.remote import Listener, Peer, listen
from areal_actors.core.remote.addresses import parse_address
from areal_actors.errors import ActorError, GangError
from areal_actors.messages import Directory, Ranks, ReportGang
from areal_actors.run.job import Job
from areal_actors.schedulers.bootstrap import Bootstrap

__all__ = ["RankOpener", "expect_ranks", "open_ranks"]

RankOpener = Callable[[Job], AbstractAsyncContextManager[GangMembers]]
"""Has ``trainer.gang.num_processes - 1`` ranks for the length of a block."""

_START_SECONDS = 300.0
_MAX_LINE = 64 * 1024


@frozen(kw_only=True)
class _Order:
    """What a rank is told on its standard input."""

    address: str
    secret: bytes = field(repr=False)
    job: Job

    def to_line(self, name: str) -> bytes:
        told = {
            "role": "rank",
            "name": name,
            "address": self.address,
            "secret": self.secret.hex(),
            "config": str(self.job.directory.config),
            "checkpoints": str(self.job.directory.checkpoints),
            "is_resumed": self.job.counters is not None,
        }
        return json.dumps(told).encode() + b"\n"


@asynccontextmanager
async def open_ranks(job: Job) -> AsyncIterator[GangMembers]:
    """Start the ranks on this machine, side by side, and wait until each has its policy.

    What they say is in ``logs`` of the run's directory. Raises ``GangError`` if one does not come up.
    """
    num_more = job.config.trainer.gang.num_processes - 1
    if num_more == 0:
        yield GangMembers()
        return
    secret = secrets.token_bytes(32)
    async with AsyncExitStack() as stack:
        # A path of its own: that of a run may be longer than the name of a socket can be.
        directory = stack.enter_context(TemporaryDirectory(prefix="areal-"))
        address = f"unix:{directory}/ranks.sock"
        listener = await stack.enter_async_context(listen(address, secret=secret))
        tasks = await stack.enter_async_context(anyio.create_task_group())
        order = _Order(address=address, secret=secret, job=job)
        names = [f"rank-{number}" for number in range(1, num_more + 1)]
        children = [await stack.enter_async_context(_child(job, name)) for name in names]
        for child in children:
            tasks.start_soon(child.listen)
        async with anyio.create_task_group() as starting:
            for name, child in zip(names, children, strict=True):
                starting.start_soon(_start, child, order, name)
        yield await _members(job, listener, names, children)
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def expect_ranks(
    job: Job, *, bootstrap: Bootstrap, listener: Listener, directory: Ref[Directory]
) -> AsyncIterator[GangMembers]:
    """Have the tasks that a cluster has started with us join us at ``listener``, and wait until each has its policy.

    They leave when we do. What all of us say is in the log of the job. Raises ``GangError`` if one does not come.
    """
    names = [bootstrap.name_of(rank) for rank in range(1, job.config.trainer.gang.num_processes)]
    await directory.ask(ReportGang(worker=bootstrap.name, life=bootstrap.life, address=listener.address))
    seconds = job.config.scheduler.start_seconds
    refs: list[Ref[Ranks]] = []
    awaited = ""
    try:
        with anyio.fail_after(seconds):
            for awaited in names:
                peer = await listener.wait_for(awaited)
                refs.append(await _ref(peer))
    except (TimeoutError, ActorError) as error:
        raise GangError(
            f"{awaited} of the training gang did not join within {seconds:g} s (scheduler.start_seconds). "
            f"Lines of the log that begin with '{len(refs) + 1}:' may say why."
        ) from error
    _, host, _ = parse_address(listener.address)
    log = job.directory.logs / "workers" / f"{bootstrap.name}.log"
    yield GangMembers(
        ranks=tuple(refs),
        host=host,
        whereabouts=tuple(_describe_task(rank, log) for rank in range(1, len(refs) + 1)),
    )


def _describe_task(rank: int, log: Path) -> str:
    job, nodes = os.environ.get("SLURM_JOB_ID", "?"), os.environ.get("SLURM_STEP_NODELIST", "?")
    return f"task {rank} of job {job} on {nodes}, whose words begin with '{rank}:' in {log}"


@asynccontextmanager
async def _child(job: Job, name: str) -> AsyncIterator[Child]:
    log = await to_thread.run_sync(BoundedLog, job.directory.path / "logs" / f"{name}.log")
    child = await Child.start(lambda _: [sys.executable, "-m", "areal_actors.worker"], log=log)
    try:
        yield child
    finally:
        await child.kill()


async def _start(child: Child, order: _Order, name: str) -> None:
    """Until the rank says that it serves."""
    assert child.process.stdin is not None
    assert child.process.stdout is not None
    try:
        await child.process.stdin.send(order.to_line(name))
        with anyio.fail_after(_START_SECONDS):
            await BufferedByteReceiveStream(child.process.stdout).receive_until(b"\n", _MAX_LINE)
    except (OSError, TimeoutError, anyio.BrokenResourceError, anyio.IncompleteRead, anyio.EndOfStream) as error:
        await child.kill()
        raise GangError(f"{name} of the training gang did not come up. {child.describe_end()}") from error


async def _members(job: Job, listener: Listener, names: list[str], children: list[Child]) -> GangMembers:
    refs = [await _ref(await listener.wait_for(name)) for name in names]
    logs = job.directory.path / "logs"
    return GangMembers(
        ranks=tuple(refs),
        whereabouts=tuple(
            f"process {child.process.pid}, which says more in {logs / name}.log"
            for name, child in zip(names, children, strict=True)
        ),
    )


async def _ref(peer: Peer) -> Ref[Ranks]:
    """What a node exposes is told right after it has connected."""
    with anyio.fail_after(_START_SECONDS):
        await peer.wait_exposed("rank")
    return peer.ref(Ranks, "rank")
