"""How a worker finds its controller: the bootstrap message.

The message has its name, its incarnation, the controller's address and the shared secret. It is one line of JSON, on
standard input or in a file that only its owner can read and that ``AREAL_BOOTSTRAP`` names. It is never passed on a
command line, which every user of a machine can read. The worker requests everything else from the controller.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from attrs import evolve, field, frozen

from areal_actors.errors import ConfigError
from areal_actors.schedulers.base import ControllerAddress, WorkerSpec

BOOTSTRAP_VARIABLE = "AREAL_BOOTSTRAP"
_RESTARTS_VARIABLE = "SLURM_RESTART_COUNT"
"""Variable with the number of times that the cluster has restarted the job; each restart is another incarnation."""
_RANK_VARIABLE, _TASKS_VARIABLE = "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"
"""Variables with the rank of this process among those that the cluster started together, and with their number."""


@frozen(kw_only=True)
class Bootstrap:
    """The first message to a worker.

    All ``num_tasks`` processes of a job receive the same message. The process with ``rank`` 0 is the worker; the others
    follow its instructions.
    """

    name: str
    life: int
    address: str
    secret: bytes = field(repr=False)
    rank: int = 0
    num_tasks: int = 1

    @classmethod
    def of(cls, spec: WorkerSpec) -> Bootstrap:
        """Create the bootstrap message for the worker described by ``spec``."""
        told = spec.controller
        return cls(name=spec.name, life=spec.life, address=told.address, secret=told.secret)

    @property
    def node(self) -> str:
        """Return the node name with which this process introduces itself."""
        return self.name_of(self.rank)

    def name_of(self, rank: int) -> str:
        """Return the node name of the process with this rank."""
        return f"{self.name}-rank-{rank}" if rank else self.name

    @property
    def controller(self) -> ControllerAddress:
        """Return the controller's address and secret."""
        return ControllerAddress(address=self.address, secret=self.secret)

    def to_line(self) -> str:
        """Return the message as one line of JSON, with a newline at its end."""
        words = {
            "name": self.name,
            "life": self.life,
            "address": self.address,
            "secret": self.secret.hex(),
        }
        return json.dumps(words) + "\n"

    @classmethod
    def from_line(cls, line: str, *, num_restarts: int = 0) -> Bootstrap:
        """Parse the output of ``to_line``. Each restart of the job by the cluster is another incarnation.

        Raises:
            ConfigError: the line is not a bootstrap message.
        """
        try:
            words = json.loads(line)
            return cls(
                name=str(words["name"]),
                life=int(words["life"]) + num_restarts,
                address=str(words["address"]),
                secret=bytes.fromhex(words["secret"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                "The first words to a worker cannot be read; workers are started by the scheduler of a run "
                f"(areal-actors train, with scheduler.roles), not by hand. {type(error).__name__}: {error}"
            ) from error


def read_bootstrap(line: str, environment: Mapping[str, str] | None = None) -> Bootstrap:
    """Return this process's bootstrap message, from ``line`` or from the file that ``AREAL_BOOTSTRAP`` names.

    The variable takes precedence over ``line``. Rank, number of tasks and restarts come from Slurm's environment
    variables.

    Raises:
        ConfigError: the file cannot be read, can be read by other users, or is not a message.
    """
    environment = os.environ if environment is None else environment
    path = environment.get(BOOTSTRAP_VARIABLE)
    if path is None:
        return Bootstrap.from_line(line)
    try:
        if stat.S_IMODE(Path(path).stat().st_mode) & 0o077:
            raise ConfigError(f"others can read {path}, which holds a secret; its mode must be 0600")
        line = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{error.strerror}: {path or BOOTSTRAP_VARIABLE} on {os.uname().nodename}. Is the run directory (fileroot) "
            "on a file system that all nodes share?"
        ) from error
    told = Bootstrap.from_line(line, num_restarts=int(environment.get(_RESTARTS_VARIABLE) or 0))
    return evolve(
        told, rank=int(environment.get(_RANK_VARIABLE) or 0), num_tasks=int(environment.get(_TASKS_VARIABLE) or 1)
    )
