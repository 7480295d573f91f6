"""How many files and connections a process may have open."""

from __future__ import annotations

import resource

__all__ = ["open_files_limit", "raise_open_files_limit"]

_OPEN_MAX = 10_240
"""What macOS grants, whose hard limit reads as infinite and is refused as a soft one."""


def open_files_limit() -> int | None:
    """The hard limit of this process, to which ``raise_open_files_limit`` raises the soft one; ``None``: unlimited."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return None if hard == resource.RLIM_INFINITY else hard


def raise_open_files_limit() -> None:
    """Let this process open as many files and connections as its hard limit allows; child processes inherit it.

    For processes that are ours alone: commands and workers. The soft limit is 1,024 on most systems, for the sake of
    programs that call ``select``; every client of a proxy and every connection to a server takes one. A program that
    embeds the library decides for itself.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):
        if soft != resource.RLIM_INFINITY and soft < _OPEN_MAX:
            resource.setrlimit(resource.RLIMIT_NOFILE, (_OPEN_MAX, hard))
