"""The other ranks of a training gang: child processes of the first rank, or tasks of the same cluster job.

Each is started as ``areal_actors.worker``, creates the same policy from the same files, and exposes its actor. A child
connects over a unix socket and ends with the first rank (``open_ranks``). A task, which the cluster has started
together with the first rank on any node, connects to the address that the first rank has reported to the controller
(``expect_ranks``).

The second part of this module runs in the process of a rank. A child reads all settings from its standard input. A task
has the same bootstrap message as its worker, and asks the controller for the worker's spec and for the address at which
to join. Both exit when the first rank is gone.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
from anyio import to_thread

from areal_actors.config import load_config
from areal_actors.dashboard import RunDirectory
from areal_actors.errors import ActorError, GangError, Unreachable
from areal_actors.kernel import ActorSystem, Ref
from areal_actors.kernel.remote import Listener, Peer, ReconnectingConnection, connect, listen
from areal_actors.kernel.remote.sockets import parse_address
from areal_actors.lib import loops
from areal_actors.lib.child_process import BoundedLog, Child
from areal_actors.lib.process_limits import tuned_gc
from areal_actors.lib.scratch import scratch_directory
from areal_actors.lib.task_groups import open_tasks
from areal_actors.messages import AwaitGang, Directory, FetchRoleSpec, GangMembers, Ranks, ReportGang
from areal_actors.models import resolve_model
from areal_actors.run.job import Job, create_policy
from areal_actors.run.signals import until_orphaned, until_signalled
from areal_actors.schedulers.bootstrap import Bootstrap

if TYPE_CHECKING:
    from areal_actors.config import RunConfig
    from areal_actors.training.trainer import PolicyTrainer

RankOpener = Callable[[Job], AbstractAsyncContextManager[GangMembers]]
"""A function that has ``trainer.gang.num_processes - 1`` ranks running while the block lasts."""

SPEC_SECONDS = 60.0
"""How long a process waits for its spec from the controller. Until it has one, it has no lease that would end it."""

_COMMAND = (sys.executable, "-m", "areal_actors.worker")
_START_SECONDS = 300.0
_AGAIN_SECONDS = 0.1

Leaving = Callable[[anyio.CancelScope], Coroutine[Any, Any, None]]
"""A function that cancels the scope when the rank has to exit."""


@asynccontextmanager
async def open_ranks(job: Job, *, command: Sequence[str] = _COMMAND) -> AsyncIterator[GangMembers]:
    """Start the ranks on this machine, in parallel, and wait until each has its policy.

    Their output is in ``logs`` of the run's directory. Raises ``GangError`` if one does not come up, or exits before
    the last one is ready.
    """
    num_more = job.config.trainer.gang.num_processes - 1
    if num_more == 0:
        yield GangMembers()
        return
    secret = secrets.token_bytes(32)
    async with AsyncExitStack() as stack:
        # A temporary path, since the run's may exceed the length limit of socket names (about 100 bytes).
        directory = stack.enter_context(scratch_directory())
        address = f"unix:{directory}/ranks.sock"
        listener = await stack.enter_async_context(listen(address, secret=secret))
        tasks = await stack.enter_async_context(open_tasks())
        # Reading stops even if a grandchild keeps a pipe open.
        stack.callback(tasks.cancel_scope.cancel)
        spec = {
            "role": "rank",
            "address": address,
            "secret": secret.hex(),
            "config": str(job.directory.config),
            "checkpoints": str(job.directory.checkpoints),
            "step": None if job.counters is None else job.policy.version,
        }
        names = [f"rank-{number}" for number in range(1, num_more + 1)]
        children: dict[str, Child] = {}
        for name in names:
            log = await to_thread.run_sync(BoundedLog, job.directory.path / "logs" / f"{name}.log")
            environment = os.environ | loops.child_variables()
            child = children[name] = await Child.start(lambda _: [*command], log=log, environment=environment)
            stack.push_async_callback(child.kill)
            # Read both outputs from the start: a rank whose pipe is full stops in the middle of training.
            tasks.start_soon(child.listen)
            # All ranks wait for one that is stopped, in a collective operation without a deadline.
            tasks.start_soon(child.kill_when_stopped)
            tasks.start_soon(child.drain)
        yield await _await_children(listener, spec, children, logs=job.directory.path / "logs")


@asynccontextmanager
async def expect_ranks(
    job: Job, *, bootstrap: Bootstrap, listener: Listener, directory: Ref[Directory]
) -> AsyncIterator[GangMembers]:
    """Accept the tasks that a cluster has started with this one, at ``listener``, and wait until each has its policy.

    They exit when this process does. The output of all is in the log of the job. Raises ``GangError`` if one does not
    join.
    """
    names = [bootstrap.name_of(rank) for rank in range(1, job.config.trainer.gang.num_processes)]
    await directory.ask(ReportGang(worker=bootstrap.name, incarnation=bootstrap.life, address=listener.address))
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
    number, nodes = os.environ.get("SLURM_JOB_ID", "?"), os.environ.get("SLURM_STEP_NODELIST", "?")
    yield GangMembers(
        ranks=tuple(refs),
        host=host,
        whereabouts=tuple(
            f"task {rank} of job {number} on {nodes}, whose words begin with '{rank}:' in {log}"
            for rank in range(1, len(refs) + 1)
        ),
    )


async def _await_children(
    listener: Listener, spec: Mapping[str, object], children: Mapping[str, Child], *, logs: Path
) -> GangMembers:
    """Return the ranks once all have joined. Raises ``GangError`` if one exits before that."""
    refs: dict[str, Ref[Ranks]] = {}
    failed: list[str] = []
    async with anyio.create_task_group() as starting:
        for name, child in children.items():
            starting.start_soon(_start, child, spec, name, failed, starting.cancel_scope)
        with anyio.move_on_after(_START_SECONDS):
            for name in children:
                while name not in refs:
                    # Another connection is accepted if one is lost before it exposes its actor.
                    with suppress(Unreachable):
                        refs[name] = await _ref(await listener.wait_for(name))
                        break
                    await anyio.sleep(_AGAIN_SECONDS)
        starting.cancel_scope.cancel()
    failed += [name for name in children if name not in refs]
    if failed:
        # A rank that failed to join may still be running; its end can be described only once it has exited.
        child = children[failed[0]]
        await child.kill()
        raise GangError(f"{failed[0]} of the training gang did not come up. {child.describe_end()}")
    whereabouts = [
        f"process {child.process.pid}, which says more in {logs / name}.log" for name, child in children.items()
    ]
    return GangMembers(ranks=tuple(refs.values()), whereabouts=tuple(whereabouts))


async def _start(
    child: Child, spec: Mapping[str, object], name: str, failed: list[str], scope: anyio.CancelScope
) -> None:
    """Send the rank its spec, and cancel ``scope`` if it exits: it would be awaited forever otherwise."""
    assert child.process.stdin is not None
    # A rank that has exited is noticed below.
    with suppress(OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
        await child.process.stdin.send(json.dumps({**spec, "name": name}).encode() + b"\n")
    await child.wait_for_leader()
    failed.append(name)
    scope.cancel()


async def _ref(peer: Peer) -> Ref[Ranks]:
    """Wait until the peer exposes its actor, which it does right after connecting."""
    await peer.wait_exposed("rank")
    return peer.ref(Ranks, "rank")


# -------------------------------------------------------------------------------------- the process of a rank


async def serve_rank(spec: Mapping[str, Any]) -> None:
    """Run a rank that the first rank has started as a child, until the first rank is gone."""
    config = await to_thread.run_sync(load_config, Path(spec["config"]))
    policy = await to_thread.run_sync(_load_policy, config, Path(spec["checkpoints"]), spec["step"])
    secret = bytes.fromhex(spec["secret"])
    await _follow(policy, spec["address"], until_orphaned, until_signalled, secret=secret, node=spec["name"])


async def serve_task(bootstrap: Bootstrap, controller: ReconnectingConnection) -> None:
    """Run a rank that a cluster has started together with its worker, until the worker is gone.

    Raises:
        Conflict: a later incarnation of the worker has started.
        GangError: the worker has not reported in time where to join it.
    """
    directory = controller.ref(Directory, "directory")
    asked = FetchRoleSpec(worker=bootstrap.name, incarnation=bootstrap.life, rank=bootstrap.rank)
    spec = await directory.ask(asked, timeout=SPEC_SECONDS)
    config = await to_thread.run_sync(load_config, spec.config)
    checkpoints = RunDirectory(path=spec.directory).checkpoints
    policy = await to_thread.run_sync(_load_policy, config, checkpoints, spec.checkpoint)
    # Asked last: the worker reports its address only after it has published the first weights.
    seconds = config.scheduler.start_seconds
    try:
        with anyio.fail_after(seconds):
            address = await directory.ask(AwaitGang(worker=bootstrap.name, incarnation=bootstrap.life))
    except TimeoutError:
        raise GangError(
            f"{bootstrap.name} has not said within {seconds:g} s (scheduler.start_seconds) where rank {bootstrap.rank} "
            "is to join it."
        ) from None
    # The cluster signals all tasks. Only the worker reacts: it may need this rank to save a checkpoint.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    await _follow(policy, address, secret=bootstrap.secret, node=bootstrap.node)


def _load_policy(config: RunConfig, checkpoints: Path, step: int | None) -> PolicyTrainer:
    policy = create_policy(config, resolve_model(config.model), is_first=False)
    if step is not None:
        policy.restore(checkpoints, step=step)
    return policy


async def _follow(policy: PolicyTrainer, address: str, *leaving: Leaving, secret: bytes, node: str) -> None:
    """Expose the policy to the first rank, which listens at ``address``.

    Returns when the first rank is gone, this rank has failed, or one of ``leaving`` cancels.
    """
    from areal_actors.training.gang_actors import (
        RankActor,  # torch takes seconds to import, and other workers do not need it
    )

    actor = RankActor(policy)

    async def until_failed(scope: anyio.CancelScope) -> None:
        await actor.failed.wait()
        scope.cancel()

    async with ActorSystem.open() as system:
        rank = await system.spawn(actor, name="rank")
        async with connect(address, secret=secret, node=node, expose={"rank": rank}) as peer:
            with tuned_gc():
                async with anyio.create_task_group() as tasks:
                    for one in (*leaving, until_failed):
                        tasks.start_soon(one, tasks.cancel_scope)
                    await peer.wait_closed()
                    tasks.cancel_scope.cancel()
