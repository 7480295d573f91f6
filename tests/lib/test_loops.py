"""Waits for a signal until a time on trio."""

from __future__ import annotations

import math

import trio
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
def test_wait_ends_at_its_time_unless_it_is_woken_or_cancelled(
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
        assert abs(took - min(length, woken, cancelled)) <= 1e-6
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
