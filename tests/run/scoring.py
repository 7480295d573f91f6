"""A reward function of its own module: a worker process imports nothing but this to run it."""

from __future__ import annotations

from typing import Any


def share_of_letters(prompt: str, answer: str, input_ids: list[int], output_ids: list[int], **data: Any) -> float:
    """How much of an answer is letters."""
    return sum(character.isalpha() for character in answer) / max(len(answer), 1)
