"""Exponential back-off: the delays between repeated attempts."""

from __future__ import annotations

from attrs import define, field, validators


def backoff_seconds(num_failures: int, *, first: float, longest: float) -> float:
    """Return the delay after ``num_failures`` (at least 1) failures in a row.

    The first delay is ``first``, and each further one twice the one before, up to ``longest``.
    """
    # The exponent is limited because a float overflows at 2**1024, and some callers retry for days.
    return min(longest, first * 2.0 ** min(num_failures - 1, 64))


@define(kw_only=True)
class Backoff:
    """Counts failures in a row, and returns the delay after each of them."""

    first_seconds: float = field(validator=validators.gt(0))
    max_seconds: float
    _num_failures: int = field(default=0, init=False)

    def next_delay(self) -> float:
        """Count a failure, and return the delay in seconds before the next attempt."""
        self._num_failures += 1
        return backoff_seconds(self._num_failures, first=self.first_seconds, longest=self.max_seconds)

    def reset(self) -> None:
        """Start again with the first delay, because an attempt has succeeded."""
        self._num_failures = 0
