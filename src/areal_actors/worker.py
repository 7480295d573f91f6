"""The entry point of worker processes, each of which runs one part of a run: ``python -m areal_actors.worker``.

::

    bootstrap ──▶ connect to controller ──▶ FetchRoleSpec ──▶ open the role ──▶ ReportReady ──▶ KeepLease, repeatedly

A worker reads its name and the controller's address from its standard input or from a file (``schedulers.bootstrap``),
and requests its role from the controller. ``run.openers`` opens the role; ``run.supervise`` starts and watches workers.
A worker exits when it is told to, when its standard input ends (its parent is gone), when a later incarnation has
replaced it, or when the controller was unreachable for longer than the lease. If a cluster has started several
processes as one worker, the first is the worker and the others are ranks of its gang (``run.ranks``).
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar
from urllib.parse import urlsplit

import anyio
from anyio import to_thread

from areal_actors.config import load_config
from areal_actors.domain import Role
from areal_actors.errors import ActorError, Conflict, NotFound
from areal_actors.kernel import Ref
from areal_actors.kernel.failure import error_to_data, root_cause
from areal_actors.kernel.remote import ReconnectingConnection, listen, reconnecting
from areal_actors.kernel.remote.sockets import own_address
from areal_actors.lib import loops
from areal_actors.lib.process_limits import raise_open_files_limit, relax_gc, tuned_gc
from areal_actors.lib.task_groups import leaves
from areal_actors.lib.telemetry import get_logger, logging_to_stream
from areal_actors.lib.tracing import open_tracing
from areal_actors.messages import (
    AwaitTraining,
    Directory,
    FetchRoleSpec,
    KeepLease,
    Report,
    ReportFailure,
    ReportReady,
    RequestStop,
    RoleSpec,
    Training,
)
from areal_actors.run.signals import until_orphaned, until_signalled
from areal_actors.schedulers.base import CONTROLLER_LOST, RUN_AGAIN
from areal_actors.schedulers.bootstrap import BOOTSTRAP_VARIABLE, Bootstrap, read_bootstrap

if TYPE_CHECKING:
    from areal_actors.run.plan import Finder

_log = get_logger(__name__)

P = TypeVar("P")

_EXIT_FAILED = 1
_SIGNS_PER_LEASE = 4
_REPORT_SECONDS = 2.0
_MAX_END_SECONDS = 300
"""How long a role may take to end after the controller was lost; a step of the trainer ends in this time."""


class _Preempted(Exception):
    """The worker has saved its state and exits, to be started again."""


class _ControllerLost(Exception):
    """The controller was unreachable for too long."""


def main() -> NoReturn:
    """Run the worker and exit with its status."""
    raise_open_files_limit()
    relax_gc()
    # Until the worker listens for it: the default action of the signal would end a worker that is still starting. Not
    # by blocking it, which would hold for this thread only, and a numeric library has started others.
    signal.signal(signal.SIGUSR1, lambda number, _: _early_warnings.append(number))
    with logging_to_stream(), open_tracing():
        line = "" if BOOTSTRAP_VARIABLE in os.environ else sys.stdin.readline()
        rank = None
        with suppress(ValueError):
            rank = json.loads(line)
        # The first rank of a gang starts the others with a spec; all other processes read a bootstrap message.
        if isinstance(rank, dict) and rank.get("role") == "rank":
            from areal_actors.run.ranks import serve_rank

            loops.run(serve_rank, rank)
            sys.exit(0)
        bootstrap = read_bootstrap(line)
        sys.exit(loops.run(_run, bootstrap))


_early_warnings: list[int] = []


async def _run(bootstrap: Bootstrap) -> int:
    """Run the worker to its end and return the exit code."""
    async with anyio.create_task_group() as tasks:
        # Only then is standard input a pipe from the parent.
        if BOOTSTRAP_VARIABLE not in os.environ:
            tasks.start_soon(until_orphaned, tasks.cancel_scope)
        if bootstrap.rank == 0:
            tasks.start_soon(until_signalled, tasks.cancel_scope)
        else:
            # The first process handles the warning; by default it would end this one.
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        code = await _work(bootstrap)
        tasks.cancel_scope.cancel()
        return code
    # The scope was cancelled: the parent is gone, or a signal arrived.
    return 0


async def _work(bootstrap: Bootstrap) -> int:
    async def locate() -> str:
        return bootstrap.address

    async with reconnecting(
        locate, secret=bootstrap.secret, node=bootstrap.node, incarnation=max(bootstrap.life, 1)
    ) as controller:
        try:
            if bootstrap.rank:
                from areal_actors.run.ranks import serve_task

                await serve_task(bootstrap, controller)
            else:
                await _serve(bootstrap, controller)
        except Exception as error:  # noqa: BLE001 - logged, and reported to the controller
            return await _explain(bootstrap, controller, error)
        if bootstrap.rank and not controller.is_connected:
            # This is the likely reason why the first process of the gang is gone.
            return CONTROLLER_LOST
    return 0


async def _explain(bootstrap: Bootstrap, controller: ReconnectingConnection, error: Exception) -> int:
    """Report to the controller why the worker ends, and return the exit code."""
    if any(isinstance(leaf, _Preempted) for leaf in leaves(error)):
        return RUN_AGAIN
    lost = next((leaf for leaf in leaves(error) if isinstance(leaf, _ControllerLost)), None)
    if lost is not None:
        _log.warning("controller_lost", worker=bootstrap.node, reason=str(lost))
        return CONTROLLER_LOST
    _log.error("worker_failed", worker=bootstrap.node, exc_info=error)
    words: dict[str, Any] = error_to_data(root_cause(error), bootstrap.name)
    message = ReportFailure(worker=bootstrap.name, incarnation=bootstrap.life, error=words)
    with anyio.move_on_after(_REPORT_SECONDS):
        try:
            await controller.ref(Directory, "directory").ask(message)
        except (ActorError, Conflict, NotFound):
            _log.warning("error_not_reported", worker=bootstrap.name)
    return _EXIT_FAILED


async def _serve(bootstrap: Bootstrap, controller: ReconnectingConnection) -> None:
    # A cluster may warn that it will reclaim the node while models are loaded, which takes minutes.
    with anyio.open_signal_receiver(signal.SIGUSR1) as warnings:
        if _early_warnings:
            signal.raise_signal(signal.SIGUSR1)
        await _serve_until_warned(bootstrap, controller, warnings)


async def _serve_until_warned(
    bootstrap: Bootstrap, controller: ReconnectingConnection, warnings: AsyncIterator[signal.Signals]
) -> None:
    """Open the role and serve. After a warning, a trainer saves its state and raises ``_Preempted``."""
    from areal_actors.run.job import load_rendering
    from areal_actors.run.openers import RoleContext, import_role, open_role
    from areal_actors.run.plan import PREEMPTED
    from areal_actors.run.ranks import SPEC_SECONDS, expect_ranks, open_ranks

    directory = controller.ref(Directory, "directory")
    wanted = FetchRoleSpec(worker=bootstrap.name, incarnation=bootstrap.life)
    # Bounded, since the worker has no lease yet: without the controller it would hold its node until the cluster's
    # limit.
    spec = await directory.ask(wanted, timeout=SPEC_SECONDS)
    config = await to_thread.run_sync(load_config, spec.config)
    async with AsyncExitStack() as stack:
        tasks = await stack.enter_async_context(anyio.create_task_group())
        # Renewed from the start, since opening a role (loading a model) may take longer than the lease.
        tasks.start_soon(_keep_lease, bootstrap, directory, spec.lease_seconds, spec.hang_seconds)
        find = await stack.enter_async_context(_open_finder(bootstrap, spec, controller))
        address = spec.listen
        if address is None:
            # The interface that connections to the controller leave from, which other workers can reach, too.
            host = own_address(urlsplit(bootstrap.address).hostname or "")
            address = f"tcp://[{host}]:0" if ":" in host else f"tcp://{host}:0"
        listening = listen(
            address, secret=bootstrap.secret, expose={}, node=bootstrap.name, incarnation=max(bootstrap.life, 1)
        )
        listener = await stack.enter_async_context(listening)
        ranks = partial(expect_ranks, bootstrap=bootstrap, listener=listener, directory=directory)
        # Not on the event loop, which renews the lease: a busy node or a slow filesystem takes longer than it.
        await to_thread.run_sync(import_role, spec.role, config)
        context = RoleContext(
            name=bootstrap.name,
            config=config,
            spec=spec,
            renderer=await to_thread.run_sync(load_rendering, config),
            find=find,
            open_ranks=open_ranks if bootstrap.num_tasks == 1 else ranks,
        )
        opened = await stack.enter_async_context(open_role(context))
        # After everything is loaded, so that models and libraries are frozen, too.
        stack.enter_context(tuned_gc())
        # Exposed before the report: others connect as soon as the controller knows that the worker is ready.
        for name, ref in opened.actors.items():
            listener.expose(name, ref)
        report = Report(address=listener.address, endpoint=opened.endpoint)
        await directory.ask(ReportReady(worker=bootstrap.name, incarnation=bootstrap.life, report=report))
        _log.info("worker_serves", worker=bootstrap.name, incarnation=bootstrap.life, address=listener.address)
        training: Ref[Training] | None = opened.actors.get("trainer")
        async for _ in warnings:
            # Other roles have nothing to save, and continue until they are ended.
            if training is not None:
                await training.tell(RequestStop(reason=PREEMPTED))
                await training.ask(AwaitTraining())
                raise _Preempted


@asynccontextmanager
async def _open_finder(
    bootstrap: Bootstrap, spec: RoleSpec, controller: ReconnectingConnection
) -> AsyncIterator[Finder]:
    """Connect to the workers that the role depends on, and yield a finder of actors there and in the controller."""
    from areal_actors.run.control_plane import connect_to_worker
    from areal_actors.run.plan import ACTOR_ROLES, DEPENDENCIES

    directory = controller.ref(Directory, "directory")
    connections: dict[Role, ReconnectingConnection] = {}

    async def find(protocol: type[P], name: str, /) -> Ref[P]:
        role = ACTOR_ROLES[name]
        is_local = role is None or role in spec.local_roles
        return (controller if is_local or role is None else connections[role]).ref(protocol, name)

    async with AsyncExitStack() as stack:
        for role in DEPENDENCIES[spec.role]:
            if role not in spec.local_roles:
                connecting = connect_to_worker(
                    directory,
                    f"{role}-0",
                    secret=bootstrap.secret,
                    node=bootstrap.name,
                    incarnation=max(bootstrap.life, 1),
                )
                connections[role] = await stack.enter_async_context(connecting)
        yield find


async def _keep_lease(
    bootstrap: Bootstrap, directory: Ref[Directory], seconds: float, hang_seconds: float | None = None
) -> None:
    """Renew the lease until cancelled, often enough that the controller notices a process that hangs.

    Raises ``Conflict`` or ``NotFound`` if the controller refuses, and ``_ControllerLost`` if it has not answered for a
    whole lease: it may have replaced this worker by then.
    """
    sign = KeepLease(worker=bootstrap.name, incarnation=bootstrap.life)
    pause = min(seconds, hang_seconds or seconds) / _SIGNS_PER_LEASE
    while True:
        is_heard = False
        with anyio.move_on_after(seconds):
            while not is_heard:
                try:
                    await directory.ask(sign)
                    is_heard = True
                except (Conflict, NotFound):
                    raise
                except ActorError:
                    # Retry until the lease ends: the connection may be restored before that.
                    await anyio.sleep(seconds / 20)
        if not is_heard:
            # A role that hangs must not keep the resources of a run that has no controller any more.
            signal.alarm(_MAX_END_SECONDS)
            raise _ControllerLost(f"the controller has not answered for longer than the lease of {seconds:g} s")
        await anyio.sleep(pause)


if __name__ == "__main__":
    main()
