"""The launcher: starts the services of many trials on demand, supervises them, and stops those that are idle.

A service is a separate process that a ``ServiceProvider`` opens; nothing in this module depends on how. A service keeps
its state in its journal: it may be stopped or die at any time, and continues when it is started again.

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

from areal_actors.errors import ArealError, SessionEnded, Unavailable
from areal_actors.kernel import Actor, BackgroundTasks, Context, root_cause
from areal_actors.lib.backoff import backoff_seconds
from areal_actors.lib.change_signal import ChangeSignal
from areal_actors.lib.telemetry import get_logger
from areal_actors_service.messages import (
    Hosting,
    ListServices,
    ServiceInUse,
    ServiceState,
    ServiceView,
    StopServices,
    TrialId,
    UseService,
    UseServiceOfSession,
)

_log = get_logger(__name__)

_HEALTHY_SECONDS = 60.0
"""After running this long, a service that fails is restarted as if it had not failed before."""
_NUM_PATIENT = 3
"""After this many failed starts, requests are refused at once instead of waiting for the next start."""
_FULL_SECONDS = 5.0
_MANY = 100_000
_OVER = (ServiceState.STOPPED, ServiceState.FINISHED)


@frozen(kw_only=True)
class LauncherConfig:
    """Number of services and their time limits."""

    max_services: int = field(default=4, validator=ge(1))
    idle_seconds: float = field(default=1800.0, validator=gt(0))
    make_room_seconds: float = field(default=60.0, validator=ge(0))
    start_timeout_seconds: float = field(default=120.0, validator=gt(0))
    first_wait_seconds: float = field(default=0.5, validator=gt(0))
    max_wait_seconds: float = field(default=60.0, validator=gt(0))

    def wait_seconds(self, num_failures: int) -> float:
        """Return the delay before the next start after ``num_failures`` failures in a row; it doubles each time."""
        return backoff_seconds(num_failures, first=self.first_wait_seconds, longest=self.max_wait_seconds)


class RunningService(Protocol):
    """A service that listens."""

    @property
    def url(self) -> str:
        """Its address."""
        ...

    @property
    def admin_key(self) -> str:
        """The key with full access to it."""
        ...

    @property
    def pid(self) -> int:
        """Its process id."""
        ...

    async def wait(self) -> str | None:
        """Wait until the service has ended and return the reason; ``None`` if its training is finished."""
        ...


class ServiceProvider(Protocol):
    """Starts services and knows what they left on disk. Tests have one without processes."""

    def open(self, trial: TrialId) -> AbstractAsyncContextManager[RunningService]:
        """Start the service. The block begins when it listens; leaving it stops the service with a checkpoint.

        Raises:
            Unavailable: it cannot be started; the message says why.
            SessionEnded: it ended at once, because its training is finished.
        """
        ...

    async def list_trials(self) -> tuple[TrialId, ...]:
        """Return the trials that have been served before."""
        ...

    async def has_session(self, trial: TrialId, name: str) -> bool:
        """Return whether the journal of ``trial`` has a session with this id or key."""
        ...


@define(kw_only=True, eq=False)
class _Service:
    """The state of one service."""

    trial: TrialId
    state: ServiceState = ServiceState.STOPPED
    running: RunningService | None = None
    num_users: int = 0
    num_starts: int = 0
    num_failures: int = 0
    """Failures in a row."""
    last_used: float = 0.0
    last_used_at: float | None = None
    retry_at: float = 0.0
    failure: str | None = None
    stopping: anyio.Event = field(factory=anyio.Event)
    changed: ChangeSignal = field(factory=ChangeSignal)

    @property
    def is_placed(self) -> bool:
        """Whether it occupies a place, and is not about to leave it."""
        return self.state in (ServiceState.STARTING, ServiceState.RUNNING, ServiceState.BACKING_OFF) or (
            self.state is ServiceState.STOPPING and not self.stopping.is_set()
        )

    def move(self, state: ServiceState) -> None:
        """Change the state, and wake the tasks that wait for a change."""
        self.state = state
        self.changed.notify()

    def stop(self) -> None:
        """Request the service to stop."""
        if not self.stopping.is_set():
            self.stopping.set()
            self.move(ServiceState.STOPPING)

    def describe(self) -> ServiceView:
        """Return the public view of the service."""
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
    """Lends services out. ``clock`` returns seconds since 1970, for display."""

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
        """List the trials served before. Services run in background tasks that end with the actor."""
        self._tasks = context.tasks
        self._places = anyio.Semaphore(self._config.max_services)
        for trial in await self._provider.list_trials():
            self._service(trial)
        yield

    # ------------------------------------------------------------------------------------------------- lending

    @UseService.handler(concurrency=_MANY)
    async def use(self, message: UseService) -> AsyncGenerator[ServiceInUse, None]:
        """Lend a service until the borrower leaves the stream."""
        service = self._service(message.trial)
        with self._counted(service):
            yield await self._borrow(service)
            await anyio.sleep_forever()

    @UseServiceOfSession.handler(concurrency=_MANY)
    async def use_by_session(self, message: UseServiceOfSession) -> AsyncGenerator[ServiceInUse, None]:
        """Lend the service of a session until the borrower leaves the stream."""
        trial = self._homes.get(message.home)
        if trial is None:
            return
        service = self._service(trial)
        # A request with an unknown session must not start a process, so ask the journal first.
        if service.running is None and not await self._provider.has_session(trial, message.name):
            return
        with self._counted(service):
            yield await self._borrow(service)
            await anyio.sleep_forever()

    @ListServices.handler(concurrency=_MANY)
    async def describe_all(self, message: ListServices) -> tuple[ServiceView, ...]:  # noqa: ARG002 - the message says it all
        """Return all services, by name."""
        found = sorted(self._services.values(), key=lambda service: service.trial.name)
        return tuple(service.describe() for service in found)

    @StopServices.handler
    async def stop_all(self, message: StopServices) -> None:  # noqa: ARG002 - the message says it all
        """Stop all services in parallel, and wait for them."""
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
        """Return the service once it listens. Raises as ``UseService`` documents."""
        name, seconds = service.trial.name, self._config.start_timeout_seconds
        # The start goes on after this time; only the request that waits for it is answered.
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
        """Start the service if it is stopped and there is a place. Raises if waiting would be pointless."""
        name = service.trial.name
        if self._is_closing:
            raise Unavailable("The host is stopping; ask again when it is back.")
        if service.state is ServiceState.FINISHED:
            raise SessionEnded(f"The training of {name} is finished; ask for a key of another trial.")
        if service.state is ServiceState.STOPPED:
            placed = [other for other in self._services.values() if other.is_placed]
            if len(placed) >= self._config.max_services:
                # The service that was used longest ago leaves, of those without a request for ``make_room_seconds``.
                latest = anyio.current_time() - self._config.make_room_seconds
                idle = [other for other in placed if not other.num_users and other.last_used <= latest]
                if not idle:
                    raise Unavailable(
                        f"All {self._config.max_services} places for services are in use; ask again later.",
                        retry_after_seconds=_FULL_SECONDS,
                    )
                # It keeps the semaphore until it has saved; the new service waits for that in ``_keep``.
                min(idle, key=lambda other: other.last_used).stop()
            service.stopping, service.num_failures = anyio.Event(), 0
            service.move(ServiceState.STARTING)
            self._tasks.start_soon(self._keep, service)
        elif service.state is ServiceState.BACKING_OFF and service.num_failures >= _NUM_PATIENT:
            wait = max(service.retry_at - anyio.current_time(), 1.0)
            raise Unavailable(
                f"{name} could not be started {service.num_failures} times; the operator of this host sees why. "
                "It is tried again.",
                retry_after_seconds=wait,
            )

    # --------------------------------------------------------------------------------------------- one service

    async def _keep(self, service: _Service) -> None:
        """Run the service until it is stopped or its training has finished, and restart it after failures."""
        try:
            # The service that leaves may still be saving.
            async with self._places, anyio.create_task_group() as tasks:
                tasks.start_soon(self._end_when_told, service, tasks.cancel_scope)
                tasks.start_soon(self._end_when_idle, service)
                while not await self._run_once(service):
                    service.num_failures += 1
                    wait = self._config.wait_seconds(service.num_failures)
                    service.retry_at = anyio.current_time() + wait
                    name, error = service.trial.name, service.failure
                    _log.warning("service_failed", trial=name, error=error, again_in_seconds=wait)
                    service.move(ServiceState.BACKING_OFF)
                    await anyio.sleep(wait)
                    service.move(ServiceState.STARTING)
                _log.info("service_finished", trial=service.trial.name)
                service.move(ServiceState.FINISHED)
                # The training has finished; end the two watchers.
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

    async def _run_once(self, service: _Service) -> bool:
        """Run the service once. Return whether its training has finished."""
        service.num_starts += 1
        try:
            async with self._provider.open(service.trial) as running:
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
        except Exception as error:  # noqa: BLE001 - any error belongs to this service alone
            cause = root_cause(error)
            service.failure = str(cause) if isinstance(cause, ArealError) else repr(cause)
            return isinstance(cause, SessionEnded)
