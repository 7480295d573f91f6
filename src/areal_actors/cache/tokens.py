"""Exact token ids of interactions, reassembled from the stored suffixes.

``history`` does the same for messages, and documents ``lookup``.
"""

from __future__ import annotations

from operator import attrgetter

import numpy as np

from areal_actors.cache.history import Lookup, ancestry
from areal_actors.domain import Interaction, InteractionId, Ints, as_ints

__all__ = ["full_ids", "longest_token_ancestor", "prompt_ids", "token_path"]


def token_path(interaction: Interaction, lookup: Lookup) -> list[Interaction]:
    """Return the interaction and its token parents, root first."""
    return ancestry(interaction, lookup, attrgetter("token_parent"))


def prompt_ids(interaction: Interaction, lookup: Lookup) -> Ints:
    """Return the ids of the whole prompt, int32 [T]."""
    parts: list[Ints] = []
    for turn in token_path(interaction, lookup):
        parts.append(turn.prompt_suffix)
        if turn is not interaction and turn.completion is not None:
            parts.append(turn.completion.token_ids)
    return as_ints(np.concatenate(parts))


def full_ids(interaction: Interaction, lookup: Lookup) -> Ints:
    """Return the ids of the prompt and of the sampled output, int32 [T]."""
    prompt = prompt_ids(interaction, lookup)
    if interaction.completion is None:
        return prompt
    return as_ints(np.concatenate([prompt, interaction.completion.token_ids]))


def longest_token_ancestor(token_ids: Ints, parent: Interaction, lookup: Lookup) -> tuple[Interaction, int] | None:
    """Return the nearest conversational ancestor whose exact ids begin ``token_ids``, and their number.

    ``parent`` is tried first. Every interaction on the way is compared at most once, so the work is bounded by the ids
    that the ancestors store.
    """
    lengths: dict[InteractionId, int] = {}  # how far the ids of an interaction agree to their end; -1 if they do not
    ancestor: Interaction | None = parent
    while ancestor is not None:
        for turn in _unseen(ancestor, lengths, lookup):
            start = 0 if turn.token_parent is None else lengths[turn.token_parent]
            lengths[turn.id] = _agreement(token_ids, turn, start)
        if lengths[ancestor.id] >= 0:
            return ancestor, lengths[ancestor.id]
        ancestor = None if ancestor.parent is None else lookup(ancestor.parent)
    return None


def _unseen(interaction: Interaction, seen: dict[InteractionId, int], lookup: Lookup) -> list[Interaction]:
    path, turn = [], interaction
    while turn.id not in seen:
        path.append(turn)
        if turn.token_parent is None:
            break
        turn = lookup(turn.token_parent)
    path.reverse()
    return path


def _agreement(token_ids: Ints, turn: Interaction, start: int) -> int:
    """Return the end of ``turn``'s stored ids in ``token_ids`` if they match from ``start`` on; -1 if not."""
    if start < 0 or turn.completion is None:
        return -1
    for part in (turn.prompt_suffix, turn.completion.token_ids):
        end = start + len(part)
        if end > len(token_ids) or not np.array_equal(token_ids[start:end], part):
            return -1
        start = end
    return start
