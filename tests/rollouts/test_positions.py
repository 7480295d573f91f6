"""Which problems have been consumed: nothing twice, nothing lost, whatever the order."""

from __future__ import annotations

from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from areal_actors.domain import SourcePosition
from areal_actors.rollouts.draws import ConsumedPositions, positions_from

positions = st.lists(st.integers(0, 30), max_size=40)


@given(first=positions, second=positions)
def test_summary_resumes_to_exactly_what_was_not_consumed(first: list[int], second: list[int]):
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
