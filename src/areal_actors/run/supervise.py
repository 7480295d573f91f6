"""The controller's supervision of workers: place each worker, watch it, and replace it when it has ended.

An incarnation ends when its process exits, or when the controller has not received a sign of life for longer than the
lease; the process is then ended before the next incarnation starts. ``placement`` decides which workers are replaced
individually and which are ended together.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext, suppress
from typing import Any, NoReturn

import anyio
from attrs import define

from areal_actors.domain import Role
from areal_actors.errors import (
    ActorError,
    ArealError,
    CaptureViolation,
    EncodingError,
    EngineError,
    GangError,
    ProtocolError,
    RemoteError,
    RequestError,
    SchedulerError,
)
from areal_actors.kernel import Ref
from areal_actors.kernel.failure import error_from_data
from areal_actors.lib import loops
from areal_actors.lib.backoff import Backoff
from areal_actors.lib.task_groups import leaves
from areal_actors.lib.telemetry import get_logger
from areal_actors.messages import (
    AwaitLapse,
    AwaitReady,
    Directory,
    DismissWorker,
    ExpectWorker,
    Report,
    RoleSpec,
)
from areal_actors.schedulers.base import ControllerAddress, Placement, PlacementState, Scheduler, WorkerSpec
from areal_actors.schedulers.config import RestartsConfig, RoleConfig, SchedulerConfig

_log = get_logger(__name__)

_INCARNATION_STRIDE = 1000
"""Distance between the incarnation numbers of two starts.

