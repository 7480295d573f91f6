"""Waits until a time on trio: several end with one timer, whichever of them is woken or cancelled before."""

from __future__ import annotations

import math

import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from areal_actors.lib.loops import Loop, Signal, running_loop

_SECONDS = st.floats(0.01, 10.0)
_NEVER = st.just(math.inf)


@given(
    waits=st.lists(
        st.tuples(st.floats(0.0, 5.0), _SECONDS, _SECONDS | _NEVER, _SECONDS | _NEVER), min_size=1, max_size=40
    )
)
def test_each_wait_ends_in_its_last_quarter_unless_it_is_woken_or_cancelled(
    waits: list[tuple[float, float, float, float]],
) -> None:
    """Each wait has a begin, a length, and the times after its begin at which it is woken and cancelled."""

    async def wait(loop: Loop, begin: float, length: float, woken: float, cancelled: float) -> None:
        await trio.sleep_until(start + begin)
        began, signal = trio.current_time(), loop.new_signal()
        with trio.CancelScope(deadline=began + cancelled) as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(set_after, began + woken, signal)
                await loop.wait_until(signal, began + length)
                nursery.cancel_scope.cancel()
        took = trio.current_time() - began
        earliest, latest = min(0.75 * length, woken, cancelled), min(length, woken, cancelled)
        assert earliest - 1e-6 <= took <= latest + 1e-6
        assert not scope.cancelled_caught or cancelled <= min(length, woken) + 1e-6

    async def set_after(when: float, signal: Signal) -> None:
        await trio.sleep_until(when)
        signal.set()

    async def run() -> None:
        nonlocal start
        start = trio.current_time()
        loop = running_loop()
        async with trio.open_nursery() as nursery:
            for each in waits:
                nursery.start_soon(wait, loop, *each)

    start = 0.0
    trio.run(run, clock=MockClock(autojump_threshold=0))


def test_waits_that_end_at_almost_one_time_end_together() -> None:
    """At the time of the first one, so that one timer wakes all of them; later ones have another timer."""
    ended: list[tuple[float, float]] = []

    async def wait(loop: Loop, length: float) -> None:
        await loop.wait_until(loop.new_signal(), start + length)
        ended.append((length, round(trio.current_time() - start, 6)))

    async def run() -> None:
        nonlocal start
        start = trio.current_time()
        loop = running_loop()
        async with trio.open_nursery() as nursery:
            for length in (1.0, 1.1, 1.3, 2.0, 0.5):
                nursery.start_soon(wait, loop, length)
                await trio.testing.wait_all_tasks_blocked()

    start = 0.0
    trio.run(run, clock=MockClock(autojump_threshold=0.0))
    assert sorted(ended) == [(0.5, 0.5), (1.0, 1.0), (1.1, 1.0), (1.3, 1.0), (2.0, 2.0)]
