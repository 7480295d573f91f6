"""When a worker is to end: its parent is gone, or somebody has told it to leave."""

from __future__ import annotations

import os
import signal
import sys

import anyio

__all__ = ["until_orphaned", "until_signalled"]


async def until_orphaned(scope: anyio.CancelScope) -> None:
    """Without a thread, which would keep the process from ending for another reason."""
    descriptor = sys.stdin.fileno()
    try:
        while True:
            await anyio.wait_readable(descriptor)
            if not os.read(descriptor, 4096):
                break
    except PermissionError:  # it is a file, which says nothing about whoever started us
        return
    scope.cancel()


async def until_signalled(scope: anyio.CancelScope) -> None:
    """Asked to leave, a proxy drains: what it answers may be finished, and what comes new is told to come again."""
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for _ in signals:
            scope.cancel()