A cluster that restarts a job by itself uses the numbers in between.
"""
_CHECK_SECONDS = 0.5
_FIRST_PAUSE_SECONDS = 0.5
_MAX_PAUSE_SECONDS = 30.0

WhileReady = Callable[[Report], AbstractAsyncContextManager[Any]]
"""A context manager that is open while a worker is ready."""


class Restarts:
    """Counts restarts within a sliding window."""

    def __init__(self, config: RestartsConfig) -> None:
        self._config = config
        self._times: deque[float] = deque()

    def allow(self, *, now: float) -> bool:
        """Return whether another restart is allowed, and count it if so. ``now`` is in seconds."""
        while self._times and self._times[0] <= now - self._config.window_seconds:
            self._times.popleft()
        if len(self._times) >= self._config.max:
            return False
        self._times.append(now)
        return True

    def describe(self) -> str:
        """Return the limit as text for an error message."""
        return f"{self._config.max} restarts in {self._config.window_seconds:g} s (scheduler.restarts.max)"


@define(kw_only=True)
class WorkerExit:
    """The end of an incarnation. ``error`` is the failure that the worker itself reported, if it could."""

    worker: str
    reason: str = ""
    error: ArealError | None = None
    had_served: bool = False

    def __str__(self) -> str:
        said = "" if self.error is None else f" It said: {self.error}."
        return f"{self.worker} is gone.{said} {self.reason}"


def find_final(error: BaseException) -> ArealError | None:
    """Return the error in ``error`` that the user has to fix and a restart would only raise again, or ``None``."""
    for leaf in leaves(error):
        # Restarting recovers from failures of actors, requests, engines and gangs, but an engine that fails the capture
        # test fails it again, and a value that cannot be sent is made again.
        is_mended = isinstance(leaf, ActorError | RequestError | EngineError | GangError)
        is_fault = isinstance(leaf, CaptureViolation | EncodingError) or not is_mended
        # An actor elsewhere could not send it.
        is_fault |= isinstance(leaf, RemoteError) and leaf.type_name == EncodingError.__name__
        if isinstance(leaf, ArealError) and is_fault:
            return leaf
    return None


def worker_spec(
    name: str,
    role: RoleConfig,
    *,
    controller: ControllerAddress,
    num_tasks: int = 1,
    incarnation: int = _INCARNATION_STRIDE,
) -> WorkerSpec:
    """Return the spec of an incarnation of the worker ``name``, by default of the first one."""
    return WorkerSpec(
        name=name,
        controller=controller,
        life=incarnation,
        resources=role.resources,
        num_tasks=num_tasks,
        python=role.python,
        environment={**loops.child_variables(), **role.environment},
    )


class WorkerSupervisor:
    """Starts and watches the workers of one run, which needs at least one worker for each of ``roles``."""

    def __init__(
        self,
        scheduler: Scheduler,
        directory: Ref[Directory],
        controller: ControllerAddress,
        config: SchedulerConfig,
        *,
        roles: Iterable[Role] = (),
    ) -> None:
        self.config = config
        self.barrier = PlacementBarrier(roles, seconds=config.gather_seconds)
        self._scheduler = scheduler
        self._directory = directory
        self._controller = controller
        self._num_incarnations: Counter[str] = Counter()

    async def run_restarting(
        self, name: str, spec: RoleSpec, role: RoleConfig, *, while_ready: WhileReady = nullcontext
    ) -> NoReturn:
        """Run one incarnation after another, with exponential backoff while they fail before they are ready.

        Raises:
            SchedulerError: the worker has ended too often.
            ArealError: the last incarnation reported an error that a restart would only raise again.
        """
        restarts = Restarts(self.config.restarts)
        backoff = Backoff(first_seconds=_FIRST_PAUSE_SECONDS, max_seconds=_MAX_PAUSE_SECONDS)
        while True:
            num_releases = self.barrier.num_releases
            ended = await self.run_once(name, spec, role, while_ready=while_ready)
            if ended.error is not None and find_final(ended.error) is not None:
                raise ended.error
            # A worker that was released to make room does not count as a restart.
            if num_releases != self.barrier.num_releases:
                continue
            if not restarts.allow(now=anyio.current_time()):
                raise SchedulerError(f"{ended} It is not started again after {restarts.describe()}.")
            if ended.had_served:
                backoff.reset()
            pause = backoff.next_delay()
            _log.warning("worker_ended", worker=name, again_in_seconds=pause, reason=str(ended))
            await anyio.sleep(pause)

    async def run_once(
        self,
        name: str,
        spec: RoleSpec,
        role: RoleConfig,
        *,
        num_tasks: int = 1,
        while_ready: WhileReady = nullcontext,
    ) -> WorkerExit:
        """Run one incarnation of a worker with ``num_tasks`` processes, and return how it ended.

        Cancellation stops the worker. Raises ``SchedulerError``.
        """
        # After a release, other runs get time to take the resources.
        await anyio.sleep_until(self.barrier.opens_at)
        self._num_incarnations[name] += 1
        incarnation = self._num_incarnations[name] * _INCARNATION_STRIDE
        await self._directory.ask(ExpectWorker(worker=name, incarnation=incarnation, spec=spec))
        ended, words = WorkerExit(worker=name), None
        placed = worker_spec(name, role, controller=self._controller, num_tasks=num_tasks, incarnation=incarnation)
        async with self._scheduler.place(placed) as placement:
            try:
                with self.barrier.hold(spec.role, placement):
                    await self._watch(placement, ended, while_ready)
            finally:
                with anyio.CancelScope(shield=True):  # bounded by ``stop_seconds``
                    await placement.stop(grace=self.config.stop_seconds)
                    # Also on cancellation: the next attempt must not get the address of this incarnation.
                    words = await self._directory.ask(DismissWorker(worker=name, incarnation=incarnation))
        if words is not None:
            # A worker of another version may describe its error in a form that is not known here.
            with suppress(ProtocolError):
                ended.error = error_from_data(words)
        return ended

    async def _watch(self, placement: Placement, ended: WorkerExit, while_ready: WhileReady) -> None:
        """Wait until the incarnation ends; store the reason in ``ended``, and whether it had served.

        It ends, too, if it is not ready ``start_seconds`` after all roles that it may depend on have processes.
        """
        async with anyio.create_task_group() as tasks:

            def end(reason: str) -> None:
                # The first reason is the cause; later ones may be its consequences.
                ended.reason = ended.reason or reason
                tasks.cancel_scope.cancel()

            tasks.start_soon(self._until_ended, placement, end)
            tasks.start_soon(self._until_lapsed, placement, end)
            tasks.start_soon(self._until_released, end)
            told = ""
            while placement.status.state is PlacementState.PENDING:
                if placement.status.reason != told:
                    told = placement.status.reason
                    _log.info("worker_waits", worker=placement.spec.name, reason=told)
                await anyio.sleep(_CHECK_SECONDS)
            # A trainer whose engine still waits in the cluster's queue is not too slow to start.
            await self.wait_complete()
            report = None
            with anyio.move_on_after(self.config.start_seconds):
                ready = AwaitReady(worker=placement.spec.name, incarnation=placement.spec.life)
                report = await self._directory.ask(ready)
            if report is None:
                seconds = self.config.start_seconds
                end(f"It did not serve within {seconds:g} s (scheduler.start_seconds). See {placement.log}.")
                return
            ended.had_served = True
            _log.info("worker_serves", worker=placement.spec.name, where=placement.status.where, at=report.address)
            async with while_ready(report):
                await anyio.sleep_forever()

    async def wait_complete(self) -> None:
        """Wait until each role has a running worker."""
        while not self.barrier.is_complete:  # noqa: ASYNC110 - schedulers send no notifications
            await anyio.sleep(_CHECK_SECONDS)

    async def _until_released(self, end: Callable[[str], None]) -> None:
        num_releases = self.barrier.num_releases
        while num_releases == self.barrier.num_releases:
            await anyio.sleep(_CHECK_SECONDS)
            self.barrier.check(now=anyio.current_time())
        end("It was released, because other roles of the run found no room (scheduler.gather_seconds).")

    async def _until_ended(self, placement: Placement, end: Callable[[str], None]) -> None:
        end((await placement.wait_ended()).reason)

    async def _until_lapsed(self, placement: Placement, end: Callable[[str], None]) -> None:
        end(await self._directory.ask(AwaitLapse(worker=placement.spec.name, incarnation=placement.spec.life)))


class PlacementBarrier:
    """The roles of one run and the workers placed for them; decides when a partly placed run releases its resources.

    Workers are placed one by one, so two runs that together want more resources than there are may each get a part and
    wait for the other without end. A run in which one role has waited for too long, while others hold resources,
    releases everything and tries again after a randomized pause, so that two runs do not retry in step.

    Args:
        roles: roles without which the run cannot work; one worker of each is enough.
        seconds: how long some roles may hold resources while others wait.
        jitter: a function that returns a number from 0 to 1.
    """

    def __init__(self, roles: Iterable[Role], *, seconds: float, jitter: Callable[[], float] = random.random) -> None:
        self._roles, self._seconds, self._jitter = frozenset(roles), seconds, jitter
        self._members: dict[str, tuple[Role, Placement]] = {}
        self._split_until: float | None = None
        self.num_releases = 0
        """How many times everything has been released."""
        self.opens_at = float("-inf")
        """The earliest time at which workers may be placed again, on the event loop's clock."""

    @contextmanager
    def hold(self, role: Role, placement: Placement) -> Iterator[None]:
        """Count a worker as placed while the block lasts."""
        self._members[placement.spec.name] = role, placement
        try:
            yield
        finally:
            del self._members[placement.spec.name]

    @property
    def is_complete(self) -> bool:
        """Return whether each role has at least one running worker."""
        return self._roles <= self._find(PlacementState.RUNNING)

    @property
    def waiting(self) -> frozenset[Role]:
        """Roles that are known to wait for resources, if another role has a running worker; else the empty set."""
        running = self._find(PlacementState.RUNNING)
        # A worker whose state is unknown may be running, so its role does not count as waiting.
        there = running | self._find(PlacementState.UNKNOWN)
        return (self._roles & self._find(PlacementState.PENDING)) - there if running else frozenset()

    def check(self, *, now: float) -> None:
        """Release everything if that is due, by incrementing ``num_releases``.

        ``now`` is the time in seconds on the event loop's clock.
        """
        if not self.waiting:
            self._split_until = None
        elif self._split_until is None:
            # Randomized by 25 percent either way, so that two runs do not release at the same moment.
            self._split_until = now + self._seconds * (0.75 + self._jitter() / 2)
        elif now >= self._split_until:
            pause = self._seconds * (0.5 + self._jitter())
            _log.warning("resources_released", no_room_for=sorted(self.waiting), again_in_seconds=round(pause, 1))
            self._split_until, self.opens_at = None, now + pause
            self.num_releases += 1

    def _find(self, state: PlacementState) -> frozenset[Role]:
        return frozenset(role for role, placement in self._members.values() if placement.status.state is state)
