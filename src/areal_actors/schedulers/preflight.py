"""Check whether a worker can run on this node before it starts: ``python -m areal_actors.schedulers.preflight``.

``preflight SECONDS MODULE`` reads the file that ``AREAL_BOOTSTRAP`` names, writes a probe file in the run's directory,
and authenticates to the controller, trying for up to SECONDS. Then the process becomes ``python -m MODULE``. If a check
fails, it prints one line and exits with status 76, so that the node is free again within seconds, for example when the
controller died while the job waited in the queue.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import anyio

from areal_actors.errors import ArealError, SchedulerError, Unreachable
from areal_actors.kernel.remote import connect
from areal_actors.schedulers.base import NOT_BEGUN, ControllerAddress
from areal_actors.schedulers.bootstrap import BOOTSTRAP_VARIABLE, read_bootstrap

_RETRY_SECONDS = 1.0


def main(arguments: Sequence[str]) -> NoReturn:
    """Run the checks, then replace this process by the module named in ``arguments``.

    Exits with status 76 if a check fails.
    """
    seconds, module = float(arguments[0]), arguments[1]
    try:
        anyio.run(check, os.environ.get(BOOTSTRAP_VARIABLE, ""), seconds)
    except ArealError as error:
        print(f"preflight: {error}", file=sys.stderr, flush=True)  # noqa: T201 - there is no log yet
        sys.exit(NOT_BEGUN)
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments[2:]])  # noqa: S606 - the same interpreter


async def check(bootstrap: str, seconds: float) -> None:
    """Raise ``SchedulerError`` or ``ConfigError`` if a worker cannot do its work on this machine.

    Args:
        bootstrap: the value of ``AREAL_BOOTSTRAP``.
        seconds: how long to look for the controller.
    """
    told = read_bootstrap("", {BOOTSTRAP_VARIABLE: bootstrap})
    check_directory(Path(bootstrap).parent.parent)
    said = "it does not answer"
    with anyio.move_on_after(seconds):
        while said := await _find_obstacle(told.controller):  # noqa: ASYNC110 - it is another process
            await anyio.sleep(_RETRY_SECONDS)
        return
    raise SchedulerError(
        f"the controller cannot be reached from {os.uname().nodename} within {seconds:g} s, at "
        f"{told.address}: {said}. Has the run ended? If not, can nodes connect to that address? "
        "(scheduler.address)"
    )


def check_directory(directory: Path) -> None:
    """Raise ``SchedulerError`` if this node cannot write to ``directory``."""
    # One name per host and process, because many jobs may run this check at the same time.
    probe = directory / "exit" / f".probe-{os.uname().nodename}-{os.getpid()}"
    try:
        probe.write_bytes(b"written")
        probe.unlink()
    except OSError as error:
        raise SchedulerError(f"{directory} cannot be written on {os.uname().nodename}: {error.strerror}") from None


async def _find_obstacle(controller: ControllerAddress) -> str:
    """Return why the controller cannot be reached, or an empty string if it answers."""
    node = f"preflight-{os.environ.get('SLURM_JOB_ID', '')}-{os.uname().nodename}-{os.getpid()}"
    try:
        async with connect(controller.address, secret=controller.secret, node=node):
            return ""
    except Unreachable as error:
        return str(error)


if __name__ == "__main__":
    main(sys.argv[1:])
