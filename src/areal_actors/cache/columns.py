"""The columns of a training row other than its ids: sampling data and returns.

``export`` and ``trees`` decide which tokens are in a row, and in what order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import frozen

from areal_actors.cache.history import Lookup
from areal_actors.domain import Completion, Credit, Interaction, InteractionId, SessionId, TurnInfo
from areal_actors.errors import ExportError

__all__ = ["Source", "Span", "checked_completion", "columns_of", "infos_of"]


@frozen
class Source:
    """The input for building rows: the turns to train, in order of request, and facts about every completed turn."""

    session: SessionId
    trained: tuple[Interaction, ...]
    returns: Mapping[InteractionId, float]
    depths: Mapping[InteractionId, int]
    credits: Mapping[InteractionId, Credit]
    lookup: Lookup
    max_tokens: int | None = None


@frozen
class Span:
    """The position of a turn's output in a row."""

    turn: Interaction
    completion: Completion
    start: int


def columns_of(
    spans: Sequence[Span], num_tokens: int, returns: Mapping[InteractionId, float], trained: frozenset[InteractionId]
) -> dict[str, npt.NDArray[Any]]:
    """Return the columns other than the ids. Values outside the spans are neutral."""
    columns: dict[str, npt.NDArray[Any]] = {
        "loss_mask": np.zeros(num_tokens, np.int32),
        "logprobs": np.zeros(num_tokens, np.float32),
        "versions": np.full(num_tokens, -1, np.int32),
        "returns": np.zeros(num_tokens, np.float32),
        "turns": np.full(num_tokens, -1, np.int32),
        "raw_logprobs": np.zeros(num_tokens, np.float32),
    }
    for position, span in enumerate(spans):
        where = slice(span.start, span.start + len(span.completion.token_ids))
        columns["versions"][where] = span.completion.versions
        columns["turns"][where] = position
        columns["returns"][where] = returns.get(span.turn.id, 0.0)
        if span.turn.id in trained:
            columns["loss_mask"][where] = 1
            columns["logprobs"][where] = span.completion.logprobs
            columns["raw_logprobs"][where] = span.completion.raw_logprobs
    return columns


def infos_of(spans: Sequence[Span], source: Source) -> tuple[TurnInfo, ...]:
    """Return the ``TurnInfo`` of each turn of a row, in order."""
    return tuple(
        TurnInfo(
            depth=source.depths.get(span.turn.id, 0),
            tag=span.turn.tag,
            finish=span.completion.finish,
            credit=source.credits.get(span.turn.id),
            sampling=span.turn.sampling,
        )
        for span in spans
    )


def checked_completion(turn: Interaction, num_tokens: int) -> Completion:
    """Return the turn's completion, after checking its position and the lengths of its columns.

    Raises:
        ExportError: the record is damaged.
    """
    if turn.completion is None:
        raise ExportError(f"Interaction {turn.id} has no tokens but was continued; the session's record is damaged.")
    if turn.num_prompt_tokens != num_tokens:
        raise ExportError(
            f"Interaction {turn.id} was sampled after {turn.num_prompt_tokens} tokens, but its ancestors hold "
            f"{num_tokens}; the session's record is damaged."
        )
    completion = turn.completion
    columns = (completion.token_ids, completion.logprobs, completion.raw_logprobs, completion.versions)
    lengths = {len(column) for column in columns}
    if len(lengths) > 1:
        raise ExportError(f"The ids, logprobs and versions of interaction {turn.id} differ in number: {lengths}.")
    return turn.completion
