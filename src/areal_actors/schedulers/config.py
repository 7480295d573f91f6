"""Settings for the scheduler: which roles of a run have processes of their own, their resources, and who starts them.

A role that is not configured runs in the controller process; without any configured role, everything does.
``open_scheduler`` opens the scheduler of the configured type. Another type is a row of ``SchedulerType`` and of
``_SCHEDULERS``, and a field of ``SchedulerConfig`` with the name of the type.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from attrs import Attribute, field, fields, frozen
from attrs.validators import ge, gt, optional

from areal_actors.domain import Role
from areal_actors.lib.settings import COMMON, constant
from areal_actors.schedulers.base import Resources, Scheduler
from areal_actors.schedulers.slurm.settings import SlurmConfig


class SchedulerType(StrEnum):
    """The scheduler that starts workers."""

    LOCAL = "local"
    """Child processes on this machine."""
    SLURM = "slurm"
    """Jobs of a cluster."""


_SCHEDULERS = {
    SchedulerType.LOCAL: "areal_actors.schedulers.local:LocalScheduler",
    SchedulerType.SLURM: "areal_actors.schedulers.slurm:SlurmScheduler",
}
"""The class of each type, imported when it is opened."""


@frozen(kw_only=True)
class RoleConfig:
    """Resources for the processes of one role."""

    replicas: int = field(default=1, validator=ge(1))
    """Number of processes that share the work; only proxy and generation may have several."""
    cpus: int = field(default=1, validator=ge(1))
    memory_mib: int | None = field(default=None, validator=optional(ge(1)))
    """MiB reserved for each process."""
    gpus: int = field(default=0, validator=ge(0))
    python: Path | None = None
    """The interpreter, if it is not that of the run; areal_actors must be installed in it as well."""
    environment: Mapping[str, str] = field(factory=dict)
    """Variables added to those that the process inherits."""

    @property
    def resources(self) -> Resources:
        """Return the resources that the scheduler counts for one process."""
        return Resources(cpus=self.cpus, memory_mib=self.memory_mib, gpus=self.gpus)


def _check_alone(_: object, attribute: Attribute[Any], value: RoleConfig | None) -> None:
    if value is not None and value.replicas != 1:
        raise ValueError(
            f"'replicas' of {attribute.name} must be 1: it owns what cannot be owned twice. "
            "Give it more cpus; of proxy and generation there may be several"
        )


@frozen(kw_only=True)
class RolesConfig:
    """Roles that run in worker processes; all others run in the controller process."""

    proxy: RoleConfig | None = None
    """HTTP servers for agents; several share a port."""
    sessions: RoleConfig | None = field(default=None, validator=_check_alone)
    """Sessions, capacity, exports, intake and accounts: everything that shares the journal."""
    generation: RoleConfig | None = None
    """Engines; each session is pinned to one of them."""
    trainer: RoleConfig | None = field(default=None, validator=_check_alone)
    rollout: RoleConfig | None = field(default=None, validator=_check_alone)
    """The process that runs the agent of rollout.workflow."""

    @property
    def placed(self) -> dict[Role, RoleConfig]:
        """Return the configured roles, with their settings."""
        found = {Role(one.name): getattr(self, one.name) for one in fields(RolesConfig)}
        return {role: config for role, config in found.items() if config is not None}


@frozen(kw_only=True)
class RestartsConfig:
    """How often a worker that ended is replaced before the run fails."""

    max: int = field(default=5, validator=ge(0))
    """Replacements within the window: for each proxy, for each engine, and for all other workers together."""
    window_seconds: float = constant(3600.0)


@frozen(kw_only=True)
class LocalConfig:
    """Resources of this machine for workers. The controller process itself is not counted."""

    cpus: int | None = field(default=None, validator=optional(ge(1)))
    """null: all CPUs that this process may use."""
    memory_mib: int | None = field(default=None, validator=optional(ge(1)))
    """null: the machine's memory."""
    gpus: tuple[str, ...] | None = None
    """Names as in CUDA_VISIBLE_DEVICES; null: the devices in that variable, or else those in /dev."""
    oversubscribe: bool = False
    """Let workers share resources: no worker waits, and GPUs are assigned in turn."""


@frozen(kw_only=True)
class SchedulerConfig:
    """Settings for placing the roles of a run."""

    type: SchedulerType = field(default=SchedulerType.LOCAL, metadata=COMMON)
    """local starts child processes; slurm submits a job for each worker, on a file system shared with its nodes."""
    roles: RolesConfig = field(factory=RolesConfig)
    restarts: RestartsConfig = field(factory=RestartsConfig)
    start_seconds: float = field(default=300.0, validator=gt(0))
    """How long a running worker may take until it serves requests."""
    gather_seconds: float = field(default=1800.0, validator=gt(0))
    """How long roles may hold resources while other roles of the run wait for theirs. After that, all of them release
    their resources and ask again later; otherwise two runs that want more than there is would wait for each other
    indefinitely."""
    stop_seconds: float = constant(3.0)
    """How long a worker may take to exit when it is asked to."""
    lease_seconds: float = field(default=60.0, validator=gt(0))
    """A worker that has not reached the controller for this long exits, and is replaced."""
    hang_seconds: float = constant(30.0)
    """A worker on this machine that serves but has not answered for this long is killed and replaced. One that was
    stopped by a signal (SIGSTOP) is killed after 5 s. On a cluster, where a network may be away for a while, the lease
    decides."""
    address: str | None = None
    """Address on which the controller listens for workers: tcp://HOST:PORT, with port 0 for any free port, or
    unix:/PATH. null: a unix socket in a private directory, or, for workers on other machines, the address that this
    host resolves for itself."""
    local: LocalConfig = field(factory=LocalConfig)
    slurm: SlurmConfig = field(factory=SlurmConfig)


def open_scheduler(config: SchedulerConfig, *, directory: Path, logs: Path) -> AbstractAsyncContextManager[Scheduler]:
    """Open the scheduler of a run in ``directory``. Workers on this machine write their output to ``logs``.

    Raises ``SchedulerError`` on entering if workers cannot be started here.
    """
    module, _, name = _SCHEDULERS[config.type].partition(":")
    opened = getattr(import_module(module), name).open(getattr(config, config.type), directory=directory, logs=logs)
    return cast("AbstractAsyncContextManager[Scheduler]", opened)
