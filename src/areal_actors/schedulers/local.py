"""Workers as child processes: each leads a process group, which ends with the worker and with this process.

Resources of the machine are counted (``accounting``); a worker that does not fit waits, first come, first served. Its
output goes to its own log file. ``lib.child_process`` explains how a process is ended reliably, even after kill -9 of
this process.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
from anyio import to_thread

from areal_actors.lib.child_process import BoundedLog, Child
from areal_actors.lib.task_groups import open_tasks
from areal_actors.schedulers.accounting import Inventory, Machine, Share, find_machine
from areal_actors.schedulers.base import PlacementState, PlacementStatus, WorkerSpec
from areal_actors.schedulers.bootstrap import BOOTSTRAP_VARIABLE, Bootstrap
from areal_actors.schedulers.config import LocalConfig

_GRACE_SECONDS = 5.0
"""How long a worker may take to exit after its block was left."""

Command = Callable[[WorkerSpec], list[str]]


def worker_command(spec: WorkerSpec) -> list[str]:
    """Return the command that starts a worker."""
    return [str(spec.python or sys.executable), "-m", "areal_actors.worker"]


class LocalScheduler:
    """Places workers on this machine. Created by ``open``; each worker logs to a file in ``logs`` with its name."""

    name = "local"

    def __init__(self, inventory: Inventory, *, logs: Path, command: Command = worker_command) -> None:
        self.inventory = inventory
        self._logs = logs
        self._command = command
        self._queue: deque[_Waiting] = deque()

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        config: LocalConfig | None = None,
        *,
        logs: Path,
        directory: Path | None = None,  # noqa: ARG003 - nothing is kept there; a common parameter of schedulers
        command: Command = worker_command,
    ) -> AsyncIterator[LocalScheduler]:
        """Open a scheduler for this machine. Resources that ``config`` does not specify are detected once."""
        config = config or LocalConfig()
        machine: Machine = await to_thread.run_sync(
            lambda: find_machine(cpus=config.cpus, memory_mib=config.memory_mib, gpus=config.gpus)
        )
        yield cls(Inventory(machine, is_shared=config.oversubscribe), logs=logs, command=command)

    def check(self, name: str, *wanted: WorkerSpec) -> None:
        """Check that the workers fit this machine together. Raises ``SchedulerError``."""
        self.inventory.check(name, *(spec.total for spec in wanted))

    @asynccontextmanager
    async def place(self, spec: WorkerSpec) -> AsyncIterator[LocalPlacement]:
        """Start a child process for the block, as ``Scheduler.place`` describes. Raises ``SchedulerError``."""
        self.inventory.check(spec.name, spec.total)
        log = self._logs / f"{spec.name}.log"
        placement = LocalPlacement(spec, log=log)
        # Opening the log may block on a slow file system.
        words = await to_thread.run_sync(BoundedLog, log)
        async with open_tasks() as tasks:
            tasks.start_soon(self._run, placement, words)
            try:
                yield placement
            finally:
                with anyio.CancelScope(shield=True):  # bounded by the grace
                    await placement.stop(grace=_GRACE_SECONDS)

    async def _run(self, placement: LocalPlacement, words: BoundedLog) -> None:
        """Run one worker from waiting for resources to its end. Only ``stop`` ends it early."""
        share: Share | None = None
        with anyio.CancelScope(shield=True):
            try:
                # stop() cancels this scope only: a process that has started ends through follow().
                with placement.starting:
                    share = await self._acquire(placement)
                    command = self._command(placement.spec)
                    await placement.start(command, words, _environment(placement.spec, share))
                await placement.follow()
            finally:
                if share is not None:
                    self.inventory.give_back(share)
                    self._serve_queue()
                placement.end()

    async def _acquire(self, placement: LocalPlacement) -> Share:
        waiting = _Waiting(placement)
        self._queue.append(waiting)
        self._serve_queue()
        try:
            await waiting.served.wait()
        except BaseException:
            # The share was allocated just before the cancellation.
            if waiting.share is not None:
                self.inventory.give_back(waiting.share)
            with suppress(ValueError):
                self._queue.remove(waiting)
            self._serve_queue()
            raise
        assert waiting.share is not None
        return waiting.share

    def _serve_queue(self) -> None:
        """Allocate free resources to waiting workers in order of arrival."""
        while self._queue:
            # Strictly in order: a small worker that overtook a large one could keep it waiting indefinitely.
            first = self._queue[0]
            first.share = self.inventory.take(first.placement.spec.total)
            if first.share is None:
                break
            self._queue.popleft().served.set()
        for waiting in self._queue:
            waiting.placement.note_waiting(self.inventory.describe_wait(waiting.placement.spec.total))


class _Waiting:
    """A worker in the queue, and the share that was allocated to it."""

    def __init__(self, placement: LocalPlacement) -> None:
        self.placement = placement
        self.served = anyio.Event()
        self.share: Share | None = None


class LocalPlacement:
    """A worker that runs as a child process; implements ``Placement``."""

    def __init__(self, spec: WorkerSpec, *, log: Path) -> None:
        self.spec = spec
        self.log: Path | None = log
        self.status = PlacementStatus(state=PlacementState.PENDING)
        self.starting = anyio.CancelScope()
        self._child: Child | None = None
        self._ended = anyio.Event()

    async def wait_ended(self) -> PlacementStatus:
        """Wait until the process and its group have ended, and return the final status."""
        await self._ended.wait()
        return self.status

    async def stop(self, *, grace: float) -> None:
        """Send SIGTERM, kill the process group after ``grace`` seconds, and return when it is gone.

        A worker that still waits for resources gives up its place in the queue.
        """
        self.starting.cancel()
        if self._child is not None:
            await self._child.kill(grace_seconds=grace)
        await self._ended.wait()

    def note_waiting(self, reason: str) -> None:
        """Record why the worker is still waiting for resources."""
        self.status = PlacementStatus(state=PlacementState.PENDING, reason=reason)

    async def start(self, command: list[str], words: BoundedLog, environment: Mapping[str, str]) -> None:
        """Start the process. If it cannot be started, the status becomes ENDED and nothing is raised."""
        try:
            self._child = await Child.start(lambda _: command, log=words, environment=environment)
        except (OSError, ValueError) as error:
            # ValueError: NUL bytes in arguments or variables.
            reason = f"{command[0]} could not be started: {error}"
            self.status = PlacementStatus(state=PlacementState.ENDED, reason=reason)
            return
        self.status = PlacementStatus(state=PlacementState.RUNNING, where=f"process {self._child.process.pid}")

    async def follow(self) -> None:
        """Supervise the process until it and all its descendants have ended."""
        child = self._child
        if child is None:
            return
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(child.listen)
            tasks.start_soon(child.kill_when_stopped)
            tasks.start_soon(child.drain)
            # Stopped while it was being started.
            if self.starting.cancel_called:
                child.kill_rest()
            assert child.process.stdin is not None
            with suppress(OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):  # it has ended: see below
                # Standard input stays open, because a worker exits when it is closed.
                await child.process.stdin.send(Bootstrap.of(self.spec).to_line().encode())
            await child.wait_for_leader()
            await child.kill(grace_seconds=0)
            # stop() may be killing the process concurrently.
            await child.reap()
            # A daemon that it left behind may keep the pipes open.
            tasks.cancel_scope.cancel()
        self.status = PlacementStatus(
            state=PlacementState.ENDED,
            where=f"process {child.process.pid}",
            reason=child.describe_end(),
            exit_code=child.process.returncode,
        )

    def end(self) -> None:
        """Record that no process is left, and wake the tasks that wait for the end."""
        if self.status.state is not PlacementState.ENDED:
            self.status = PlacementStatus(state=PlacementState.ENDED, reason="It was stopped before it had begun.")
        self._ended.set()


def _environment(spec: WorkerSpec, share: Share) -> dict[str, str]:
    """Return the environment of a worker.

    It is that of this process with the spec's variables, and ``CUDA_VISIBLE_DEVICES`` lists only the GPUs allocated to
    the worker. ``OMP_NUM_THREADS`` defaults to the CPUs of the worker, because numeric libraries would otherwise start
    a thread for each core of the machine. A gang divides its CPUs and GPUs among its processes itself
    (``training.gang``).
    """
    inherited = {name: value for name, value in os.environ.items() if name != BOOTSTRAP_VARIABLE}
    # A value that the user has set takes precedence.
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(spec.total.cpus))}
    return inherited | threads | {"CUDA_VISIBLE_DEVICES": ",".join(share.gpus)} | dict(spec.environment)
