"""The scheduler protocol: start a worker with resources, report its status, and make sure that it ends.

A worker is one process. It is given the controller's address, connects to it, authenticates, and asks for its role. A
scheduler therefore knows nothing about roles and can start a worker anywhere. The controller knows whether a worker
serves requests; the scheduler knows whether its process runs, and where.

A worker's exit status is 0 for done, 1 for failed, or one of those below. When the cluster, not the controller, asks a
worker to end (SIGTERM) or warns it of a time limit (SIGUSR1), the worker saves its state and exits with ``RUN_AGAIN``.
With status 0, the cluster would consider the work done and not start it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from attrs import field, frozen
from attrs.validators import ge, matches_re, optional

WORKER_NAME = r"[a-z][a-z0-9-]{0,62}"
"""Pattern for worker names, which become parts of file names, job names and node names."""


@frozen(kw_only=True)
class Resources:
    """Resources that one worker holds exclusively."""

    cpus: int = field(default=1, validator=ge(1))
    memory_mib: int | None = field(default=None, validator=optional(ge(1)))
    """MiB; ``None`` leaves the amount to the machine or the cluster."""
    gpus: int = field(default=0, validator=ge(0))

    def times(self, number: int) -> Resources:
        """Return the total for ``number`` processes with these resources each."""
        memory = None if self.memory_mib is None else number * self.memory_mib
        return Resources(cpus=number * self.cpus, memory_mib=memory, gpus=number * self.gpus)


@frozen(kw_only=True)
class ControllerAddress:
    """The controller's address, and the secret with which a worker authenticates.

    ``secret`` is never put on a command line, which other users of a machine can read.
    """

    address: str
    secret: bytes = field(repr=False)


@frozen(kw_only=True)
class WorkerSpec:
    """One worker to start.

    ``name``, such as ``generation-1``, is unique within a run; replacements of the worker keep it. ``life`` numbers the
    incarnations of a worker, and the controller accepts only the latest one. ``python`` is the interpreter to use
    instead of this one; ``environment`` is added to the variables that the scheduler passes on.

    ``num_tasks`` processes start and end together, each with ``resources``: the worker and the processes that it
    directs. A cluster starts all of them, wherever it has room; on a single machine, the worker starts the others
    itself.
    """

    name: str = field(validator=matches_re(WORKER_NAME))
    controller: ControllerAddress
    life: int = field(default=0, validator=ge(0))
    resources: Resources = field(factory=Resources)
    num_tasks: int = field(default=1, validator=ge(1))
    python: Path | None = None
    environment: Mapping[str, str] = field(factory=dict)

    @property
    def total(self) -> Resources:
        """Return the resources of all processes of the worker together."""
        return self.resources.times(self.num_tasks)


class PlacementState(StrEnum):
    """The state of a worker's process, as far as its scheduler knows."""

    PENDING = "pending"
    """The worker waits for resources."""
    RUNNING = "running"
    ENDED = "ended"
    """The process has ended, with all its children."""
    UNKNOWN = "unknown"
    """The state cannot be determined at present. The scheduler must not start another worker because of it."""


@frozen(kw_only=True)
class PlacementStatus:
    """The status of a worker's process.

    ``where`` is a process id, or a job and its nodes. ``reason`` says why the worker waits or how it ended, with the
    last lines of its log if it failed. ``exit_code`` is negative for a signal, and ``None`` if it is unknown.
    """

    state: PlacementState
    where: str = ""
    reason: str = ""
    exit_code: int | None = None
    is_requeued: bool = False
    """The process ended, and the cluster starts it again without a request from us."""


class Placement(Protocol):
    """A worker that was placed. Its process ends with the block that ``Scheduler.place`` opened."""

    @property
    def spec(self) -> WorkerSpec:
        """Return the specification that was passed to ``Scheduler.place``."""
        ...

    @property
    def log(self) -> Path | None:
        """Return the file that receives the worker's output."""
        ...

    @property
    def status(self) -> PlacementStatus:
        """Return the current status without waiting."""
        ...

    async def wait_ended(self) -> PlacementStatus:
        """Wait until the process has ended completely, and return its final status."""
        ...

    async def stop(self, *, grace: float) -> None:
        """Ask the process to end, kill it after ``grace`` seconds, and return when it is gone. Safe to call again."""
        ...


class Scheduler(Protocol):
    """Starts workers. It is opened with ``async with``, and all its methods are called from one event loop."""

    @property
    def name(self) -> str:
        """Return the name for messages: ``local`` or ``slurm``."""
        ...

    def check(self, name: str, *wanted: WorkerSpec) -> None:
        """Check that the workers ``wanted`` fit at the same time, as far as that can be known; ``name`` is theirs.

        Raises:
            SchedulerError: as ``place``.
        """
        ...

    def place(self, spec: WorkerSpec) -> AbstractAsyncContextManager[Placement]:
        """Start a worker for the duration of a block; it may have to wait for resources first.

        When the block exits, for any reason, the worker is gone.

        Raises:
            SchedulerError: the worker can never be placed; the message names the resources wanted, those that exist,
                and how to fix it.
        """
        ...


RUN_AGAIN = 75
"""The worker has saved its state, and asks to be started again (``EX_TEMPFAIL``)."""

NOT_BEGUN = 76
"""The worker could not start: the controller cannot be reached, or a required directory cannot be written."""

CONTROLLER_LOST = 77
"""The worker lost its controller for longer than its lease, and exited. It is not started again."""
