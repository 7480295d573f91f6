"""The plan of a run: its actors, the roles that open them, what each role depends on, and where each role runs.

A run is composed once. Each role (``domain.Role``) is opened by its opener (``openers``), in a worker if the plan
places it, and in the controller process otherwise. A run in one process is the plan that places no role.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol, TypeVar

from attrs import evolve, field, frozen

from areal_actors.config import RunConfig
from areal_actors.dashboard import RunDirectory
from areal_actors.domain import Role
from areal_actors.kernel import Ref
from areal_actors.messages import Endpoint, ServiceOpened
from areal_actors.proxy import ProxyConfig
from areal_actors.rollouts.runner import Agents
from areal_actors.run.conversations import SupervisedData
from areal_actors.run.signals import RunControl
from areal_actors.schedulers.config import RoleConfig

P = TypeVar("P")

ACTOR_ROLES: Mapping[str, Role | None] = {
    "directory": None,
    "progress": None,
    "generation": None,
    "sessions": Role.SESSIONS,
    "exports": Role.SESSIONS,
    "capacity": Role.SESSIONS,
    "intake": Role.SESSIONS,
    "accounts": Role.SESSIONS,
    "trainer": Role.TRAINER,
    "weights": Role.TRAINER,
    "rollouts": Role.ROLLOUT,
    "proxy": Role.PROXY,
}
"""The role that opens each actor; ``None`` is the controller. Engines in workers are reached through its router."""

DEPENDENCIES: Mapping[Role, tuple[Role, ...]] = {
    Role.TRAINER: (Role.SESSIONS, Role.ROLLOUT),
    Role.ROLLOUT: (Role.SESSIONS,),
    Role.PROXY: (Role.SESSIONS,),
    Role.SESSIONS: (),
    Role.GENERATION: (),
}
"""The roles whose actors a role uses, in addition to the controller's. Roles of one process close in this order."""

REPLICA = "replica"
"""The name under which a worker exposes the actor of its engine."""

PREEMPTED = "the trainer's worker was told to leave"
"""The stop reason of a trainer that will continue in another worker."""


class Finder(Protocol):
    """A source of refs."""

    async def __call__(self, protocol: type[P], name: str, /) -> Ref[P]:
        """Return a ref to the actor of this name in any process. If it is opened in this process, wait for it."""
        ...


def has_rollouts(config: RunConfig, *, is_service: bool) -> bool:
    """Return whether the configuration of this run names an agent to run.

    A service has one only to evaluate on held-out problems, and so has a run that only trains on conversations.
    """
    can_evaluate = bool(config.held_out_sets) and any(each.workflow is not None for each in config.agents.values())
    return can_evaluate or (config.has_rollouts and not is_service)


@frozen(kw_only=True)
class PlacedRole:
    """A role that runs in workers: their resources, and the number of processes of each."""

    config: RoleConfig
    num_tasks: int = 1


@frozen(kw_only=True)
class RunPlan:
    """A run: its settings, the objects of the caller, and where each role runs.

    ``agents`` are run in the controller process, if the rollout role is there. ``supervised`` are the conversations of
    a phase sft, if they are loaded already. ``admin_key`` is used if the configuration has none. ``announce`` is called
    once agents are answered, and returns what the display shows. Only with ``is_handling_signals`` does the run own its
    process: it then handles SIGINT and SIGTERM, and tunes the garbage collector. ``control`` is of a program that holds
    the run and may stop it.
    """

    config: RunConfig
    directory: RunDirectory
    agents: Agents | None = None
    supervised: SupervisedData | None = None
    is_service: bool = False
    resume: bool = False
    admin_key: str | None = field(default=None, repr=False)
    announce: Callable[[Endpoint], Awaitable[ServiceOpened]] | None = None
    is_handling_signals: bool = False
    control: RunControl | None = None

    @property
    def has_rollouts(self) -> bool:
        """Whether the run has a runner of agents: one passed in by the caller, or one that the configuration names."""
        return self.agents is not None or has_rollouts(self.config, is_service=self.is_service)

    @property
    def placed(self) -> dict[Role, PlacedRole]:
        """The roles that run in workers."""
        return {
            role: PlacedRole(config=placed, num_tasks=self.config.num_tasks(role))
            for role, placed in self.config.scheduler.roles.placed.items()
            if role is not Role.ROLLOUT or self.has_rollouts
        }

    @property
    def local_roles(self) -> tuple[Role, ...]:
        """The roles that run in the controller process, in the order in which they are closed."""
        return tuple(role for role in DEPENDENCIES if role not in self.placed)

    @property
    def proxy(self) -> ProxyConfig:
        """The proxy's settings, with the key that agents know from before a restart."""
        proxy = self.config.proxy
        return evolve(proxy, admin_key=proxy.admin_key or self.admin_key)
