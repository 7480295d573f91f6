"""Time windows of quotas: any 60 seconds for requests, one day of UTC for tokens. Pure but for what they count."""

from __future__ import annotations

import math
from collections import deque

__all__ = ["RateWindow", "day_of", "seconds_to_midnight"]

_DAY_SECONDS = 86_400


class RateWindow:
    """At most so many events in any ``seconds``, whichever way the window is laid.

    It keeps the times of the events that still count, because a counter that is reset each minute lets twice as many
    through around the reset. Times come from any monotonic clock.
    """

    def __init__(self, *, seconds: float = 60.0) -> None:
        self._seconds = seconds
        self._times: deque[float] = deque()

    def try_enter(self, now: float, limit: int) -> float:
        """Count an event if there is room for it.

        Returns 0 if there was, and otherwise the seconds after which there will be, if nothing else comes first; with
        a ``limit`` of 0 there never is, and a whole window is returned.
        """
        while self._times and self._times[0] + self._seconds <= now:
            self._times.popleft()
        if len(self._times) < limit:
            self._times.append(now)
            return 0.0
        if limit <= 0:
            return self._seconds
        freeing = self._times[len(self._times) - limit] + self._seconds
        return max(freeing - now, math.ulp(now))


def day_of(now: float) -> int:
    """The day of UTC at ``now``, in days since 1970."""
    return math.floor(now / _DAY_SECONDS)


def seconds_to_midnight(now: float) -> float:
    """How long the day of UTC still lasts."""
    return (day_of(now) + 1) * _DAY_SECONDS - now
