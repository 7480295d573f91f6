"""The control plane of a run: what exists from before the first worker until after the last one.

It is the controller's listener, the directory of workers, the scheduler with the supervisor of workers, and the socket
at which agents reach all proxies. ``controller`` runs the attempts of a run on top of it.
"""

from __future__ import annotations

import math
import secrets
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
from attrs import define, evolve, field, frozen

from areal_actors.domain import Role
from areal_actors.errors import ConfigError, Conflict, NotFound
from areal_actors.kernel import Actor, ActorSystem, Ref
from areal_actors.kernel.remote import Listener, ReconnectingConnection, listen, reconnecting
from areal_actors.kernel.remote.sockets import is_loopback
from areal_actors.lib.change_signal import ChangeSignal
from areal_actors.lib.scratch import scratch_directory
from areal_actors.messages import (
    AwaitEndpoint,
    AwaitGang,
    AwaitLapse,
    AwaitProxies,
    AwaitReady,
    AwaitWeights,
    CountLostProxies,
    Directory,
    DismissWorker,
    Endpoint,
    EndpointChanged,
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
from areal_actors.proxy.access import create_admin_key
from areal_actors.proxy.server import bind, url_of
from areal_actors.run.forwarding import forwarding
from areal_actors.run.plan import RunPlan
from areal_actors.run.supervise import WorkerSupervisor, worker_spec
from areal_actors.schedulers.base import ControllerAddress, Scheduler
from areal_actors.schedulers.config import (
    SchedulerConfig,
    SchedulerType,
    open_scheduler,
)


@frozen(kw_only=True)
class ControlPlane:
    """The resources that exist from before the first worker until after the last one.

    ``sockets`` is the directory of unix sockets, or ``None`` if the controller listens on TCP. ``endpoint`` is set if
    proxies are in workers: agents know a socket of the controller, which forwards their requests. A proxy may thus be
    replaced while agents run.
    """

    supervisor: WorkerSupervisor
    directory: Ref[Directory]
    listener: Listener
    secret: bytes = field(repr=False)
    sockets: Path | None
    endpoint: Endpoint | None

    def worker_address(self, name: str) -> str | None:
        """Return the address that the worker ``name`` listens at, or ``None`` if it chooses one itself."""
        return None if self.sockets is None else f"unix:{self.sockets}/{name}.sock"


@asynccontextmanager
async def open_control_plane(plan: RunPlan) -> AsyncIterator[ControlPlane]:
    """Listen, and prepare to start workers for the placed roles of ``plan``. Everything is closed on exit.

    Raises:
        ConfigError: the workers could not reach the controller's address.
        SchedulerError: there are not enough resources for the roles.
    """
    scheduling, placed, secret = plan.config.scheduler, plan.placed, secrets.token_bytes(32)
    if not placed:
        scheduling = evolve(scheduling, type=SchedulerType.LOCAL, address=None)
    async with AsyncExitStack() as stack:
        # A temporary path, since the run's may exceed the length limit of socket names (about 100 bytes).
        sockets = stack.enter_context(scratch_directory())
        system = await stack.enter_async_context(ActorSystem.open(name="controller"))
        workers = await system.spawn(DirectoryActor(), name="directory")
        address = controller_address(scheduling, sockets)
        listening = listen(address, secret=secret, expose={"directory": workers}, node="controller")
        listener = await stack.enter_async_context(listening)
        controller = ControllerAddress(address=listener.address, secret=secret)
        scheduler = await stack.enter_async_context(_open_scheduler(scheduling, plan, controller))
        is_local = listener.address.startswith("unix:")
        endpoint = None
        if Role.PROXY in placed:
            proxy = plan.proxy
            key = proxy.admin_key or create_admin_key()
            shared = stack.enter_context(bind(evolve(proxy, admin_key=key)))
            url = url_of(shared, proxy.public_host or _public_host(shared, listener.address))
            endpoint = Endpoint(url=url, admin_key=key)
            await workers.ask(EndpointChanged(endpoint=endpoint, is_forwarded=True))
            await stack.enter_async_context(forwarding(shared, workers, proxy))
        yield ControlPlane(
            supervisor=WorkerSupervisor(scheduler, workers, controller, scheduling, roles=placed),
            directory=workers,
            listener=listener,
            secret=secret,
            sockets=sockets if is_local else None,
            endpoint=endpoint,
        )


def _public_host(shared: socket.socket, address: str) -> str | None:
    """Return the host by which workers reach the controller, if ``shared`` listens on all interfaces."""
    is_wildcard = shared.getsockname()[0] in ("0.0.0.0", "::")  # noqa: S104 - compared, not bound
    return urlsplit(address).hostname if is_wildcard and address.startswith("tcp:") else None


def connect_to_worker(
    directory: Ref[Directory],
    worker: str,
    *,
    secret: bytes,
    node: str,
    incarnation: int = 1,
) -> AbstractAsyncContextManager[ReconnectingConnection]:
    """Connect to the worker of this name, wherever its current incarnation listens; ``directory`` knows the address."""

    async def locate() -> str:
        return (await directory.ask(AwaitReady(worker=worker))).address

    return reconnecting(locate, secret=secret, target=worker, node=node, incarnation=incarnation)


def controller_address(config: SchedulerConfig, sockets: Path) -> str:
    """Return the controller's address; unix sockets are created in ``sockets``.

    Raises ``ConfigError`` if other machines cannot reach it: this host's name resolves to loopback only.
    """
    if config.address is not None:
        return config.address
    if config.type is SchedulerType.LOCAL:
        return f"unix:{sockets}/controller.sock"
    try:
        host = socket.gethostbyname(socket.gethostname())
    except OSError:
        host = "127.0.0.1"
    if is_loopback(host):
        raise ConfigError(
            "scheduler.address: this host knows itself by no address that other machines reach; name one of its "
            "interfaces, as tcp://10.0.0.7:0"
        )
    return f"tcp://{host}:0"


@asynccontextmanager
async def _open_scheduler(
    config: SchedulerConfig, plan: RunPlan, controller: ControllerAddress
) -> AsyncIterator[Scheduler]:
    wanted = [
        worker_spec(f"{role}-{index}", one.config, controller=controller, num_tasks=one.num_tasks)
        for role, one in plan.placed.items()
        for index in range(one.config.replicas)
    ]
    logs = plan.directory.logs / "workers"
    async with open_scheduler(config, directory=plan.directory.path, logs=logs) as scheduler:
        if wanted:
            # All roles have to fit at the same time, since each waits for the others.
            scheduler.check(f"The roles {', '.join(plan.placed)} of the run", *wanted)
        yield scheduler


# ------------------------------------------------------------------------------------------- the directory of workers


_MANY = 4096
_PATIENCE = 1.25
"""The controller waits this many leases before it gives up on a worker, which has exited by then."""
_CHECKS = 20
"""How often the silence of a worker is checked before it is given up."""


@define(kw_only=True)
class _Entry:
    """The state of a worker's current incarnation."""

    incarnation: int
    spec: RoleSpec
    heard_at: float | None = None
    report: Report | None = None
    failure: Mapping[str, Any] | None = None
    gang: str | None = None
    """The address at which the other processes of its gang join."""
    is_replaced: bool = False


class DirectoryActor(Actor[Directory]):
    """Tracks the workers of one run."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._own_endpoint: Endpoint | None = None
        self._is_forwarded = False
        self._num_lost_proxies = 0
        self._published_attempt = 0
        self._changed = ChangeSignal()

    @ExpectWorker.handler
    async def expect(self, message: ExpectWorker) -> None:
        """Register the next incarnation of a worker; earlier ones are rejected from now on."""
        known = self._entries.get(message.worker)
        if known is not None and message.incarnation <= known.incarnation:
            raise Conflict(
                f"{message.worker} already has incarnation {known.incarnation}; give the next one a higher number."
            )
        self._entries[message.worker] = _Entry(incarnation=message.incarnation, spec=message.spec)
        self._changed.notify()

    @FetchRoleSpec.handler
    async def fetch(self, message: FetchRoleSpec) -> RoleSpec:
        """Return the worker's spec. Only rank 0 renews the lease by asking."""
        # A request of another rank says nothing about the worker's first process, so it must not renew the lease.
        find = self._find if message.rank else self._hear
        return find(message.worker, message.incarnation).spec

    @ReportReady.handler
    async def note_ready(self, message: ReportReady) -> None:
        """Store the worker's report, so that it can be found."""
        entry = self._hear(message.worker, message.incarnation)
        entry.report = message.report
        self._changed.notify()

    @ReportGang.handler
    async def note_gang(self, message: ReportGang) -> None:
        """Store the gang's address and wake the processes that wait to join."""
        self._hear(message.worker, message.incarnation).gang = message.address
        self._changed.notify()

    @AwaitGang.handler(concurrency=_MANY)
    async def await_gang(self, message: AwaitGang) -> str:
        """Wait until the first process of the gang can be joined, and return its address."""
        while (address := self._find(message.worker, message.incarnation).gang) is None:
            await self._changed.wait()
        return address

    @ReportFailure.handler
    async def note_failure(self, message: ReportFailure) -> None:
        """Keep the error with which a worker ends, for the process that supervises it. The first report counts."""
        entry = self._hear(message.worker, message.incarnation)
        # With several processes, later errors are often consequences of the first one.
        entry.failure = entry.failure or message.error

    @KeepLease.handler
    async def keep_lease(self, message: KeepLease) -> None:
        """Renew the worker's lease."""
        self._hear(message.worker, message.incarnation)

    @AwaitReady.handler(concurrency=_MANY)
    async def await_ready(self, message: AwaitReady) -> Report:
        """Wait for the worker's report and return it."""
        while True:
            entry = self._entries.get(message.worker)
            if entry is not None and entry.incarnation >= message.incarnation and entry.report is not None:
                return entry.report
            await self._changed.wait()

    @AwaitLapse.handler(concurrency=_MANY)
    async def await_lapse(self, message: AwaitLapse) -> str:
        """Wait until the worker's lease is overdue, or it hangs, and return the reason.

        A worker has no lease before its first report, and hangs only once it serves: until then, imports and loading
        may block its event loop.
        """
        while True:
            entry = self._entries.get(message.worker)
            is_known = entry is not None and (entry.heard_at is not None or entry.is_replaced)
            if entry is None or not is_known:
                await self._changed.wait()
                continue
            if entry.is_replaced:
                return "The cluster has started it again by itself, and it knows nothing of what it did."
            lease = entry.spec.lease_seconds
            hang = entry.spec.hang_seconds if entry.report is not None else None
            patience = min(_PATIENCE * lease, math.inf if hang is None else hang)
            now = anyio.current_time()
            if now - (entry.heard_at or 0.0) >= patience and patience == hang:
                return f"It serves, but has not answered for {hang:g} s."
            if now - (entry.heard_at or 0.0) >= patience:
                return f"It has not been heard of for longer than its lease of {lease:g} s."
            pause = patience / _CHECKS
            await anyio.sleep(pause)
            # Time during which this process did not run, because it was stopped or its machine was busy, does not
            # count: signs of life that came meanwhile have not been read yet.
            late = anyio.current_time() - now - pause
            if late > pause and entry.heard_at is not None:
                entry.heard_at = min(entry.heard_at + late, anyio.current_time())

    @DismissWorker.handler
    async def dismiss(self, message: DismissWorker) -> Mapping[str, Any] | None:
        """Remove the worker's report; callers that look for it wait for its next incarnation."""
        entry = self._entries.get(message.worker)
        if entry is None:
            return None
        if entry.incarnation <= message.incarnation:
            self._count_lost(entry)
            entry.report = None
            self._changed.notify()
        # A later incarnation is one that the cluster has started by itself.
        return entry.failure if entry.incarnation >= message.incarnation else None

    @AwaitEndpoint.handler(concurrency=_MANY)
    async def await_endpoint(self, message: AwaitEndpoint) -> Endpoint:  # noqa: ARG002 - the message says it all
        """Wait for a proxy that serves at present and return the endpoint that agents know."""
        while True:
            found = self._proxies()
            endpoint = self._own_endpoint if self._is_forwarded or not found else found[0]
            if endpoint is not None and (found or not self._is_forwarded):
                return endpoint
            await self._changed.wait()

    @AwaitProxies.handler(concurrency=_MANY)
    async def await_proxies(self, message: AwaitProxies) -> tuple[str, ...]:
        """Wait until other proxies serve than those that are known."""
        while (urls := tuple(endpoint.url for endpoint in self._proxies())) == message.known:
            await self._changed.wait()
        return urls

    @CountLostProxies.handler
    async def count_lost_proxies(self, message: CountLostProxies) -> int:  # noqa: ARG002
        """Return how many proxies have ended that served."""
        return self._num_lost_proxies

    def _proxies(self) -> list[Endpoint]:
        """Return the endpoints of the proxies in workers that serve; earlier incarnations listened elsewhere."""
        reports = [entry.report for entry in self._entries.values() if not entry.is_replaced]
        return [report.endpoint for report in reports if report is not None and report.endpoint is not None]

    def _count_lost(self, entry: _Entry) -> None:
        """Count a proxy whose incarnation ends."""
        self._num_lost_proxies += entry.report is not None and entry.report.endpoint is not None

    @EndpointChanged.handler
    async def note_endpoint(self, message: EndpointChanged) -> None:
        """Store the endpoint in the controller process; ``None`` once it has closed."""
        self._own_endpoint, self._is_forwarded = message.endpoint, message.is_forwarded
        self._changed.notify()

    @WeightsPublished.handler
    async def note_published(self, message: WeightsPublished) -> None:
        """Record that the engines have the weights of this attempt."""
        self._published_attempt = max(self._published_attempt, message.attempt)
        self._changed.notify()

    @AwaitWeights.handler(concurrency=_MANY)
    async def await_weights(self, message: AwaitWeights) -> None:
        """Wait until the engines have the weights of this attempt."""
        while self._published_attempt < message.attempt:
            await self._changed.wait()

    def _hear(self, worker: str, incarnation: int) -> _Entry:
        """Return the entry of the worker that sent a message, and renew its lease. Raises as ``_find`` does."""
        entry = self._find(worker, incarnation)
        is_first = entry.heard_at is None
        entry.heard_at = anyio.current_time()
        if is_first:
            self._changed.notify()
        return entry

    def _find(self, worker: str, incarnation: int) -> _Entry:
        """Return the entry of an incarnation.

        An incarnation newer than the registered one was started by the cluster itself. It takes over the spec if the
        worker can be replaced alone.

        Raises:
            Conflict: a later incarnation has begun, or other workers depend on the state of an earlier one.
            NotFound: the worker is not expected.
        """
        entry = self._entries.get(worker)
        if entry is None:
            raise NotFound(f"This run expects no worker {worker}; it belongs to another run, or to none any more.")
        if incarnation < entry.incarnation:
            raise Conflict(f"Incarnation {incarnation} of {worker} is over; incarnation {entry.incarnation} has begun.")
        # The cluster restarted it by itself, but other workers depend on its lost state.
        if incarnation > entry.incarnation and not entry.spec.is_replaced_alone:
            entry.is_replaced = True
            self._changed.notify()
            raise Conflict(f"{worker} cannot be replaced alone: the run begins anew from its latest checkpoint.")
        if incarnation > entry.incarnation:
            self._count_lost(entry)
            self._changed.notify()
            entry = self._entries[worker] = _Entry(incarnation=incarnation, spec=entry.spec)
        return entry
