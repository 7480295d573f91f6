"""Delays double from the first one up to the longest."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from areal_actors.lib.backoff import Backoff, backoff_seconds

firsts = st.floats(0.001, 10)
longests = st.floats(0.001, 1000)


@given(num_failures=st.integers(1, 10**6), first=firsts, longest=longests)
def test_backoff_is_bounded(num_failures: int, first: float, longest: float) -> None:
    """Also after so many failures that the power would overflow a float."""
    assert 0 < backoff_seconds(num_failures, first=first, longest=longest) <= longest


@given(num_failures=st.integers(1, 40), first=firsts)
def test_backoff_doubles(num_failures: int, first: float) -> None:
    """As long as the limit is not reached."""
    one, two = (backoff_seconds(num_failures + k, first=first, longest=1e300) for k in (0, 1))
    assert two == 2 * one


@given(first=firsts, longest=longests, outcomes=st.lists(st.booleans(), max_size=30))
def test_backoff_is_reset_by_a_success(first: float, longest: float, outcomes: list[bool]) -> None:
    """A counter gives the delays of the function, of the failures since the last success."""
    backoff, num_failures = Backoff(first_seconds=first, max_seconds=longest), 0
    for is_success in outcomes:
        if is_success:
            backoff.reset()
            num_failures = 0
        else:
            num_failures += 1
            assert backoff.next_delay() == backoff_seconds(num_failures, first=first, longest=longest)
