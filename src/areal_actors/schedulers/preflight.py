"""Whether a worker could do its work here, found out before it begins: ``python -m areal_actors.schedulers.preflight``.

``preflight SECONDS MODULE`` reads the file that ``AREAL_BOOTSTRAP`` names, writes beside it, and introduces itself to
home for up to SECONDS, secret and all; then the process becomes ``python -m MODULE``. If something is amiss it says so
in one line and exits with 76, and the node is free again within seconds: a job whose home has died while it waited in
the queue finds nobody.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import anyio

from areal_actors.core.remote import connect
from areal_actors.errors import ArealError, SchedulerError, Unreachable
from areal_actors.schedulers.base import Home
from areal_actors.schedulers.statuses import NOT_BEGUN

__all__ = ["check", "check_directory", "main", "read_home"]

_RETRY_SECONDS = 1.0


def main(arguments: Sequence[str]) -> NoReturn:
    """Check, then become the module that is named."""
    seconds, module = float(arguments[0]), arguments[1]
    try:
        anyio.run(check, os.environ.get("AREAL_BOOTSTRAP", ""), seconds)
    except ArealError as error:
        print(f"preflight: {error}", file=sys.stderr, flush=True)  # noqa: T201 - there is no log yet
        sys.exit(NOT_BEGUN)
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments[2:]])  # noqa: S606 - the same interpreter


async def check(bootstrap: str, seconds: float) -> None:
    """Raise ``SchedulerError`` with what keeps a worker from its work on this machine."""
    home = read_home(bootstrap)
    check_directory(Path(bootstrap).parent.parent)
    await _reach(home, seconds)


def read_home(bootstrap: str) -> Home:
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
        words = json.loads(path.read_text(encoding="utf-8"))
        return Home(addresses=tuple(words["addresses"]), secret=bytes.fromhex(words["secret"]))
    except OSError as error:
        raise SchedulerError(
            f"{error.strerror}: {path} on {os.uname().nodename}. Is the run directory (fileroot) on a file system that "
            "all nodes share?"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise SchedulerError(f"{path} does not say where home is: {error!r}") from None


def check_directory(directory: Path) -> None:
    """Raise ``SchedulerError`` if nothing can be written in ``directory``."""
    probe = directory / "exit" / f".probe-{os.uname().nodename}-{os.getpid()}"
    try:
        probe.write_bytes(b"written")
        probe.unlink()
    except OSError as error:
        raise SchedulerError(f"{directory} cannot be written on {os.uname().nodename}: {error.strerror}") from None


async def _reach(home: Home, seconds: float) -> None:
    """Introduce ourselves at one address after another, again and again."""
    node = f"preflight-{os.environ.get('SLURM_JOB_ID', '')}-{os.uname().nodename}-{os.getpid()}"
    said = "it has no address"
    with anyio.move_on_after(seconds):
        while True:
            for address in home.addresses:
                try:
                    async with connect(address, secret=home.secret, node=node):
                        return
                except Unreachable as error:
                    said = str(error)
            await anyio.sleep(_RETRY_SECONDS)
    raise SchedulerError(
        f"home cannot be reached from {os.uname().nodename} within {seconds:g} s, at {', '.join(home.addresses)}: "
        f"{said}. Has the run ended? If not, can nodes connect to that address? (scheduler.address)"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
