"""Prefix lookup for raw prompts: finds the earlier answer that a prompt begins with, by digest.

``links`` digests conversations message by message. A raw prompt is one piece, so the candidates are the ends of earlier
sequences: a prompt is digested once, from its beginning to the longest known end, with a lookup at every end on the
way.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from hashlib import blake2b

from areal_actors.cache.canonical import DIGEST_SIZE
from areal_actors.domain import InteractionId

__all__ = ["PrefixIndex"]


class PrefixIndex:
    """Byte sequences, mapped to the interaction that they end with; among equal ones, the latest."""

    def __init__(self) -> None:
        self._interactions: dict[bytes, InteractionId] = {}
        self._lengths: list[int] = []
        """In ascending order, without duplicates."""

    def add(self, data: bytes, interaction: InteractionId) -> None:
        """Record that ``interaction`` ends ``data``."""
        self._interactions[blake2b(data, digest_size=DIGEST_SIZE).digest()] = interaction
        at = bisect_right(self._lengths, len(data))
        if at == 0 or self._lengths[at - 1] != len(data):
            insort(self._lengths, len(data))

    def find(self, data: bytes) -> tuple[InteractionId, int] | None:
        """Return the interaction that ends the longest known prefix of ``data``, and the length of that prefix."""
        found, start, digest = None, 0, blake2b(digest_size=DIGEST_SIZE)
        for end in self._lengths[: bisect_right(self._lengths, len(data))]:
            digest.update(data[start:end])
            start = end
            interaction = self._interactions.get(digest.digest())
            if interaction is not None:
                found = interaction, end
        return found
