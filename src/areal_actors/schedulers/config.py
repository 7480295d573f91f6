"""Which roles of a run live in processes of their own, with what, and who starts them.

A role that is not named lives in the process of the run itself, at home; with none named, everything does.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from attrs import Attribute, field, fields, frozen
from attrs.validators import ge, gt, optional

from areal_actors.domain import Role
from areal_actors.schedulers.base import Resources
from areal_actors.schedulers.slurm.settings import SlurmConfig

__all__ = ["LocalConfig", "RestartsConfig", "RoleConfig", "RolesConfig", "SchedulerConfig", "SchedulerType"]


class SchedulerType(StrEnum):
    """Who starts workers."""

    LOCAL = "local"
    """Child processes on this machine."""
    SLURM = "slurm"
    """Jobs of a cluster."""


@frozen(kw_only=True)
class RoleConfig:
    """What the processes of one role are given."""

    replicas: int = field(default=1, validator=ge(1))
    """Processes that share the work; of proxy and generation there may be several."""
    cpus: int = field(default=1, validator=ge(1))
    memory_mib: int | None = field(default=None, validator=optional(ge(1)))
    """MiB that are set aside for each."""
    gpus: int = field(default=0, validator=ge(0))
    python: Path | None = None
    """The interpreter, where it is not that of the run; it has to have areal_actors, too."""
    environment: Mapping[str, str] = field(factory=dict)
    """Added to what the process inherits."""
    working_directory: Path | None = None

    @property
    def resources(self) -> Resources:
        """What the scheduler counts, for one process."""
        return Resources(cpus=self.cpus, memory_mib=self.memory_mib, gpus=self.gpus)


def _check_alone(_: object, attribute: Attribute[Any], value: RoleConfig | None) -> None:
    if value is not None and value.replicas != 1:
        raise ValueError(
            f"'replicas' of {attribute.name} must be 1: it owns what cannot be owned twice. "
            "Give it more cpus; of proxy and generation there may be several"
        )


@frozen(kw_only=True)
class RolesConfig:
    """The roles that live in processes of their own; all others live at home."""

    proxy: RoleConfig | None = None
    """HTTP for agents; several share a port."""
    sessions: RoleConfig | None = field(default=None, validator=_check_alone)
    """Sessions, capacity, exports, intake and accounts: what shares the journal."""
    generation: RoleConfig | None = None
    """Engines; sessions are pinned to one of them."""
    trainer: RoleConfig | None = field(default=None, validator=_check_alone)
    rollout: RoleConfig | None = field(default=None, validator=_check_alone)
    """Who runs the agent of rollout.workflow."""

    @property
    def placed(self) -> dict[Role, RoleConfig]:
        """Those that are named."""
        found = {Role(one.name): getattr(self, one.name) for one in fields(RolesConfig)}
        return {role: config for role, config in found.items() if config is not None}


@frozen(kw_only=True)
class RestartsConfig:
    """How often a process that ended is replaced before the run gives up."""

    max: int = field(default=5, validator=ge(0))
    """Replacements of each proxy, of each engine, and of all the others together, within the window."""
    window_seconds: float = field(default=3600.0, validator=gt(0))


@frozen(kw_only=True)
class LocalConfig:
    """What this machine has for workers. What lives at home is not counted."""

    cpus: int | None = field(default=None, validator=optional(ge(1)))
    """null is all that this process may use."""
    memory_mib: int | None = field(default=None, validator=optional(ge(1)))
    """null is what the machine has."""
    gpus: tuple[str, ...] | None = None
    """Names as in CUDA_VISIBLE_DEVICES; null is what is found there, or else in /dev."""
    oversubscribe: bool = False
    """Whether workers may share what there is: none waits, and GPUs are handed out in turn."""


@frozen(kw_only=True)
class SchedulerConfig:
    """Where the parts of a run live."""

    type: SchedulerType = SchedulerType.LOCAL
    """local starts child processes; slurm submits a job for each worker, on a file system shared with its nodes."""
    roles: RolesConfig = field(factory=RolesConfig)
    restarts: RestartsConfig = field(factory=RestartsConfig)
    start_seconds: float = field(default=300.0, validator=gt(0))
    """How long a worker that runs may take until it serves."""
    gather_seconds: float = field(default=1800.0, validator=gt(0))
    """How long roles may hold what they have while others of the run wait for room. Then all give back what they have,
    and ask again later: two runs that want more than there is would wait for each other for ever."""
    stop_seconds: float = field(default=3.0, validator=ge(0))
    """How long a worker may take to leave when it is told to."""
    lease_seconds: float = field(default=60.0, validator=gt(0))
    """A worker that has not reached home for so long ends itself, and is replaced."""
    address: str | None = None
    """Where home listens for workers: tcp://HOST:PORT with port 0 for any, or unix:/PATH. null is a unix socket in a
    private directory, or, for workers on other machines, the address by which this host knows itself."""
    local: LocalConfig = field(factory=LocalConfig)
    slurm: SlurmConfig = field(factory=SlurmConfig)
