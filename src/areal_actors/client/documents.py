"""Exported trajectories as a JSON document: what ``POST /export_trajectories`` answers, and how it is read back.

The document round-trips: the arrays that are read are those that were written, bit by bit, because a float32 is written
with as many digits as tell it from its neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal_actors.domain import Episode, InteractionId, SessionId, Trajectory, Untrained, UntrainedReason
from areal_actors.errors import ExportError

__all__ = ["DOCUMENT_VERSION", "format_episode", "parse_episode"]

DOCUMENT_VERSION = 1

_ARRAYS = ("input_ids", "loss_mask", "logprobs", "versions", "returns", "turns")


def format_episode(episode: Episode) -> dict[str, Any]:
    """A document of ``episode``; arrays stay numpy arrays, which the JSON encoder writes as lists."""
    return {
        "version": DOCUMENT_VERSION,
        "session_id": episode.session,
        "member": episode.member,
        "reward": episode.reward,
        "num_turns": episode.num_turns,
        "seconds": episode.seconds,
        "failure": episode.failure,
        "trajectories": [_format_trajectory(trajectory) for trajectory in episode.trajectories],
        "untrained": [
            {"interaction_id": row.interaction, "num_tokens": row.num_tokens, "reason": row.reason}
            for row in episode.untrained
        ],
    }


def parse_episode(document: Mapping[str, Any]) -> Episode:
    """The episode that a document describes.

    Raises:
        ExportError: the document is of another version, or not one of ours.
    """
    if document.get("version") != DOCUMENT_VERSION:
        raise ExportError(
            f"The document has version {document.get('version')!r}; this client reads version {DOCUMENT_VERSION}. "
            "Use the release that the proxy runs."
        )
    try:
        return _parse_episode(document)
    except (KeyError, TypeError, ValueError) as error:
        raise ExportError(f"The document is no exported session: {type(error).__name__}: {error}") from error


def _format_trajectory(row: Trajectory) -> dict[str, Any]:
    arrays = {name: getattr(row, name) for name in _ARRAYS}
    return {"interaction_ids": row.interactions, "reward": row.reward, "tag": row.tag, **arrays}


def _parse_episode(document: Mapping[str, Any]) -> Episode:
    session = SessionId(document["session_id"])
    return Episode(
        session=session,
        member=document["member"],
        reward=document["reward"],
        num_turns=document["num_turns"],
        seconds=document["seconds"],
        failure=document["failure"],
        trajectories=tuple(_parse_trajectory(session, row) for row in document["trajectories"]),
        untrained=tuple(
            Untrained(
                interaction=InteractionId(row["interaction_id"]),
                num_tokens=row["num_tokens"],
                reason=UntrainedReason(row["reason"]),
            )
            for row in document["untrained"]
        ),
    )


def _parse_trajectory(session: SessionId, row: Mapping[str, Any]) -> Trajectory:
    return Trajectory(
        session=session,
        interactions=tuple(InteractionId(name) for name in row["interaction_ids"]),
        reward=row["reward"],
        tag=row["tag"],
        **{name: row[name] for name in _ARRAYS},
    )
