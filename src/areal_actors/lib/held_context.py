"""A context manager that one task opens and another one closes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Generic, TypeVar

import anyio

from areal_actors.lib.loops import is_trio

T = TypeVar("T")

_owners: set[asyncio.Task[None]] = set()
"""Strong references to the owner tasks, because asyncio itself keeps only weak references to tasks."""


class HeldContext(Generic[T]):
    """Holds a context manager open in a task that it owns, so that any task can close it.

    A task group has to be left by the task that entered it, but the hooks of a framework and the cells of a notebook
    are tasks that end before.
    """

    def __init__(self, create: Callable[[], AbstractAsyncContextManager[T]]) -> None:
        self._create = create
        self._opened: tuple[T] | None = None
        self._error: BaseException | None = None
        self._ready, self._closing, self._ended = anyio.Event(), anyio.Event(), anyio.Event()

    @property
    def value(self) -> T:
        """The value of the context manager.

        Raises:
            BaseException: the error that kept it from opening.
            RuntimeError: the event loop is shutting down.
        """
        if self._opened is None:
            raise self._error or RuntimeError("the event loop is shutting down")
        return self._opened[0]

    @property
    def is_open(self) -> bool:
        """True if the context manager is still open; an error inside may have ended it."""
        return self._ready.is_set() and not self._closing.is_set() and not self._ended.is_set()

    async def start(self) -> T:
        """Start the owner task and wait until the context manager is open; returns its value.

        Cancelling the caller closes it again.
        """
        if is_trio():
            import trio

            # A system task belongs to the trio run itself, not to the nursery of the framework's hook.
            trio.lowlevel.spawn_system_task(self._own, name="owner of a held context")
        else:
            owner = asyncio.get_running_loop().create_task(self._own(), name="owner of a held context")
            _owners.add(owner)
            owner.add_done_callback(_owners.discard)
        try:
            await self._ready.wait()
        except BaseException:
            self._closing.set()
            raise
        return self.value

    def close_soon(self) -> None:
        """Start to close without waiting for it to finish."""
        self._closing.set()

    async def aclose(self) -> None:
        """Close and wait until it is closed. An error that ended the context manager is raised once."""
        self._closing.set()
        await self._ended.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error

    async def _own(self) -> None:
        try:
            async with self._create() as value:
                self._opened = (value,)
                self._ready.set()
                await self._closing.wait()
        except Exception as error:  # noqa: BLE001 - raised by aclose, in the task that called it
            self._error = error
        finally:
            self._ready.set()
            self._ended.set()
