"""Systems for frameworks whose start and stop hooks run in different tasks.

A task group must be left by the task that entered it. So an owner task is started beside the framework's own; it holds
the system open until it is told to close. Where such a task comes from depends on the event loop, and this is the one
module that knows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Generic, TypeVar

import anyio

from areal_actors.core.loops import is_trio

__all__ = ["Host"]

T = TypeVar("T")

_owners: set[asyncio.Task[None]] = set()
"""asyncio itself keeps only weak references to tasks."""


class Host(Generic[T]):
    """The owner of what one block holds open, such as a system, from ready to ended."""

    def __init__(self, open_hosted: Callable[[], AbstractAsyncContextManager[T]]) -> None:
        self._open_hosted = open_hosted
        self._hosted: T | None = None
        self._error: BaseException | None = None
        self._ready, self._closing, self._ended = anyio.Event(), anyio.Event(), anyio.Event()

    @property
    def hosted(self) -> T:
        """What is held open. Raises what kept it from opening."""
        if self._hosted is None:
            raise self._error or RuntimeError("the event loop is shutting down")
        return self._hosted

    @property
    def is_open(self) -> bool:
        """Whether it is held open still; an error inside may have ended it."""
        return self._ready.is_set() and not self._closing.is_set() and not self._ended.is_set()

    async def start(self) -> T:
        """Start the owner task; returns what is held, once it is open."""
        self._start_owner()
        try:
            await self._ready.wait()
        except BaseException:
            self._closing.set()
            raise
        return self.hosted

    def close_soon(self) -> None:
        """Close it without waiting for that."""
        self._closing.set()

    async def aclose(self) -> None:
        """Close it and wait until it is; raises what ended it, once, if that was an error."""
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
            async with self._open_hosted() as self._hosted:
                self._ready.set()
                await self._closing.wait()
        except Exception as error:  # noqa: BLE001 - raised by aclose, in the task of whoever is responsible
            self._error = error
        finally:
            self._ready.set()
            self._ended.set()
