"""Worker threads of GNU OpenMP, which PyTorch computes with on a Linux CPU: ended where they cost more than they help.

Each thread that computes with PyTorch has a team of OpenMP workers. A decoding step is thousands of small parallel
operations; between two of them the workers spin for a while (``GOMP_SPINCOUNT``) or sleep and are woken by the kernel,
which made a product of 32 by 576 by 1536 numbers 13 to 34 µs slower. libgomp spins only while all teams of the process
together have no more threads than the machine has cores. With an engine and a trainer in one process that is never so,
since the trainer's team stays while it waits for the next batch: SmolLM2-135M on two quiet cores sampled a first batch
in 10.8 s, and in 6.4 s with the other teams ended before.
The engine ends its own team in turn when it has nothing to decode: a training step took a tenth less time.

Spinning is right only on a quiet machine. Next to other programs, a worker spins for one that has no core, and the same
batch took two to five times as long. ``settle_team`` ends a team only if the machine has not been overloaded of late.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

_PAUSE_SOFT = 1


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


def settle_team() -> bool:
    """End the calling thread's team if the machine had a core for every running thread of the last minute.

    Returns whether it did.
    """
    return os.getloadavg()[0] <= (os.cpu_count() or 1) + 0.5 and end_team()
