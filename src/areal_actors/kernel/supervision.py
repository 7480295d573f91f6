"""Supervision of crashed actors: the three policies and the restart arithmetic.

An actor crashes when a told message, its lifespan or a background task raises. Its policy decides what follows:

* ``Escalate`` (default): the error leaves the system's task group, as the error of any task would;
* ``Stop``: the actor ends, the error is logged, and watchers are notified;
* ``Restart``: a fresh instance takes over the ref and the mailbox; state and the failing message are lost.

This module makes the decisions, without a clock and without waiting; ``runtime`` waits and restarts.
"""

from __future__ import annotations

from collections import deque
from random import Random

from attrs import field, frozen, validators

from areal_actors.lib.backoff import backoff_seconds


@frozen(kw_only=True)
class Stop:
    """Policy: a crash ends this actor only."""


@frozen(kw_only=True)
class Escalate:
    """Policy: a crash ends the whole system with the error."""


@frozen(kw_only=True)
class Restart:
    """Policy: replace the crashed instance by a fresh one, at most ``max_restarts`` times within ``window_seconds``.

    The n-th restart within the window waits ``backoff_seconds * 2**(n-1)``, at most ``max_backoff_seconds``, times a
    random factor from ``1 - jitter`` to ``1 + jitter``. A crash beyond ``max_restarts`` is handled by the policy
    ``then``.
    """

    max_restarts: int = field(default=3, validator=validators.ge(0))
    window_seconds: float = field(default=60.0, validator=validators.gt(0))
    backoff_seconds: float = field(default=0.1, validator=validators.ge(0))
    max_backoff_seconds: float = field(default=30.0, validator=validators.ge(0))
    jitter: float = field(default=0.1, validator=[validators.ge(0), validators.le(1)])
    then: Stop | Escalate = field(factory=Escalate)


Supervision = Stop | Restart | Escalate


class RestartHistory:
    """The times of an actor's recent crashes; decides about restarts according to its policy."""

    def __init__(self, policy: Restart, random: Random) -> None:
        self._policy = policy
        self._random = random
        self._crashes: deque[float] = deque()

    def next_delay(self, now: float) -> float | None:
        """Return the delay, in seconds, before the restart after a crash at ``now``; ``None``: too many crashes."""
        policy = self._policy
        while self._crashes and self._crashes[0] <= now - policy.window_seconds:
            self._crashes.popleft()
        if len(self._crashes) >= policy.max_restarts:
            return None
        self._crashes.append(now)
        delay = backoff_seconds(len(self._crashes), first=policy.backoff_seconds, longest=policy.max_backoff_seconds)
        return delay * self._random.uniform(1 - policy.jitter, 1 + policy.jitter)
