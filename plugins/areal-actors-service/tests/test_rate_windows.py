"""The windows of quotas: laws of the rate, and days."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from areal_actors_service.accounts import RateWindow, day_of, seconds_to_midnight

STEPS = st.lists(st.integers(0, 40), max_size=80)


@given(steps=STEPS, limit=st.integers(0, 6))
def test_rate_window_never_exceeds_its_limit(steps: list[int], limit: int):
    """However requests arrive: in any 60 seconds at most ``limit`` are let through, and as many as that."""
    window, admitted, now = RateWindow(), [], 0.0
    for step in steps:
        now += step
        recent = [time for time in admitted if now - 60 < time]
        wait = window.try_enter(now, limit)

        assert (wait == 0) is (len(recent) < limit)
        if wait == 0:
            admitted.append(now)


@given(steps=STEPS, limit=st.integers(1, 6))
def test_rate_window_admits_after_the_wait_that_it_named(steps: list[int], limit: int):
    """Not a moment too late, and not one too early."""
    window, now = RateWindow(), 0.0
    for step in steps:
        now += step
        wait = window.try_enter(now, limit)
        if wait > 0:
            assert wait <= 60
            assert window.try_enter(now + wait - 0.5, limit) > 0
            assert window.try_enter(now + wait, limit) == 0
            now += wait


@given(limits=st.lists(st.integers(1, 5), min_size=1, max_size=20))
def test_rate_window_follows_a_changed_limit(limits: list[int]):
    """What was admitted under a wider limit counts under the narrower one."""
    window, admitted = RateWindow(), []
    for now, limit in enumerate(limits):
        if window.try_enter(float(now), limit) == 0:
            admitted.append(now)

            assert len(admitted) <= limit


def test_rate_window_of_zero_admits_nothing():
    """It tells to come back after a whole window, which will not help."""
    assert RateWindow().try_enter(5.0, 0) == 60


@given(now=st.floats(0, 4e9))
def test_quota_day_ends_at_midnight(now: float):
    """The rest of a day leads into the next, and never further than a day."""
    rest = seconds_to_midnight(now)

    assert 0 < rest <= 86_400
    assert day_of(now + rest) == day_of(now) + 1
