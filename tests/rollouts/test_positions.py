"""Which problems have been consumed: nothing twice, nothing lost, whatever the order."""

from __future__ import annotations

from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from areal_actors.domain import SourcePosition
from areal_actors.rollouts.draws import ConsumedPositions, positions_from


def test_a_fresh_run_begins_at_the_first_problem():
    """Without a start, nothing is consumed and everything is to be run."""
    consumed = ConsumedPositions()

    assert SourcePosition() == consumed.summary()
    assert [0, 1, 2] == list(islice(positions_from(SourcePosition()), 3))


def test_what_was_left_pending_is_run_first():
    """A resumed run fills its gaps before it goes on."""
    assert [2, 5, 7, 8] == list(islice(positions_from(SourcePosition(next=7, pending=(2, 5))), 4))


positions = st.lists(st.integers(0, 30), max_size=40)


@given(first=positions, second=positions)
def test_a_summary_resumes_to_exactly_what_was_not_consumed(first: list[int], second: list[int]):
    """Consume, resume from the summary, consume more: what is left to run is always the complement."""
    consumed = ConsumedPositions()
    for position in first:
        consumed.add(position)
    resumed = ConsumedPositions(consumed.summary())
    for position in second:
        resumed.add(position)
    done = {*first, *second}
    rest = [position for position in range(80) if position not in done]

    assert [p in consumed for p in range(40)] == [p in set(first) for p in range(40)]
    assert [p in resumed for p in range(40)] == [p in done for p in range(40)]
    assert rest[:40] == list(islice(positions_from(resumed.summary()), 40))


@given(order=st.permutations(range(12)))
def test_no_memory_is_left_of_a_whole_stretch(order: list[int]):
    """Once all positions up to one are consumed, in any order, the summary is one number."""
    consumed = ConsumedPositions()
    for position in order:
        consumed.add(position)
        consumed.add(position)

    assert SourcePosition(next=12) == consumed.summary()
