"""Which problems have been consumed: the bookkeeping behind exact resumption, as a plain object of its one owner."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from areal_actors.domain import DataPosition

__all__ = ["ConsumedPositions", "HighestPosition", "positions_from"]


class ConsumedPositions:
    """The positions that need not be run again. Memory is bounded by how far problems overtake one another."""

    def __init__(self, start: DataPosition | None = None) -> None:
        start = start or DataPosition()
        self._floor = min(start.pending, default=start.next)
        self._above = set(range(self._floor, start.next)) - set(start.pending)

    def add(self, position: int) -> None:
        """``position`` is consumed: trained, rejected or dropped. Adding it twice is harmless."""
        if position >= self._floor:
            self._above.add(position)
        while self._floor in self._above:
            self._above.remove(self._floor)
            self._floor += 1

    def __contains__(self, position: int) -> bool:
        """Whether ``position`` is consumed."""
        return position < self._floor or position in self._above

    def summary(self) -> DataPosition:
        """What a checkpoint keeps."""
        end = max(self._above, default=self._floor - 1) + 1
        return DataPosition(next=end, pending=tuple(p for p in range(self._floor, end) if p not in self._above))


class HighestPosition:
    """The same for problems that come from outside, and are never run again: only where they end is kept.

    Positions are labels there; several groups may have the same one.
    """

    def __init__(self, start: DataPosition | None = None) -> None:
        self._next = (start or DataPosition()).next

    def add(self, position: int) -> None:
        """``position`` is consumed."""
        self._next = max(self._next, position + 1)

    def __contains__(self, position: int) -> bool:
        """Nothing is too late for being known."""
        return False

    def summary(self) -> DataPosition:
        """What a checkpoint keeps."""
        return DataPosition(next=self._next)


def positions_from(start: DataPosition) -> Iterator[int]:
    """The positions to run, in order: those left pending first, then on without end."""
    yield from start.pending
    yield from count(start.next)
