"""The launcher: services of many trials, each started when it is asked for, watched, and stopped when nobody uses it.

A service is a process of its own, which a ``ServiceProvider`` opens; nothing here knows what a process is. What a
service has to remember is in its journal: it may be stopped, or die, at any time, and goes on when it is back.

::

    UseService ──▶ stopped ──▶ starting ──▶ running          a request in flight keeps it from being stopped
                      ▲           ▲  │         │  │
                      │           │  ▼         ▼  │ trained to the end
                      │         backing off ◀─ died └──▶ finished
                      └── stopping ◀── idle, or its place is wanted
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Protocol

import anyio
from attrs import define, field, frozen
from attrs.validators import ge, gt

from areal_actors.core import Actor, BackgroundTasks, Context, root_cause
from areal_actors.domain import ServiceState, ServiceView, TrialId
from areal_actors.errors import ArealError, SessionEnded, Unavailable
from areal_actors.messages import (
    Hosting,
    ListServices,
    ServiceInUse,
    StopServices,
    UseService,
    VisitSession,
)
from areal_actors.telemetry import get_logger

__all__ = ["Launcher", "LauncherConfig", "RunningService", "ServiceProvider"]

_log = get_logger(__name__)

_HEALTHY_SECONDS = 60.0
"""A service that has run for so long is started again at once, whatever was before."""
_NUM_PATIENT = 3
"""So many starts may fail before requests are refused at once instead of waiting for the next one."""
_FULL_SECONDS = 5.0
_MANY = 100_000
_OVER = (ServiceState.STOPPED, ServiceState.FINISHED)


@frozen(kw_only=True)
class LauncherConfig:
    """How many services there are, and for how long."""

    max_services: int = field(default=4, validator=ge(1))
    idle_seconds: float = field(default=1800.0, validator=gt(0))
    make_room_seconds: float = field(default=60.0, validator=ge(0))
    start_timeout_seconds: float = field(default=120.0, validator=gt(0))
    first_wait_seconds: float = field(default=0.5, validator=gt(0))
    max_wait_seconds: float = field(default=60.0, validator=gt(0))

    def wait_seconds(self, num_failures: int) -> float:
        """How long after the last of so many failures in a row the next start is tried: twice as long each time."""
        # The exponent is bounded, because floats are.
        return min(self.max_wait_seconds, self.first_wait_seconds * 2.0 ** min(num_failures - 1, 60))


class RunningService(Protocol):
    """A service that listens."""

    @property
    def url(self) -> str:
        """Where."""
        ...

    @property
    def admin_key(self) -> str:
        """What opens it."""
        ...

    @property
    def pid(self) -> int:
        """Its process."""
        ...

    async def wait(self) -> str | None:
        """Until it has ended, and why; ``None`` if its training is finished."""
        ...


class ServiceProvider(Protocol):
    """How a service is started, and what it has left on disk. ``testing.hosting`` has one without processes."""

    def open(self, trial: TrialId) -> AbstractAsyncContextManager[RunningService]:
        """Start the service; the block begins when it listens, and leaving it stops the service with a checkpoint.

        Raises:
            Unavailable: it cannot be started, and why.
            SessionEnded: it has ended at once, because its training is finished.
        """
        ...

    async def list_trials(self) -> tuple[TrialId, ...]:
        """The trials that have been served before."""
        ...

    async def has_session(self, trial: TrialId, name: str) -> bool:
        """Whether the journal of ``trial`` has a session with this id or key."""
        ...


@define(kw_only=True, eq=False)
class _Service:
    """What is known of one service."""

    trial: TrialId
    state: ServiceState = ServiceState.STOPPED
    running: RunningService | None = None
    num_users: int = 0
    num_starts: int = 0
    num_failures: int = 0
    """In a row."""
    last_used: float = 0.0
    last_used_at: float | None = None
    retry_at: float = 0.0
    failure: str | None = None
    stopping: anyio.Event = field(factory=anyio.Event)
    changed: anyio.Event = field(factory=anyio.Event)

    @property
    def is_placed(self) -> bool:
        """Whether it has one of the places, and is not about to leave it."""
        return self.state in (ServiceState.STARTING, ServiceState.RUNNING, ServiceState.BACKING_OFF) or (
            self.state is ServiceState.STOPPING and not self.stopping.is_set()
        )

    def move(self, state: ServiceState) -> None:
        """Be in another state, and wake up whoever waits for one."""
        self.state = state
        self.changed.set()
        self.changed = anyio.Event()

    def stop(self) -> None:
        """Have it stopped."""
        if not self.stopping.is_set():
            self.stopping.set()
            self.move(ServiceState.STOPPING)

    def describe(self) -> ServiceView:
        """The service from outside."""
        running = self.running
        return ServiceView(
            trial=self.trial,
            state=self.state,
            pid=None if running is None else running.pid,
            url=None if running is None else running.url,
            num_requests=self.num_users,
            num_starts=self.num_starts,
            last_used_at=self.last_used_at,
            failure=self.failure,
        )


class Launcher(Actor[Hosting]):
    """Lends services out. ``clock`` gives seconds since 1970, for people to read."""

    def __init__(
        self,
        provider: ServiceProvider,
        *,
        config: LauncherConfig | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._provider = provider
        self._config = config or LauncherConfig()
        self._clock = clock
        self._services: dict[TrialId, _Service] = {}
        self._homes: dict[str, TrialId] = {}
        self._is_closing = False
        self._places: anyio.Semaphore
        self._tasks: BackgroundTasks

    @asynccontextmanager
    async def lifespan(self, context: Context) -> AsyncIterator[None]:
        """Look for what was served before. Services run in tasks that end with the actor."""
        self._tasks = context.tasks
        self._places = anyio.Semaphore(self._config.max_services)
        for trial in await self._provider.list_trials():
            self._service(trial)
        yield

    # ------------------------------------------------------------------------------------------------- lending

    @UseService.handler(concurrency=_MANY)
    async def use(self, message: UseService) -> AsyncGenerator[ServiceInUse, None]:
        """Lend a service out until the borrower leaves."""
        service = self._service(message.trial)
        with self._counted(service):
            yield await self._borrow(service)
            await anyio.sleep_forever()

    @VisitSession.handler(concurrency=_MANY)
    async def visit(self, message: VisitSession) -> AsyncGenerator[ServiceInUse, None]:
        """The same for a session. Strangers start nothing: a service without a process is asked for by its journal."""
        trial = self._homes.get(message.home)
        if trial is None:
            return
        service = self._service(trial)
        if service.running is None and not await self._provider.has_session(trial, message.name):
            return
        with self._counted(service):
            yield await self._borrow(service)
            await anyio.sleep_forever()

    @ListServices.handler(concurrency=_MANY)
    async def describe_all(self, message: ListServices) -> tuple[ServiceView, ...]:  # noqa: ARG002 - the message says it all
        """All of them."""
        found = sorted(self._services.values(), key=lambda service: service.trial.name)
        return tuple(service.describe() for service in found)

    @StopServices.handler
    async def stop_all(self, message: StopServices) -> None:  # noqa: ARG002 - the message says it all
        """Stop all, side by side, and wait."""
        self._is_closing = True
        placed = [service for service in self._services.values() if service.state not in _OVER]
        for service in placed:
            service.stop()
        for service in placed:
            while service.state not in _OVER:
                await service.changed.wait()

    def _service(self, trial: TrialId) -> _Service:
        service = self._services.get(trial)
        if service is None:
            service = self._services[trial] = _Service(trial=trial)
            self._homes[trial.home] = trial
        return service

    @contextmanager
    def _counted(self, service: _Service) -> Iterator[None]:
        service.num_users += 1
        self._note_use(service)
        try:
            yield
        finally:
            service.num_users -= 1
            self._note_use(service)

    def _note_use(self, service: _Service) -> None:
        service.last_used = anyio.current_time()
        service.last_used_at = self._clock()

    async def _borrow(self, service: _Service) -> ServiceInUse:
        """The service once it listens. Raises as ``UseService`` says."""
        name, seconds = service.trial.name, self._config.start_timeout_seconds
        with anyio.move_on_after(seconds):
            while True:
                running = service.running
                if service.state is ServiceState.RUNNING and running is not None:
                    return ServiceInUse(trial=service.trial, url=running.url, admin_key=running.admin_key)
                self._push(service)
                await service.changed.wait()
        raise Unavailable(
            f"{name} does not listen after {seconds:g} s, and is still being started; ask again.",
            retry_after_seconds=_FULL_SECONDS,
        )

    def _push(self, service: _Service) -> None:
        """Start it if it is stopped. Raises where waiting would be in vain."""
        name = service.trial.name
        if self._is_closing:
            raise Unavailable("The host is stopping; ask again when it is back.")
        if service.state is ServiceState.FINISHED:
            raise SessionEnded(f"The training of {name} is finished; ask for a key of another trial.")
        if service.state is ServiceState.STOPPED:
            self._begin(service)
        elif service.state is ServiceState.BACKING_OFF and service.num_failures >= _NUM_PATIENT:
            wait = max(service.retry_at - anyio.current_time(), 1.0)
            raise Unavailable(
                f"{name} could not be started {service.num_failures} times; whoever runs this host sees why. "
                "It is tried again.",
                retry_after_seconds=wait,
            )

    # -------------------------------------------------------------------------------------------------- places

    def _begin(self, service: _Service) -> None:
        """Promise it a place, and start it there. Raises ``Unavailable`` if all places are in use."""
        placed = [other for other in self._services.values() if other.is_placed]
        if len(placed) >= self._config.max_services:
            self._least_used(placed).stop()
        service.stopping, service.num_failures = anyio.Event(), 0
        service.move(ServiceState.STARTING)
        self._tasks.start_soon(self._keep, service)

    def _least_used(self, placed: list[_Service]) -> _Service:
        """Who makes room: of those that were not asked anything for a while, the one that was asked longest ago."""
        latest = anyio.current_time() - self._config.make_room_seconds
        idle = [service for service in placed if not service.num_users and service.last_used <= latest]
        if not idle:
            raise Unavailable(
                f"All {self._config.max_services} places for services are in use; ask again later.",
                retry_after_seconds=_FULL_SECONDS,
            )
        return min(idle, key=lambda service: service.last_used)

    # --------------------------------------------------------------------------------------------- one service

    async def _keep(self, service: _Service) -> None:
        """From its start until it is stopped. Nothing that fails in here leaves it."""
        try:
            async with self._places, anyio.create_task_group() as tasks:  # a former tenant may still be saving
                tasks.start_soon(self._end_when_told, service, tasks.cancel_scope)
                tasks.start_soon(self._end_when_idle, service)
                await self._revive(service)
                tasks.cancel_scope.cancel()
        finally:
            if service.state is not ServiceState.FINISHED:
                service.move(ServiceState.STOPPED)

    async def _end_when_told(self, service: _Service, scope: anyio.CancelScope) -> None:
        await service.stopping.wait()
        scope.cancel()

    async def _end_when_idle(self, service: _Service) -> None:
        limit = self._config.idle_seconds
        while limit < math.inf:
            idle = 0.0 if service.num_users else anyio.current_time() - service.last_used
            if idle >= limit:
                _log.info("service_idle", trial=service.trial.name)
                service.stop()
                return
            await anyio.sleep(limit - idle)

    async def _revive(self, service: _Service) -> None:
        """Run it, again and again, until it has finished."""
        while not await self._live(service):
            service.num_failures += 1
            wait = self._config.wait_seconds(service.num_failures)
            service.retry_at = anyio.current_time() + wait
            _log.warning("service_failed", trial=service.trial.name, error=service.failure, again_in_seconds=wait)
            service.move(ServiceState.BACKING_OFF)
            await anyio.sleep(wait)
            service.move(ServiceState.STARTING)
        _log.info("service_finished", trial=service.trial.name)
        service.move(ServiceState.FINISHED)

    async def _live(self, service: _Service) -> bool:
        """One life. Returns whether its training has finished."""
        service.num_starts += 1
        try:
            async with self._provider.open(service.trial) as running:
                return await self._watch(service, running)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this service's
            cause = root_cause(error)
            service.failure = str(cause) if isinstance(cause, ArealError) else repr(cause)
            return isinstance(cause, SessionEnded)

    async def _watch(self, service: _Service, running: RunningService) -> bool:
        began = anyio.current_time()
        service.running = running
        service.move(ServiceState.RUNNING)
        _log.info("service_started", trial=service.trial.name, pid=running.pid)
        try:
            service.failure = await running.wait()
        finally:
            service.running = None
            service.move(ServiceState.STOPPING)
        if anyio.current_time() - began >= _HEALTHY_SECONDS:
            service.num_failures = 0
        return service.failure is None
