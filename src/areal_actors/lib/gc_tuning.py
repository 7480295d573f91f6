"""Garbage collector settings for processes that run nothing but this library.

Imported libraries leave half a million objects that live as long as the process, and thousands of open requests keep
theirs for longer than the collector expects. Traversing all of them again and again took a third of the CPU time of a
proxy with a thousand sessions. A program that embeds the library keeps its own settings.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["relax_gc", "tuned_gc"]

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
    """Freeze all existing objects and collect the young generation less often, while the block lasts."""
    young, *older = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NUM_YOUNG if young else 0, *older)
    try:
        yield
    finally:
        gc.set_threshold(young, *older)
        gc.unfreeze()
