"""Contexts that are held open over several cells, and tables of facts."""

from __future__ import annotations

from contextlib import asynccontextmanager

import anyio
import pytest

from areal_actors.errors import ConfigError
from areal_actors.lib.notebooks import Startable, format_table, require_no_event_loop

pytestmark = pytest.mark.anyio


class Recorded:
    """A context with a task group, which only the task that entered it can leave."""

    def __init__(self, *, fails_opening: bool = False, fails_closing: bool = False) -> None:
        self.events: list[str] = []
        self._fails = (fails_opening, fails_closing)

    @asynccontextmanager
    async def opened(self):
        async with anyio.create_task_group() as tasks:
            await anyio.lowlevel.checkpoint()
            if self._fails[0]:
                raise OSError("no room")
            self.events.append("open")
            yield 7
            tasks.cancel_scope.cancel()
        self.events.append("closed")
        if self._fails[1]:
            raise OSError("stuck")


async def test_startable_is_a_context_manager():
    """With a block, nothing runs in the background."""
    recorded = Recorded()
    async with Startable(recorded.opened) as value:
        assert 7 == value
    assert ["open", "closed"] == recorded.events


async def test_startable_is_closed_by_another_task():
    """As two cells of a notebook do. Closing it again does nothing."""
    recorded = Recorded()
    held = Startable(recorded.opened)
    found = []

    async def first():
        found.append(await held.start())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(first)
    assert ([7], ["open"]) == (found, recorded.events)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(held.aclose)
    await held.aclose()
    assert ["open", "closed"] == recorded.events


async def test_startable_raises_errors_in_start_and_close():
    """By ``start`` and by ``aclose``; and it cannot be started twice."""
    failing = Startable(Recorded(fails_opening=True).opened)
    with pytest.raises(ExceptionGroup) as caught:
        await failing.start()
    assert "no room" in str(caught.value.exceptions[0])

    held = Startable(Recorded(fails_closing=True).opened)
    await held.start()
    with pytest.raises(OSError, match="stuck"):
        await held.aclose()
    with pytest.raises(RuntimeError, match="started before"):
        await held.start()


async def test_startable_cancelled_while_starting_is_closed():
    """The context is left in the background."""
    recorded = Recorded()
    held = Startable(recorded.opened)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await held.start()
    with anyio.fail_after(5):
        await held.aclose()
    assert recorded.events in (["open", "closed"], [])


async def test_startable_that_never_started_closes_at_once():
    """There is nothing to leave."""
    with anyio.fail_after(5):
        await Startable(Recorded().opened).aclose()


async def test_second_event_loop_is_refused():
    """Python's own message says neither why nor what to do."""
    with pytest.raises(ConfigError, match=r"use 'await ... .run\(\)'"):
        require_no_event_loop("train()", "run()")


def test_table_escapes_its_cells():
    """Texts of models are shown in notebooks."""
    shown = format_table({"<b>": "<script>", "half": 0.5, "none": None})

    assert "<script>" not in shown
    assert "&lt;b&gt;" in shown
    assert "<td>0.5</td>" in shown
    assert "<td>-</td>" in shown
