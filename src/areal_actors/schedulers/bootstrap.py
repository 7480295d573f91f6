"""How a worker finds its controller: with a bootstrap message at first, and by the run's epoch after it lost one.

The message has its name, its incarnation, the controller's addresses and the shared secret. It is one line of JSON, on
standard input or in a file that only its owner can read and that ``AREAL_BOOTSTRAP`` names. It is never passed on a
command line, which every user of a machine can read. The worker requests everything else from the controller.

A worker that has lost its controller may keep its resources and join the run's next controller::

    controller                     the directory that controller and workers share
    ──────────                     ───────────────────────────────────────────────
    begins its epoch           ──▶ epoch                    one more than ever before
                                   let-go/<job>.<n>.<rank> ◀── a process that has released its role
    starts a new incarnation   ──▶ bootstrap/<job>.json     its address, its secret, its epoch

It releases its role when its lease expires or when it reads a later epoch, whichever comes first. Its process is then
replaced by a fresh one, the preflight, in which nothing of the role is left. The preflight confirms this in ``let-go``,
and waits for a controller of a later epoch, the only one to which it connects. ``slurm.takeover`` implements the
controller's side.

The functions here block on a file system that may be slow.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from math import ceil
from pathlib import Path
from typing import NoReturn

from attrs import evolve, field, frozen

from areal_actors.errors import ConfigError
from areal_actors.lib.atomic_write import atomic_write
from areal_actors.schedulers.base import ControllerAddress, WorkerSpec

__all__ = [
    "BOOTSTRAP_VARIABLE",
    "FORMER_VARIABLE",
    "Bootstrap",
    "confirm_release",
    "count_releases",
    "is_superseded",
    "read_bootstrap",
    "read_epoch",
    "rejoin_next_controller",
]

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
    addresses: tuple[str, ...]
    secret: bytes = field(repr=False)
    rank: int = 0
    num_tasks: int = 1
    num_restarts: int = 0
    """Number of restarts by the cluster before this message was written. ``life`` is the incarnation after that many.
    """
    epoch: int = 0
    """Number of the run's controller, counted from 1. A worker of one controller ignores messages of earlier ones."""
    rejoin_seconds: float = 0.0
    """How long a worker that has lost its controller looks for the next one. 0: the worker exits at once."""

    @classmethod
    def of(cls, spec: WorkerSpec, *, num_restarts: int = 0, epoch: int = 0, rejoin_seconds: float = 0.0) -> Bootstrap:
        """Create the bootstrap message for the worker described by ``spec``."""
        return cls(
            name=spec.name,
            life=spec.life,
            addresses=spec.controller.addresses,
            secret=spec.controller.secret,
            num_restarts=num_restarts,
            epoch=epoch,
            rejoin_seconds=rejoin_seconds,
        )

    @property
    def node(self) -> str:
        """Return the node name with which this process introduces itself."""
        return self.name_of(self.rank)

    def name_of(self, rank: int) -> str:
        """Return the node name of the process with this rank."""
        return f"{self.name}-rank-{rank}" if rank else self.name

    @property
    def controller(self) -> ControllerAddress:
        """Return the controller's addresses and secret."""
        return ControllerAddress(addresses=self.addresses, secret=self.secret)

    def to_line(self) -> str:
        """Return the message as one line of JSON, with a newline at its end."""
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
        """Parse the output of ``to_line``.

        Args:
            line: one line of JSON.
            num_restarts: restarts of the job by the cluster until now. Each one after those counted in the message
                advances ``life`` by one. ``None``: as many as in the message.

        Raises:
            ConfigError: the line is not a bootstrap message.
        """
        try:
            words = json.loads(line)
            known = int(words.get("num_restarts", 0))
            restarts = known if num_restarts is None else num_restarts
            return cls(
                name=str(words["name"]),
                # Each restart by the cluster since the message was written is another incarnation.
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
    """Return this process's bootstrap message, from ``line`` or from the file that ``AREAL_BOOTSTRAP`` names.

    The variable takes precedence over ``line``. Rank, number of tasks and restarts come from Slurm's environment
    variables.

    Raises:
        ConfigError: the file cannot be read, or the message cannot be parsed.
    """
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


FORMER_VARIABLE = "AREAL_FORMER_EPOCH"
"""Variable with the epoch of the controller that a process has lost."""
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def read_epoch(directory: Path) -> int:
    """Return the epoch of the latest controller, or 0 if there was none or the file cannot be read at present."""
    try:
        return int((directory / "epoch").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0


def is_superseded(bootstrap: Bootstrap) -> bool:
    """Return whether a controller newer than the one in ``bootstrap`` has started."""
    path = os.environ.get(BOOTSTRAP_VARIABLE)
    return path is not None and read_epoch(Path(path).parent.parent) > bootstrap.epoch


def confirm_release(directory: Path, job: str, epoch: int, environment: Mapping[str, str] | None = None) -> None:
    """Confirm to the controller of ``epoch`` that this process no longer works for an earlier one.

    The file name contains the number of the job's restarts, because a process that the cluster has given up may still
    be running.
    """
    environment = os.environ if environment is None else environment
    num_restarts, rank = environment.get("SLURM_RESTART_COUNT") or "0", environment.get("SLURM_PROCID") or "0"
    path = directory / "let-go" / f"{job}.{num_restarts}.{rank}"
    # Atomic, because the controller may read the directory at any moment.
    atomic_write(path, f"{epoch}\n")


def count_releases(directory: Path, epoch: int) -> Counter[tuple[str, int]]:
    """Return how many processes have confirmed to the controller of ``epoch``, by job and number of restarts."""
    found: Counter[tuple[str, int]] = Counter()
    for path in (directory / "let-go").glob("aa-*.*.*"):
        job, num_restarts, rank = path.name.rsplit(".", 2)
        try:
            if num_restarts.isdecimal() and rank.isdecimal() and int(path.read_text(encoding="ascii")) == epoch:
                found[job, int(num_restarts)] += 1
        except (OSError, ValueError):
            continue
    return found


def rejoin_next_controller(bootstrap: Bootstrap, module: str) -> NoReturn:
    """Replace this process by the preflight of ``module``, which joins only a controller of a later epoch.

    No threads, devices, memory or open files of this process survive the exec. ``bootstrap.epoch`` is the epoch lost.
    """
    # Ignored signals stay ignored across exec.
    for number in _IGNORED:
        signal.signal(number, signal.SIG_DFL)
    for path in Path("/proc/self/fd").iterdir():
        # Devices, sockets and files close at the exec; only the standard streams remain.
        if int(path.name) > 2:  # noqa: PLR2004 - the standard streams
            # One of them was that of the directory listing, which is closed by now.
            with suppress(OSError):
                os.set_inheritable(int(path.name), False)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.environ[FORMER_VARIABLE] = str(bootstrap.epoch)
    seconds = str(ceil(bootstrap.rejoin_seconds))
    command = [sys.executable, "-m", "areal_actors.schedulers.preflight", seconds, module]
    os.execv(sys.executable, command)  # noqa: S606 - the same interpreter
