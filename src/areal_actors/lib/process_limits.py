"""Settings of processes that run nothing but this library, commands and workers: open files and garbage collection.

A program that embeds the library keeps its own settings.
"""

from __future__ import annotations

import gc
import resource
from collections.abc import Iterator
from contextlib import contextmanager

_OPEN_MAX = 10_240
"""The limit that macOS grants: its hard limit reads as infinite, but is refused as a soft limit."""


def open_files_limit() -> int | None:
    """Return the hard limit of this process, or ``None`` if it is unlimited."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return None if hard == resource.RLIM_INFINITY else hard


def raise_open_files_limit() -> None:
    """Raise the soft limit of open files and connections to the hard limit. Child processes inherit it.

    The soft limit is 1,024 on most systems, for the sake of programs that call ``select``; every client of a proxy and
    every connection to a server uses one descriptor.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):
        if soft != resource.RLIM_INFINITY and soft < _OPEN_MAX:
            resource.setrlimit(resource.RLIMIT_NOFILE, (_OPEN_MAX, hard))


_NUM_YOUNG = 10_000
"""Allocations between two collections of the young generation.

Python's default of 700 is less than a few pending requests hold.
"""


_NUM_LOADING = 200_000
"""The same while libraries are imported, which make a million objects and hardly any garbage.

torch alone takes 1.4 s instead of 1.8 s of CPU time with it.
"""


def relax_gc() -> None:
    """Collect rarely from now on, in a process that is about to import its libraries; ``tuned_gc`` follows."""
    young, *older = gc.get_threshold()
    # A threshold of 0 means that automatic collection is switched off.
    gc.set_threshold(max(young, _NUM_LOADING) if young else 0, *older)


@contextmanager
def tuned_gc() -> Iterator[None]:
    """Freeze all existing objects and collect the young generation less often, while the block lasts.

    Imported libraries leave half a million objects that live as long as the process. Traversing them again and again
    took a third of the CPU time of a proxy with a thousand sessions.
    """
    young, *older = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NUM_YOUNG if young else 0, *older)
    try:
        yield
    finally:
        gc.set_threshold(young, *older)
        gc.unfreeze()
