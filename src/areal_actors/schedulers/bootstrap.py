"""What a worker is given to begin with: its name, its life, where home is, and the secret that opens it.

It comes as one line of JSON, on standard input or in a file that only its owner can read and that ``AREAL_BOOTSTRAP``
names; never on a command line, which everybody on a machine can read. All else the worker asks for at home.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from attrs import evolve, field, frozen

from areal_actors.errors import ConfigError
from areal_actors.schedulers.base import Home, WorkerSpec

__all__ = ["BOOTSTRAP_VARIABLE", "Bootstrap", "read_bootstrap"]

BOOTSTRAP_VARIABLE = "AREAL_BOOTSTRAP"
_RESTARTS_VARIABLE = "SLURM_RESTART_COUNT"
"""How often the cluster itself has started the job again: each time is another life."""
_RANK_VARIABLE, _TASKS_VARIABLE = "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"
"""Which of the processes this is that the cluster has started together, and how many there are."""


@frozen(kw_only=True)
class Bootstrap:
    """The first words to a worker.

    Of ``num_tasks`` processes that are told the same, the first is the worker; each of the others, counted by ``rank``,
    does what it says.
    """

    name: str
    life: int
    addresses: tuple[str, ...]
    secret: bytes = field(repr=False)
    rank: int = 0
    num_tasks: int = 1
    num_restarts: int = 0
    """How often the cluster had started it already when this was said. ``life`` is the one after so many."""
    epoch: int = 0
    """Which home of the run this is, counted from 1. Who belongs to one takes no word of an earlier one."""
    rejoin_seconds: float = 0.0
    """How long the worker looks for the next home when it has lost this one. 0: it ends itself at once."""

    @classmethod
    def of(cls, spec: WorkerSpec, *, num_restarts: int = 0, epoch: int = 0, rejoin_seconds: float = 0.0) -> Bootstrap:
        """Those to the worker of ``spec``."""
        return cls(
            name=spec.name,
            life=spec.life,
            addresses=spec.home.addresses,
            secret=spec.home.secret,
            num_restarts=num_restarts,
            epoch=epoch,
            rejoin_seconds=rejoin_seconds,
        )

    @property
    def node(self) -> str:
        """How this process introduces itself."""
        return self.name_of(self.rank)

    def name_of(self, rank: int) -> str:
        """How the process of this rank does."""
        return f"{self.name}-rank-{rank}" if rank else self.name

    @property
    def home(self) -> Home:
        """Where to report."""
        return Home(addresses=self.addresses, secret=self.secret)

    def to_line(self) -> str:
        """One line of JSON, with its end."""
        words = {
            "name": self.name,
            "life": self.life,
            "addresses": list(self.addresses),
            "secret": self.secret.hex(),
            "num_restarts": self.num_restarts,
            "epoch": self.epoch,
            "rejoin_seconds": self.rejoin_seconds,
        }
        return json.dumps(words) + "\n"

    @classmethod
    def from_line(cls, line: str, *, num_restarts: int | None = None) -> Bootstrap:
        """Read what ``to_line`` wrote, for the life after so many restarts. Raises ``ConfigError``."""
        try:
            words = json.loads(line)
            known = int(words.get("num_restarts", 0))
            restarts = known if num_restarts is None else num_restarts
            return cls(
                name=str(words["name"]),
                life=int(words["life"]) + restarts - known,
                addresses=tuple(map(str, words["addresses"])),
                secret=bytes.fromhex(words["secret"]),
                num_restarts=restarts,
                epoch=int(words.get("epoch", 0)),
                rejoin_seconds=float(words.get("rejoin_seconds", 0.0)),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                "The first words to a worker cannot be read; workers are started by the scheduler of a run "
                f"(areal-actors train, with scheduler.roles), not by hand. {type(error).__name__}: {error}"
            ) from error


def read_bootstrap(line: str, environment: Mapping[str, str] | None = None) -> Bootstrap:
    """What this process is given: by ``line``, unless a variable names a file. Raises ``ConfigError``."""
    environment = os.environ if environment is None else environment
    path = environment.get(BOOTSTRAP_VARIABLE)
    if path is None:
        return Bootstrap.from_line(line)
    try:
        line = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{BOOTSTRAP_VARIABLE} names {path}, which cannot be read: {error}") from error
    told = Bootstrap.from_line(line, num_restarts=int(environment.get(_RESTARTS_VARIABLE) or 0))
    return evolve(
        told, rank=int(environment.get(_RANK_VARIABLE) or 0), num_tasks=int(environment.get(_TASKS_VARIABLE) or 1)
    )
