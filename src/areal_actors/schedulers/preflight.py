"""Whether a worker could do its work here, found out before it begins: ``python -m areal_actors.schedulers.preflight``.

``preflight SECONDS MODULE`` reads the file that ``AREAL_BOOTSTRAP`` names, writes beside it, and introduces itself to
home for up to SECONDS, secret and all; then the process becomes ``python -m MODULE``. If something is amiss it says so
in one line and exits with 76, and the node is free again within seconds: a job whose home has died while it waited in
the queue finds nobody.

A worker that has lost home becomes such a process again (``rejoining``). It goes to a later home alone, and exits with
77 if none comes within SECONDS, if the former one answers, which has done without it, or if its job is not wanted.
"""

from __future__ import annotations

import os
import signal
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import anyio
from attrs import frozen

from areal_actors.core.remote import connect
from areal_actors.errors import ArealError, ConfigError, SchedulerError, Unreachable
from areal_actors.schedulers.base import Home
from areal_actors.schedulers.bootstrap import Bootstrap
from areal_actors.schedulers.rejoining import FORMER_VARIABLE, read_epoch, say_let_go
from areal_actors.schedulers.statuses import HOME_LOST, NOT_BEGUN

__all__ = ["check", "check_directory", "main", "read_home"]

_RETRY_SECONDS = 1.0


def main(arguments: Sequence[str]) -> NoReturn:
    """Check, then become the module that is named."""
    signal.alarm(0)  # it was for whoever this process has been
    seconds, module = float(arguments[0]), arguments[1]
    lost = os.environ.pop(FORMER_VARIABLE, None)
    former = None if lost is None else int(lost)
    try:
        anyio.run(check, os.environ.get("AREAL_BOOTSTRAP", ""), seconds, former)
    except ArealError as error:
        print(f"preflight: {error}", file=sys.stderr, flush=True)  # noqa: T201 - there is no log yet
        sys.exit(NOT_BEGUN if former is None else HOME_LOST)
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments[2:]])  # noqa: S606 - the same interpreter


async def check(bootstrap: str, seconds: float, former: int | None = None) -> None:
    """Raise ``SchedulerError`` with what keeps a worker from its work on this machine.

    Args:
        bootstrap: what ``AREAL_BOOTSTRAP`` names.
        seconds: how long home is looked for; anew whenever a later home is heard of.
        former: the epoch of the home that this worker has lost, and does not go back to.
    """
    read_home(bootstrap)
    check_directory(Path(bootstrap).parent.parent)
    await _Search(path=Path(bootstrap), former=former).run(seconds)


def read_home(bootstrap: str) -> Bootstrap:
    """Where home is, from the file that ``AREAL_BOOTSTRAP`` names.

    Raises:
        SchedulerError: it is not there, is no bootstrap, or others can read it.
    """
    if not bootstrap:
        raise SchedulerError("AREAL_BOOTSTRAP names no file; a worker is started by its home, not by hand")
    path = Path(bootstrap)
    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise SchedulerError(f"others can read {path}, which holds a secret; its mode must be 0600")
        return Bootstrap.from_line(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SchedulerError(
            f"{error.strerror}: {path} on {os.uname().nodename}. Is the run directory (fileroot) on a file system that "
            "all nodes share?"
        ) from None
    except (ValueError, ConfigError) as error:
        raise SchedulerError(f"{path} does not say where home is: {error}") from None


def check_directory(directory: Path) -> None:
    """Raise ``SchedulerError`` if nothing can be written in ``directory``."""
    probe = directory / "exit" / f".probe-{os.uname().nodename}-{os.getpid()}"
    try:
        probe.write_bytes(b"written")
        probe.unlink()
    except OSError as error:
        raise SchedulerError(f"{directory} cannot be written on {os.uname().nodename}: {error.strerror}") from None


@frozen(kw_only=True)
class _Search:
    """For the home that this process belongs to, which may be another one at each look."""

    path: Path
    former: int | None

    async def run(self, seconds: float) -> None:
        """Introduce ourselves at one address after another, again and again. Raises ``SchedulerError``."""
        newest, said, told = 0, "it has no address", read_home(str(self.path))
        with anyio.move_on_after(seconds) as patience:
            while True:
                self._check_wanted()
                heard = self._hear()
                if heard > newest:
                    newest, patience.deadline = heard, anyio.current_time() + seconds
                told = read_home(str(self.path))
                if newest > told.epoch:
                    said = f"home {newest} of this run has not said yet where it is"
                else:
                    said = await _introduce(told.home)
                    if not said and (self.former is None or told.epoch > self.former):
                        return
                    if not said:
                        raise SchedulerError("home answers, and has done without this worker meanwhile")
                await anyio.sleep(_RETRY_SECONDS)
        raise SchedulerError(
            f"home cannot be reached from {os.uname().nodename} within {seconds:g} s, at {', '.join(told.addresses)}: "
            f"{said}. Has the run ended? If not, can nodes connect to that address? (scheduler.address)"
        )

    def _check_wanted(self) -> None:
        if (self._directory / "stop" / self.path.stem).exists():
            raise SchedulerError("this job is not wanted any longer")

    def _hear(self) -> int:
        """The latest epoch. A home that has begun later than the one that we were sent by waits for us to say so."""
        epoch = read_epoch(self._directory)
        if epoch > read_home(str(self.path)).epoch:
            say_let_go(self._directory, self.path.stem, epoch)
        return epoch

    @property
    def _directory(self) -> Path:
        return self.path.parent.parent


async def _introduce(home: Home) -> str:
    """Why none of the addresses is home; empty if one is."""
    node = f"preflight-{os.environ.get('SLURM_JOB_ID', '')}-{os.uname().nodename}-{os.getpid()}"
    said = "it has no address"
    for address in home.addresses:
        try:
            async with connect(address, secret=home.secret, node=node):
                return ""
        except Unreachable as error:
            said = str(error)
    return said


if __name__ == "__main__":
    main(sys.argv[1:])
