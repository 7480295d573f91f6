"""Helpers for notebooks: contexts held open from one cell to another, tables, and no second event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from html import escape
from types import TracebackType
from typing import Generic, TypeVar

from areal_actors.errors import ConfigError
from areal_actors.lib.held_context import HeldContext
from areal_actors.lib.loops import is_trio

T = TypeVar("T")


class Startable(AbstractAsyncContextManager[T], Generic[T]):
    """A context that is entered with ``async with``, or with ``start`` and left with ``aclose``.

    A task group has to be left by the task that entered it, and each cell of a notebook is a task. ``start`` therefore
    enters the context in a background task, which leaves it when ``aclose`` is called. Either way it is used once.
    """

    def __init__(self, create: Callable[[], AbstractAsyncContextManager[T]]) -> None:
        self._context = create()
        self._held: HeldContext[T] | None = None

    async def __aenter__(self) -> T:
        return await self._context.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return await self._context.__aexit__(kind, error, traceback)

    async def start(self) -> T:
        """Enter the context and return its value. Raises what entering it raises; cancelling it leaves the context."""
        if self._held is not None:
            raise RuntimeError("it was started before; open another one")
        self._held = HeldContext(lambda: self._context)
        return await self._held.start()

    async def aclose(self) -> None:
        """Leave the context and wait until that is done; a second call does nothing. Raises what leaving it raises."""
        if self._held is not None:
            await self._held.aclose()


def require_no_event_loop(name: str, instead: str) -> None:
    """Raise ``ConfigError`` if an event loop runs here, as in a notebook, where ``name`` cannot start another one."""
    if not is_trio():
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return
    raise ConfigError(
        f"{name} starts an event loop, and one runs here already, as in a notebook; use 'await ... .{instead}'"
    )


def format_table(facts: Mapping[str, object]) -> str:
    """Return an HTML table with one row per fact. Names and values are escaped."""
    rows = []
    for name, value in facts.items():
        text = f"{value:.6g}" if isinstance(value, float) else "-" if value is None else str(value)
        rows.append(f"<tr><th>{escape(str(name))}</th><td>{escape(text)}</td></tr>")
    return f"<table>{''.join(rows)}</table>"
