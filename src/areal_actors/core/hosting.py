"""Systems for frameworks whose start and stop hooks run in different tasks.

A task group must be left by the task that entered it. So an owner task is started beside the framework's own; it holds
the system open until it is told to close. Where such a task comes from depends on the event loop, and this is the one
module that knows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

import anyio

from areal_actors.core.loops import is_trio

if TYPE_CHECKING:
    from areal_actors.core.system import ActorSystem

__all__ = ["Host"]

_owners: set[asyncio.Task[None]] = set()
"""asyncio itself keeps only weak references to tasks."""


class Host:
    """The owner of one system, from ready to ended."""

    def __init__(self, open_system: Callable[[], AbstractAsyncContextManager[ActorSystem]]) -> None:
        self._open_system = open_system
        self._system: ActorSystem | None = None
        self._error: BaseException | None = None
        self._ready, self._closing, self._ended = anyio.Event(), anyio.Event(), anyio.Event()

    async def start(self) -> ActorSystem:
        """Start the owner task; returns once the system is open."""
        self._start_owner()
        try:
            await self._ready.wait()
        except BaseException:
            self._closing.set()
            raise
        if self._system is None:
            raise self._error or RuntimeError("the event loop is shutting down")
        return self._system

    async def aclose(self) -> None:
        """Close the system and wait until it is; raises what ended it, once, if that was an error."""
        self._closing.set()
        await self._ended.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _start_owner(self) -> None:
        if is_trio():
            import trio

            trio.lowlevel.spawn_system_task(self._own, name="owner of a hosted actor system")
            return
        owner = asyncio.get_running_loop().create_task(self._own(), name="owner of a hosted actor system")
        _owners.add(owner)
        owner.add_done_callback(_owners.discard)

    async def _own(self) -> None:
        try:
            async with self._open_system() as self._system:
                self._ready.set()
                await self._closing.wait()
        except Exception as error:  # noqa: BLE001 - raised by aclose, in the task of whoever is responsible
            self._error = error
        finally:
            self._ready.set()
            self._ended.set()
