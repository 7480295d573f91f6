"""What a scheduler does: it starts a worker with resources, tells how it fares, and sees to it that it ends.

A worker is one process. It is told where home is, connects to it, proves that it belongs there, and asks what to be;
so a scheduler knows nothing of roles, and whatever it starts can be started anywhere. Whether a worker serves is known
at home; whether its process lives, and where, is known here.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from attrs import field, frozen
from attrs.validators import ge, matches_re, optional

__all__ = ["Home", "Placement", "PlacementState", "PlacementStatus", "Resources", "Scheduler", "WorkerSpec"]

WORKER_NAME = r"[a-z][a-z0-9-]{0,62}"
"""Names of workers are parts of file names, of job names and of node names."""


@frozen(kw_only=True)
class Resources:
    """What one worker is given for itself."""

    cpus: int = field(default=1, validator=ge(1))
    memory_mib: int | None = field(default=None, validator=optional(ge(1)))
    """MiB; ``None`` leaves it to the machine or the cluster."""
    gpus: int = field(default=0, validator=ge(0))

    def times(self, number: int) -> Resources:
        """What so many like this are given together."""
        memory = None if self.memory_mib is None else number * self.memory_mib
        return Resources(cpus=number * self.cpus, memory_mib=memory, gpus=number * self.gpus)


@frozen(kw_only=True)
class Home:
    """Where a worker reports, and how it proves that it was sent.

    ``addresses`` are tried one after another. ``secret`` is never put on a command line.
    """

    addresses: tuple[str, ...]
    secret: bytes = field(repr=False)


@frozen(kw_only=True)
class WorkerSpec:
    """One worker to start.

    ``name`` is its own within a run, such as ``generation-1``, and that of its successors. ``life`` counts them: home
    believes the latest alone. ``python`` is the interpreter that runs it, where it is not this one, ``environment`` is
    added to what the scheduler passes on.

    ``num_tasks`` processes live and die together, each with ``resources``: the worker, and those that do what it says.
    A cluster starts all of them, wherever it has room; on one machine, the worker starts the others by itself.
    """

    name: str = field(validator=matches_re(WORKER_NAME))
    home: Home
    life: int = field(default=0, validator=ge(0))
    resources: Resources = field(factory=Resources)
    num_tasks: int = field(default=1, validator=ge(1))
    python: Path | None = None
    environment: Mapping[str, str] = field(factory=dict)
    working_directory: Path | None = None

    @property
    def total(self) -> Resources:
        """What all its processes are given."""
        return self.resources.times(self.num_tasks)


class PlacementState(StrEnum):
    """How a worker's process fares, as far as its scheduler knows."""

    PENDING = "pending"
    """It waits for resources."""
    RUNNING = "running"
    ENDED = "ended"
    """It has ended, and nothing of it is left."""
    UNKNOWN = "unknown"
    """Nobody can say at present. It is no reason to start another one."""


@frozen(kw_only=True)
class PlacementStatus:
    """What is known of a worker's process.

    ``where`` is a process id, or a job and its nodes. ``reason`` says why it waits or how it ended, with the last lines
    of its log if it failed. ``exit_code`` is negative for a signal, and ``None`` where nobody knows it.
    """

    state: PlacementState
    where: str = ""
    reason: str = ""
    exit_code: int | None = None
    is_requeued: bool = False
    """It ended, and the cluster starts it again by itself."""


class Placement(Protocol):
    """One worker that was placed. Its process ends with the block that ``Scheduler.place`` opened."""

    @property
    def spec(self) -> WorkerSpec:
        """What was asked for."""
        ...

    @property
    def log(self) -> Path | None:
        """The file with what the worker says."""
        ...

    @property
    def status(self) -> PlacementStatus:
        """What is known at present, at once."""
        ...

    async def wait_ended(self) -> PlacementStatus:
        """Until nothing of it is left."""
        ...

    async def stop(self, *, grace: float) -> None:
        """Ask it to end, end it after ``grace`` seconds, and return when it is gone. Twice is fine."""
        ...


class Scheduler(Protocol):
    """Starts workers. Opened with ``async with``, all its methods are called from one event loop."""

    @property
    def name(self) -> str:
        """For people: ``local`` or ``slurm``."""
        ...

    def place(self, spec: WorkerSpec) -> AbstractAsyncContextManager[Placement]:
        """Start a worker for the length of a block; it may have to wait for resources first.

        When the block is left, however, the worker is gone. Raises ``SchedulerError`` if it can never be placed: the
        message says what was asked for, what there is, and what to do.
        """
        ...
