"""Counters that the proxy itself keeps while it serves. Plain numbers: a request costs two or three microseconds.

The Prometheus client library would take three times as long on every request, so ``metrics`` uses it only when it is
scraped. Numbers that actors know are not counted here; they are asked of the actors.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from functools import partial

from attrs import define, field

__all__ = ["Histogram", "Meter"]

REQUEST_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
FIRST_TOKEN_SECONDS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


@define(eq=False)
class Histogram:
    """Counts of values up to each of ``bounds``; the last count is of values above all bounds."""

    bounds: tuple[float, ...]
    counts: list[int] = field(init=False)
    total: float = field(default=0.0, init=False)

    def __attrs_post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


@define(eq=False)
class Meter:
    """The counters of one application, by the name of the operation."""

    requests: Counter[tuple[str, int]] = field(factory=Counter, init=False)
    """Number of requests by operation and status."""
    seconds: defaultdict[str, Histogram] = field(init=False)
    first_token_seconds: defaultdict[str, Histogram] = field(init=False)
    hang_ups: Counter[str] = field(factory=Counter, init=False)
    failed_streams: Counter[str] = field(factory=Counter, init=False)

    def __attrs_post_init__(self) -> None:
        self.seconds = defaultdict(partial(Histogram, REQUEST_SECONDS))
        self.first_token_seconds = defaultdict(partial(Histogram, FIRST_TOKEN_SECONDS))

    def note_answer(self, operation: str, status: int, seconds: float) -> None:
        """Count a request that was answered, successfully or not."""
        self.requests[operation, status] += 1
        self.seconds[operation].observe(seconds)
