"""The retry cache of a session: which requests were sent before.

Its task is to tell a retry from a second request that happens to be equal. This module is pure bookkeeping; waiting
happens in ``request``. A retry is recognised only by what the client declares: an idempotency key, or the number of
times it sent the request before. Equality alone proves nothing: parallel identical calls are siblings, and so is the
same question asked again.

*A named request* (with an idempotency key) is found by its key. *A numbered request* has no name, so one of several
identical requests is chosen, which no other retry of the same number has been given. Candidates are ranked by how
likely it is that the same client sent them just before:

1. the highest send number of the latest sending, below the number of this retry;
2. among these, requests that ended without an answer, because the client disconnected or they failed: the client has
   a reason to retry those;
3. among these, the request that began last.

A retry that matches a request without an answer samples again and takes its place. Answers that a later request
continues, or that were rewarded by name, have been read, and no numbered retry asks for them. All other answers can be
repeated for two minutes, which is longer than any client library waits between two sendings.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from attrs import define, field

from areal_actors.domain import Answer, Attempt, InteractionId
from areal_actors.errors import Unprocessable

W = TypeVar("W")

MAX_REMEMBERED = 256
"""Answers per session that can be repeated.

More than a client asks for at the same time, and a few dozen kilobytes.
"""
RETRY_SECONDS = 120.0
"""Client libraries honour a ``Retry-After`` of up to two minutes."""


@define(eq=False, kw_only=True)
class CachedRequest(Generic[W]):
    """A request as it was sent, and its result.

    ``work`` is the turn that answers it while it is pending. ``answers`` are set once all choices are complete; a
    request that ended with ``None`` was cut off or failed. ``number`` is the send number of its latest sending.
    ``asked`` keyed its samples: a retry that takes its place uses the same random numbers, so that a lost connection
    does not change what a run samples.
    """

    fingerprint: str
    key: str | None
    number: int
    interactions: tuple[InteractionId, ...]
    work: W | None
    answers: tuple[Answer, ...] | None = None
    asked: tuple[str, int] | None = None
    ended_at: float | None = None

    @property
    def is_cut(self) -> bool:
        """Whether the request ended without an answer."""
        return self.ended_at is not None and self.answers is None

    def end(self, answers: tuple[Answer, ...] | None, now: float) -> None:
        """Record the result, and release the work. Nothing takes the place of a request that was answered."""
        self.work, self.answers, self.ended_at = None, answers, now
        if answers is not None:
            self.asked = None


@define(eq=False)
class RetryCache(Generic[W]):
    """The requests of one session that may be sent again, oldest first, with one entry per interaction."""

    _requests: dict[InteractionId, CachedRequest[W]] = field(factory=dict, init=False)
    _by_key: dict[str, CachedRequest[W]] = field(factory=dict, init=False)

    def __len__(self) -> int:
        """Return the number of interactions that are remembered."""
        return len(self._requests)

    def recognise(self, attempt: Attempt, now: float) -> CachedRequest[W] | None:
        """Return the request that ``attempt`` repeats, or ``None`` if it is a new one.

        A request that was cut is returned and forgotten: ``attempt`` takes its place.

        Raises:
            Unprocessable: its key was used for a request with another body.
        """
        found: CachedRequest[W] | None = None
        if attempt.idempotency_key is not None:
            found = self._by_key.get(attempt.idempotency_key)
            if found is not None and found.fingerprint != attempt.fingerprint:
                raise Unprocessable(
                    "This Idempotency-Key came with another request before; use a new key for a new request.",
                    code="idempotency_mismatch",
                )
        elif attempt.number > 0:
            # Equality alone proves nothing: parallel identical calls are siblings. Only a number above 0 declares a
            # retry.
            candidates = [
                cached
                for cached in reversed(self._requests.values())  # among equals, the latest
                if cached.fingerprint == attempt.fingerprint
                and cached.key is None
                and cached.number < attempt.number
                and not _is_old(cached, now)
            ]
            found = max(candidates, key=lambda cached: (cached.number, cached.is_cut), default=None)
            if found is not None:
                # Raising the number keeps a parallel retry with the same number from being given the same request.
                found.number = attempt.number
        if found is not None and found.is_cut:
            self.forget(found)
        return found

    def begin(
        self, attempt: Attempt, interactions: tuple[InteractionId, ...], work: W | None, now: float
    ) -> CachedRequest[W]:
        """Remember a request that is being sampled, and drop entries that are too old."""
        cached = CachedRequest(
            fingerprint=attempt.fingerprint,
            key=attempt.idempotency_key,
            number=attempt.number,
            interactions=interactions,
            work=work,
        )
        self._requests.update(dict.fromkeys(interactions, cached))
        if cached.key is not None:
            self._by_key[cached.key] = cached
        while _is_old(oldest := next(iter(self._requests.values())), now):
            self.forget(oldest)
        while len(self._requests) > MAX_REMEMBERED:
            # Pending requests stay for as long as they run: the retry of a forgotten one would be sampled in parallel.
            ended = next((each for each in self._requests.values() if each.ended_at is not None), None)
            if ended is None:
                break
            self.forget(ended)
        return cached

    def note_read(self, interaction: InteractionId) -> None:
        """Record that the client has received this answer. A request with an idempotency key can still be repeated."""
        cached = self._requests.get(interaction)
        if cached is not None and cached.key is None:
            self.forget(cached)

    def forget(self, cached: CachedRequest[W]) -> None:
        """Drop a request that is sampled again or will not be retried."""
        for interaction in cached.interactions:
            self._requests.pop(interaction, None)
        if cached.key is not None and self._by_key.get(cached.key) is cached:
            del self._by_key[cached.key]


def _is_old(cached: CachedRequest[W], now: float) -> bool:
    """Return whether a numbered request ended too long ago to be repeated."""
    # Requests with an idempotency key are kept while there is room, because their clients may return much later.
    return cached.key is None and cached.ended_at is not None and now - cached.ended_at > RETRY_SECONDS
