"""Which requests of one session were sent before: what tells a retry from a second request that happens to be equal.

Pure bookkeeping; who waits for whom is in ``answering``. The evidence for a retry is what the client says of itself: an
idempotency key, or the number of sendings before this one. Equality alone is none: parallel identical calls are
siblings, and so is the same question asked again.

*A named request* (idempotency key) is found by its name. *A numbered one* names nobody, so that of several identical
requests one is chosen, which no other retry of the same number has been given. First come those that the same client
is most likely to have sent just before:

1. whose latest sending has the highest number below this one;
2. of these, the ones that came to no answer, because their client hung up or they failed: there the client has
   reason to try again;
3. of these, the one that began last.

Whoever is given a request without an answer samples anew, in its place. Answers that a later request continues, or that
were rewarded by name, have been read: no numbered retry asks for them. The others can be repeated for two minutes,
which is longer than any client library waits between two sendings.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from attrs import define, field

from areal_actors.domain import Answer, Attempt, InteractionId
from areal_actors.errors import IdempotencyMismatch

__all__ = ["Attempts", "Sending"]

W = TypeVar("W")

MAX_REMEMBERED = 256
"""Answers per session that can be repeated: more than anybody asks at once, and a few dozen kilobytes."""
RETRY_SECONDS = 120.0
"""Client libraries honour a ``Retry-After`` of up to two minutes."""


@define(eq=False, kw_only=True)
class Sending(Generic[W]):
    """A request as it was sent, and what became of it.

    ``work`` answers it while it is pending. ``answers`` are there once all choices are; ``None`` at the end means that
    it was cut off or failed. ``number`` is that of its latest sending.
    """

    fingerprint: str
    key: str | None
    number: int
    interactions: tuple[InteractionId, ...]
    work: W | None
    answers: tuple[Answer, ...] | None = None
    ended_at: float | None = None

    @property
    def is_cut(self) -> bool:
        """Whether it ended without an answer."""
        return self.ended_at is not None and self.answers is None

    def end(self, answers: tuple[Answer, ...] | None, now: float) -> None:
        """Note what became of it."""
        self.work, self.answers, self.ended_at = None, answers, now


@define(eq=False)
class Attempts(Generic[W]):
    """The requests of one session that may be sent again, oldest first; one entry per interaction."""

    _sendings: dict[InteractionId, Sending[W]] = field(factory=dict, init=False)
    _by_key: dict[str, Sending[W]] = field(factory=dict, init=False)

    def __len__(self) -> int:
        """The number of interactions that are remembered."""
        return len(self._sendings)

    def recognise(self, attempt: Attempt, now: float) -> Sending[W] | None:
        """The pending or answered request that ``attempt`` repeats; ``None`` if it has to be sampled.

        Raises:
            IdempotencyMismatch: its key names a request with another body.
        """
        found = self._named(attempt) if attempt.idempotency_key is not None else self._numbered(attempt, now)
        if found is not None and found.is_cut:
            self.forget(found)
            return None
        return found

    def begin(
        self, attempt: Attempt, interactions: tuple[InteractionId, ...], work: W | None, now: float
    ) -> Sending[W]:
        """Remember a request that is sampled, and forget what is too old."""
        sending = Sending(
            fingerprint=attempt.fingerprint,
            key=attempt.idempotency_key,
            number=attempt.number,
            interactions=interactions,
            work=work,
        )
        self._sendings.update(dict.fromkeys(interactions, sending))
        if sending.key is not None:
            self._by_key[sending.key] = sending
        self._forget_old(now)
        return sending

    def note_read(self, interaction: InteractionId) -> None:
        """The client has shown that it knows this answer. A named request can still be repeated."""
        sending = self._sendings.get(interaction)
        if sending is not None and sending.key is None:
            self.forget(sending)

    def forget(self, sending: Sending[W]) -> None:
        """It is sampled anew, or will not be asked for again."""
        for interaction in sending.interactions:
            self._sendings.pop(interaction, None)
        if sending.key is not None and self._by_key.get(sending.key) is sending:
            del self._by_key[sending.key]

    def _named(self, attempt: Attempt) -> Sending[W] | None:
        found = None if attempt.idempotency_key is None else self._by_key.get(attempt.idempotency_key)
        if found is not None and found.fingerprint != attempt.fingerprint:
            raise IdempotencyMismatch(
                "This Idempotency-Key came with another request before; use a new key for a new request."
            )
        return found

    def _numbered(self, attempt: Attempt, now: float) -> Sending[W] | None:
        if attempt.number == 0:
            return None
        candidates = [sending for sending in self._sendings.values() if _fits(sending, attempt, now)]
        if not candidates:
            return None
        found = max(reversed(candidates), key=lambda sending: (sending.number, sending.is_cut))  # the first of equals
        found.number = attempt.number
        return found

    def _forget_old(self, now: float) -> None:
        """What is pending is kept, for as long as it takes: forgotten, its retry would be sampled beside it."""
        while _is_old(oldest := next(iter(self._sendings.values())), now):
            self.forget(oldest)
        while len(self._sendings) > MAX_REMEMBERED:
            ended = next((each for each in self._sendings.values() if each.ended_at is not None), None)
            if ended is None:
                return
            self.forget(ended)


def _fits(sending: Sending[W], attempt: Attempt, now: float) -> bool:
    is_same = sending.fingerprint == attempt.fingerprint and sending.key is None
    return is_same and sending.number < attempt.number and not _is_old(sending, now)


def _is_old(sending: Sending[W], now: float) -> bool:
    """Named requests are kept for as long as there is room: their clients may come back much later."""
    return sending.key is None and sending.ended_at is not None and now - sending.ended_at > RETRY_SECONDS
