"""Search for tags in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["num_held_back"]


def num_held_back(text: str, tags: Iterable[str]) -> int:
    """Return how many characters at the end of ``text`` may be the beginning of one of ``tags`` (0: none)."""
    return max((_num_begun(text, tag) for tag in tags), default=0)


def _num_begun(text: str, tag: str) -> int:
    longest = min(len(text), len(tag) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(tag[:n])), 0)
