"""The garbage collector of a process that is ours alone.

Libraries leave half a million objects behind when they are loaded, which live as long as the process, and thousands of
open requests keep theirs for longer than the collector expects. Walking through all of that again and again took a
third of the CPU time of a proxy with a thousand sessions. A program that embeds us decides for itself.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["settled_heap"]

_NUM_YOUNG = 10_000
"""Allocations between two looks at the young objects; Python's 700 is less than what a few requests in flight hold."""


@contextmanager
def settled_heap() -> Iterator[None]:
    """For the length of the block, take what there is for permanent, and look at new objects less often."""
    young, *older = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(max(young, _NUM_YOUNG) if young else 0, *older)  # 0: somebody has switched it off
    try:
        yield
    finally:
        gc.set_threshold(young, *older)
        gc.unfreeze()
