"""Exported trajectories as a JSON document: the answer of ``POST /export_trajectories``, written and parsed.

The document round-trips: the parsed arrays equal the written ones bit by bit, because a float32 is written with enough
digits to distinguish it from its neighbours. There is also a binary form, whose arrays are already padded.
"""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from typing import Any

import cattrs
import numpy as np

from areal_actors.cache import to_arrays
from areal_actors.domain import (
    Episode,
    SessionId,
    Trajectory,
    TurnInfo,
    Untrained,
)
from areal_actors.errors import ExportError

DOCUMENT_VERSION = 2
"""The newest version that can be read."""

ARRAYS_TYPE = "application/x-npz"
"""The media type in the ``Accept`` header of a client that wants arrays instead of the document."""

_ARRAYS = ("input_ids", "loss_mask", "logprobs", "versions", "returns", "turns")
_SCALARS = ("member", "reward", "num_turns", "seconds", "failure")
_CONVERTER = cattrs.Converter(detailed_validation=False)
_OPTIONAL_ARRAYS = ("predecessors", "raw_logprobs", "routed_experts")


def format_episode(episode: Episode) -> dict[str, Any]:
    """Return a document of ``episode``; arrays stay numpy arrays, which the JSON encoder writes as lists."""
    rows: list[dict[str, Any]] = []
    for row in episode.trajectories:
        arrays = {name: getattr(row, name) for name in _ARRAYS}
        arrays |= {name: found for name in _OPTIONAL_ARRAYS if (found := getattr(row, name)) is not None}
        infos = {"turn_infos": _CONVERTER.unstructure(row.turn_infos)} if row.turn_infos else {}
        rows.append({"interaction_ids": row.interactions, "reward": row.reward, "tag": row.tag, **arrays, **infos})
    return {
        # Documents without trees are those of version 1.
        "version": DOCUMENT_VERSION if any(row.predecessors is not None for row in episode.trajectories) else 1,
        "session_id": episode.session,
        **{name: getattr(episode, name) for name in _SCALARS},
        "trajectories": rows,
        "untrained": [
            {"interaction_id": row.interaction, "num_tokens": row.num_tokens, "reason": row.reason}
            for row in episode.untrained
        ],
    }


def pack_arrays(episode: Episode) -> bytes:
    """Return the rows for ``numpy.load``: the padded arrays of ``cache.arrays``, by name, without pickles."""
    file = BytesIO()
    arrays: dict[str, Any] = to_arrays(episode.trajectories)
    np.savez(file, **arrays)
    return file.getvalue()


def parse_episode(document: Mapping[str, Any]) -> Episode:
    """Return the episode that a document describes.

    Raises:
        ExportError: the document has another version, or is not an exported session.
    """
    if document.get("version") not in (1, DOCUMENT_VERSION):
        raise ExportError(
            f"The document has version {document.get('version')!r}; this client reads up to {DOCUMENT_VERSION}. "
            "Use the release that the proxy runs."
        )
    try:
        session = SessionId(document["session_id"])
        trajectories = [
            Trajectory(
                session=session,
                interactions=tuple(row["interaction_ids"]),
                reward=row["reward"],
                tag=row["tag"],
                **{name: row[name] for name in _ARRAYS},
                **{name: row[name] for name in _OPTIONAL_ARRAYS if name in row},
                turn_infos=_CONVERTER.structure(row.get("turn_infos", ()), tuple[TurnInfo, ...]),
            )
            for row in document["trajectories"]
        ]
        untrained = [
            {"interaction": row["interaction_id"], "num_tokens": row["num_tokens"], "reason": row["reason"]}
            for row in document["untrained"]
        ]
        return Episode(
            session=session,
            **{name: document[name] for name in _SCALARS},
            trajectories=tuple(trajectories),
            untrained=_CONVERTER.structure(untrained, tuple[Untrained, ...]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ExportError(f"The document is not an exported session: {type(error).__name__}: {error}") from error
