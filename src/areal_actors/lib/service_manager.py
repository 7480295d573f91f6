"""Messages to the service manager, as systemd's ``sd_notify``: the service is ready, and its event loop runs.

A unit with ``Type=notify`` is started when the service is ready, and one with ``WatchdogSec`` is restarted when its
event loop is blocked. Elsewhere the variables are not set, and nothing is sent.
"""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Callable, MutableMapping
from contextlib import asynccontextmanager, suppress

import anyio

from areal_actors.lib.task_groups import open_tasks

Notify = Callable[[str], None]
"""Sends a state, such as ``READY=1``."""


@asynccontextmanager
async def open_service_manager(environment: MutableMapping[str, str] = os.environ) -> AsyncIterator[Notify]:
    """Yield a function that sends states; while the block lasts, the watchdog is told that the event loop runs.

    The variables are removed from ``environment``, because child processes must not speak for this one.
    """
    address = environment.pop("NOTIFY_SOCKET", "")
    seconds = int(environment.pop("WATCHDOG_USEC", "0")) / 1_000_000
    environment.pop("WATCHDOG_PID", None)

    def notify(state: str) -> None:
        if not address:
            return
        # A name that begins with @ is in the abstract namespace. A manager that restarts has no socket for a moment.
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, suppress(OSError):
            sender.sendto(state.encode(), address.replace("@", "\0", 1) if address.startswith("@") else address)

    async def feed_watchdog() -> None:
        while True:
            notify("WATCHDOG=1")
            await anyio.sleep(seconds / 2)

    async with open_tasks() as tasks:
        if seconds > 0:
            tasks.start_soon(feed_watchdog)
        yield notify
        tasks.cancel_scope.cancel()
