"""Conditions that end a worker: its parent process is gone, or it has received a signal."""

from __future__ import annotations

import os
import signal
import sys

import anyio

__all__ = ["until_orphaned", "until_signalled"]


async def until_orphaned(scope: anyio.CancelScope) -> None:
    """Cancel ``scope`` when standard input reaches its end, which means that the parent process is gone.

    Waits on the file descriptor instead of reading in a thread, because a blocked thread would keep the process from
    exiting for another reason.
    """
    descriptor = sys.stdin.fileno()
    try:
        while True:
            await anyio.wait_readable(descriptor)
            if not os.read(descriptor, 4096):
                break
    except PermissionError:  # epoll refuses regular files, whose end says nothing about the parent
        return
    scope.cancel()


async def until_signalled(scope: anyio.CancelScope) -> None:
    """Cancel ``scope`` on SIGTERM or SIGINT.

    A proxy then drains: running requests may finish, and new ones are asked to retry.
    """
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for _ in signals:
            scope.cancel()
