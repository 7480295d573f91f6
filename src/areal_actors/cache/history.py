"""What was said: the messages of an interaction, put together again from the new ones that each turn stores.

``lookup`` finds interactions of one session by id and raises for unknown ones; the tree passes its own, readers of a
``SessionRecord`` pass ``lookup_in(record)``. The ids that were read and sampled are put together in ``tokens``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter

from areal_actors.cache.canonical import num_leading_instructions
from areal_actors.domain import ChatMessage, Interaction, InteractionId, SessionRecord
from areal_actors.errors import ExportError

__all__ = ["Lookup", "ancestry", "full_history", "go_on", "lookup_in", "without_instructions"]

Lookup = Callable[[InteractionId], Interaction]
"""Finds an interaction of one session by its id."""


def lookup_in(record: SessionRecord) -> Lookup:
    """A look-up among the interactions of ``record``; it raises ``ExportError`` for ids that are not there."""
    by_id = {interaction.id: interaction for interaction in record.interactions}

    def lookup(interaction_id: InteractionId) -> Interaction:
        try:
            return by_id[interaction_id]
        except KeyError:
            raise ExportError(
                f"Session {record.id} refers to interaction {interaction_id}, which it lacks; the record is damaged."
            ) from None

    return lookup


def ancestry(
    interaction: Interaction, lookup: Lookup, parent_of: Callable[[Interaction], InteractionId | None]
) -> list[Interaction]:
    """The interaction and its ancestors, root first. Raises ``ExportError`` if one was asked after its descendant."""
    path = [interaction]
    while (parent_id := parent_of(path[-1])) is not None:
        parent = lookup(parent_id)
        if parent.order >= path[-1].order:
            raise ExportError(f"Interaction {path[-1].id} continues one that was asked later; the record is damaged.")
        path.append(parent)
    path.reverse()
    return path


def full_history(interaction: Interaction, lookup: Lookup, *, with_answer: bool = True) -> tuple[ChatMessage, ...]:
    """All messages of an interaction as they were stored, its own answer last (if it has one and ``with_answer``)."""
    messages: list[ChatMessage] = []
    for turn in ancestry(interaction, lookup, attrgetter("parent")):
        go_on(messages, turn.messages, turn.num_instructions)
        if turn.output is not None and (with_answer or turn is not interaction):
            messages.append(turn.output)
    return tuple(messages)


def go_on(messages: list[ChatMessage], new: Sequence[ChatMessage], num_instructions: int | None) -> None:
    """Continue ``messages`` in place with ``new``, the first ``num_instructions`` of which replace the old ones."""
    if num_instructions is not None:
        messages[: num_leading_instructions(messages)] = new[:num_instructions]
    messages.extend(new[num_instructions or 0 :])


def without_instructions(messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
    """The messages after the leading system or developer messages."""
    return messages[num_leading_instructions(messages) :]
