"""How a worker that has lost home keeps what it was given, and finds the next home of its run.

::

    home                        the directory that home and its workers share
    ────                        ────────────────────────────────────────────
    begins its epoch        ──▶ epoch                    one more than ever before
                                let-go/<job>.<n>.<rank> ◀── a process that has ended whatever it did for the former home
    gives the worker a life ──▶ bootstrap/<job>.json     its address, its secret, its epoch

A worker lets go when its lease is over or when it reads of a later epoch, whichever comes first: its process is then
replaced by a fresh one, the preflight, in which nothing of the role is left. That one says so, and waits for a home of
a later epoch, which is the only one that it goes to. What home does is in ``slurm.takeover``.

Everything here blocks for as long as a file system takes.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import Mapping
from math import ceil
from pathlib import Path
from typing import NoReturn

from areal_actors.schedulers.bootstrap import BOOTSTRAP_VARIABLE, Bootstrap

__all__ = ["FORMER_VARIABLE", "count_let_go", "is_superseded", "look_for_next_home", "read_epoch", "say_let_go"]

FORMER_VARIABLE = "AREAL_FORMER_EPOCH"
"""The epoch of the home that a process has lost."""
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def read_epoch(directory: Path) -> int:
    """The epoch of the latest home; 0 if there was none, or if it cannot be read at present."""
    try:
        return int((directory / "epoch").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0


def is_superseded(bootstrap: Bootstrap) -> bool:
    """Whether there is a later home than the one that ``bootstrap`` tells of."""
    path = os.environ.get(BOOTSTRAP_VARIABLE)
    return path is not None and read_epoch(Path(path).parent.parent) > bootstrap.epoch


def say_let_go(directory: Path, job: str, epoch: int, environment: Mapping[str, str] | None = None) -> None:
    """Tell the home of ``epoch`` that this process does nothing for another one any more.

    A process that its cluster has given up may still live: which of the job's starts this one is, is told with it.
    """
    environment = os.environ if environment is None else environment
    num_restarts, rank = environment.get("SLURM_RESTART_COUNT") or "0", environment.get("SLURM_PROCID") or "0"
    path = directory / "let-go" / f"{job}.{num_restarts}.{rank}"
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(f"{epoch}\n", encoding="ascii")
    partial.replace(path)


def count_let_go(directory: Path, epoch: int) -> Counter[tuple[str, int]]:
    """How many processes of each job have told the home of ``epoch`` so, by the job and the number of its restarts."""
    found: Counter[tuple[str, int]] = Counter()
    for path in (directory / "let-go").glob("aa-*.*.*"):
        job, num_restarts, rank = path.name.rsplit(".", 2)
        try:
            if num_restarts.isdecimal() and rank.isdecimal() and int(path.read_text(encoding="ascii")) == epoch:
                found[job, int(num_restarts)] += 1
        except (OSError, ValueError):
            continue
    return found


def look_for_next_home(bootstrap: Bootstrap, module: str) -> NoReturn:
    """Become the preflight of ``module`` again, which goes to no home before a later epoch than that of ``bootstrap``.

    Of this process nothing is left: neither threads, nor devices, nor memory, nor open files.
    """
    for number in _IGNORED:  # what is ignored stays so beyond the end of a program
        signal.signal(number, signal.SIG_DFL)
    for path in Path("/proc/self/fd").iterdir():
        if int(path.name) > 2:  # noqa: PLR2004 - the standard streams
            _close_on_exec(int(path.name))
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.environ[FORMER_VARIABLE] = str(bootstrap.epoch)
    seconds = str(ceil(bootstrap.rejoin_seconds))
    command = [sys.executable, "-m", "areal_actors.schedulers.preflight", seconds, module]
    os.execv(sys.executable, command)  # noqa: S606 - the same interpreter


def _close_on_exec(descriptor: int) -> None:
    try:
        os.set_inheritable(descriptor, False)
    except OSError:  # it was that of the directory that is listed
        return
