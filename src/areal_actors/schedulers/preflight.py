"""Check whether a worker can run on this node before it starts: ``python -m areal_actors.schedulers.preflight``.

``preflight SECONDS MODULE`` reads the file that ``AREAL_BOOTSTRAP`` names, writes a probe file in the run's directory,
and authenticates to the controller, trying for up to SECONDS. Then the process becomes ``python -m MODULE``. If a check
fails, it prints one line and exits with status 76, so that the node is free again within seconds, for example when the
controller died while the job waited in the queue.

A worker that has lost its controller becomes a preflight process again (``bootstrap``). It then connects only to a
controller of a later epoch. It exits with status 77 if none appears within SECONDS, if the former controller answers
(it has already replaced this worker), or if the job is no longer wanted.
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

from areal_actors.errors import ArealError, ConfigError, SchedulerError, Unreachable
from areal_actors.kernel.remote import connect
from areal_actors.schedulers.base import CONTROLLER_LOST, NOT_BEGUN, ControllerAddress
from areal_actors.schedulers.bootstrap import FORMER_VARIABLE, Bootstrap, confirm_release, read_epoch

__all__ = ["check", "check_directory", "main", "read_bootstrap_file"]

_RETRY_SECONDS = 1.0


def main(arguments: Sequence[str]) -> NoReturn:
    """Run the checks, then replace this process by the module named in ``arguments``.

    Exits with status 76 if a check fails, or 77 if this worker had lost its controller before.
    """
    # The worker may have set an alarm before exec, which survives it.
    signal.alarm(0)
    seconds, module = float(arguments[0]), arguments[1]
    # Set by rejoin_next_controller() before its exec. The module that replaces this process must not inherit it.
    lost = os.environ.pop(FORMER_VARIABLE, None)
    former = None if lost is None else int(lost)
    try:
        anyio.run(check, os.environ.get("AREAL_BOOTSTRAP", ""), seconds, former)
    except ArealError as error:
        print(f"preflight: {error}", file=sys.stderr, flush=True)  # noqa: T201 - there is no log yet
        sys.exit(NOT_BEGUN if former is None else CONTROLLER_LOST)
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments[2:]])  # noqa: S606 - the same interpreter


async def check(bootstrap: str, seconds: float, former: int | None = None) -> None:
    """Raise ``SchedulerError`` if a worker cannot do its work on this machine.

    Args:
        bootstrap: the value of ``AREAL_BOOTSTRAP``.
        seconds: how long to look for the controller; the time starts again when a later epoch appears.
        former: the epoch of the controller that this worker has lost, and to which it must not return.
    """
    newest, said, told = 0, "it has no address", read_bootstrap_file(bootstrap)
    path, directory = Path(bootstrap), Path(bootstrap).parent.parent
    check_directory(directory)
    with anyio.move_on_after(seconds) as patience:
        while True:
            if (directory / "stop" / path.stem).exists():
                raise SchedulerError("this job is not wanted any longer")
            # The controller may have changed at each attempt.
            epoch, told = read_epoch(directory), read_bootstrap_file(bootstrap)
            if epoch > told.epoch:
                # The newer controller waits for this confirmation before it keeps the job.
                confirm_release(directory, path.stem, epoch)
            if epoch > newest:
                # A later controller may need time until it has written its address.
                newest, patience.deadline = epoch, anyio.current_time() + seconds
            if newest > told.epoch:
                said = f"controller {newest} of this run has not published its address yet"
            else:
                said = await _find_obstacle(told.controller)
                if not said and (former is None or told.epoch > former):
                    return
                if not said:
                    # A controller that still answers has replaced this worker since its lease expired.
                    raise SchedulerError("the controller answers, and has done without this worker meanwhile")
            await anyio.sleep(_RETRY_SECONDS)
    raise SchedulerError(
        f"the controller cannot be reached from {os.uname().nodename} within {seconds:g} s, at "
        f"{', '.join(told.addresses)}: {said}. Has the run ended? If not, can nodes connect to that address? "
        "(scheduler.address)"
    )


def read_bootstrap_file(bootstrap: str) -> Bootstrap:
    """Read the bootstrap message from the file that ``AREAL_BOOTSTRAP`` names.

    Raises:
        SchedulerError: the file is missing, is not a bootstrap message, or can be read by other users.
    """
    if not bootstrap:
        raise SchedulerError("AREAL_BOOTSTRAP names no file; a worker is started by its controller, not by hand")
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
        raise SchedulerError(f"{path} is not a bootstrap message: {error}") from None


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
    """Return why the controller cannot be reached at any address, or an empty string if it answers."""
    node = f"preflight-{os.environ.get('SLURM_JOB_ID', '')}-{os.uname().nodename}-{os.getpid()}"
    said = "it has no address"
    for address in controller.addresses:
        try:
            async with connect(address, secret=controller.secret, node=node):
                return ""
        except Unreachable as error:
            said = str(error)
    return said


if __name__ == "__main__":
    main(sys.argv[1:])
