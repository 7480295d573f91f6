"""Worker threads of GNU OpenMP, which PyTorch computes with on a Linux CPU: ended where they cost more than they help.

Each thread that computes with PyTorch has a team of OpenMP workers. A decoding step is thousands of small parallel
operations; between two of them the workers spin for a while (``GOMP_SPINCOUNT``) or sleep and are woken by the kernel,
which made a product of 32 by 576 by 1536 numbers 13 to 34 µs slower. libgomp spins only while all teams of the process
together have no more threads than the machine has cores. With an engine and a trainer in one process that is never so,
since the trainer's team stays while it waits for the next batch: SmolLM2-135M on two quiet cores sampled a first batch
in 10.8 s, and in 6.4 s with the other teams ended before.

Spinning is right only on a quiet machine. Next to other programs, a worker spins for one that has no core, and the same
batch took two to five times as long. ``settle_team`` ends a team only if others left the cores alone since the last
call.
"""

from __future__ import annotations

import ctypes
import os
import resource
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from threading import Lock

from attrs import frozen

__all__ = ["CpuTime", "TeamKeeper", "end_team", "settle_team"]

_PAUSE_SOFT = 1
# Cores that other programs may keep busy: an editor and a browser at rest stay below.
_QUIET_CORES = 0.15
_WINDOW_SECONDS = 0.5


@cache
def _load_library() -> ctypes.CDLL | None:
    """Return the libgomp that PyTorch has loaded, or ``None``: there is none on macOS, on Windows and without torch."""
    try:
        mapped = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # Wheels carry copies with names such as libgomp-24e2ab19.so.1.
    paths = {line.split(maxsplit=5)[-1] for line in mapped.splitlines() if "/libgomp" in line}
    if len(paths) != 1:
        # Each of several libraries counts its own threads only.
        return None
    library = ctypes.CDLL(paths.pop())
    return library if hasattr(library, "omp_pause_resource_all") else None


def end_team() -> bool:
    """End the OpenMP workers of the calling thread. Its next parallel operation starts others.

    Returns whether there is a library that could be asked. Results do not change.
    """
    library = _load_library()
    return library is not None and library.omp_pause_resource_all(_PAUSE_SOFT) == 0


@frozen
class CpuTime:
    """Seconds of CPU time since the start: of the whole machine, and of this process with all its threads."""

    at: float
    machine: float
    own: float

    @classmethod
    def read(cls) -> CpuTime | None:
        """Return the times now, or ``None`` where the system does not report them."""
        try:
            with Path("/proc/stat").open(encoding="ascii") as file:
                user, nice, system, _idle, _wait, irq, soft_irq, *_ = map(int, file.readline().split()[1:])
        except (OSError, ValueError):
            return None
        usage = resource.getrusage(resource.RUSAGE_SELF)
        busy = (user + nice + system + irq + soft_irq) / os.sysconf("SC_CLK_TCK")
        return cls(at=time.monotonic(), machine=busy, own=usage.ru_utime + usage.ru_stime)

    def others_since(self, before: CpuTime) -> float:
        """Return how many cores other processes kept busy since ``before``, on average."""
        return (self.machine - before.machine - (self.own - before.own)) / max(self.at - before.at, 1e-3)


class TeamKeeper:
    """Ends the team of a thread that has finished a long computation, as long as the machine is quiet."""

    def __init__(self, read: Callable[[], CpuTime | None] = CpuTime.read, end: Callable[[], bool] = end_team) -> None:
        self._read = read
        self._end = end
        self._before = read()
        self._is_quiet = False

    def settle(self) -> bool:
        """End the calling thread's team if other processes have used few cores of late. Returns whether it did."""
        now, before = self._read(), self._before
        if now is None or before is None:
            return False
        # The kernel counts in hundredths of a second.
        if now.at - before.at >= _WINDOW_SECONDS:
            self._before, self._is_quiet = now, now.others_since(before) <= _QUIET_CORES
        return self._is_quiet and self._end()


_keeper = TeamKeeper()
_lock = Lock()


def settle_team() -> bool:
    """End the calling thread's team if the machine was quiet since the last call in this process."""
    with _lock:
        return _keeper.settle()
