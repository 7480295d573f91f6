"""Release of free memory between steps: what a step allocated is unused until the next one."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

__all__ = ["release_free_memory"]


def release_free_memory() -> None:
    """Return free memory from the allocator to the system. Does nothing if the C library is not glibc.

    glibc keeps freed blocks below 32 MiB for reuse; after a step of a language model these add up to gigabytes, which
    the engine and the rest of the machine could use.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        trim: Callable[[int], int] = ctypes.CDLL("libc.so.6").malloc_trim
    except (OSError, AttributeError):
        return None
    return trim
