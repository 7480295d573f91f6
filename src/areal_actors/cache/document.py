"""Exported rows as a versioned JSON document, and back: the form that HTTP clients and files get.

::

    {"format": "areal-actors/trajectories", "version": 1, "session_id": "task-0-…",
     "interactions": {"<id of the row's last interaction>": {
         "interaction_id": "…", "reward": 0.9, "turn_ids": ["…"], "tag": null, "turns": [-1, 0, …],
         "tensor_dict": {"input_ids": [[…]], "attention_mask": [[…]], "loss_mask": [[…]], "logprobs": [[…]],
                         "versions": [[…]], "returns": [[…]], "rewards": [0.9]}}},
     "untrained": [{"interaction_id": "…", "num_tokens": 7, "reason": "cancelled"}]}

A tree's row has ``predecessors`` and ``position_ids`` in its ``tensor_dict``. A document with such a row has version 2,
because a reader that does not know them would take branches for one sequence. ``raw_logprobs`` beside ``turns`` are
those of the plain softmax, ``null`` for a token whose own an engine did not know. The tensors of a row have a leading
axis of one row, names and dtypes as in ``arrays``. A float32 is written as the double that equals it, so that reading
gives the same bits; ``reward`` is a double.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isnan
from typing import Any

import numpy as np

from areal_actors.cache.arrays import to_arrays
from areal_actors.cache.export import Exported
from areal_actors.domain import Floats, InteractionId, SessionId, Trajectory, Untrained, UntrainedReason, is_tree_order
from areal_actors.errors import ExportError

__all__ = ["FORMAT", "VERSION", "from_document", "to_document"]

FORMAT = "areal-actors/trajectories"
VERSION = 2
"""The newest version that is read; documents without trees are written as version 1."""


def to_document(exported: Exported) -> dict[str, Any]:
    """``exported`` in plain dicts, lists, strings and numbers.

    Raises ``ExportError`` if a log-probability or return is not finite, since JSON cannot say so. Only a plain
    log-probability may be unknown (NaN).
    """
    return {
        "format": FORMAT,
        "version": VERSION if any(row.predecessors is not None for row in exported.trajectories) else 1,
        "session_id": exported.session,
        "interactions": {row.interactions[-1]: _format_row(row) for row in exported.trajectories},
        "untrained": [
            {"interaction_id": entry.interaction, "num_tokens": entry.num_tokens, "reason": str(entry.reason)}
            for entry in exported.untrained
        ],
    }


def _format_row(row: Trajectory) -> dict[str, Any]:
    arrays = to_arrays([row])
    columns = {"logprobs": row.logprobs, "returns": row.returns, "raw_logprobs": row.raw_logprobs}
    for name, column in columns.items():
        is_fine = column is None or np.isfinite(column) | (np.isnan(column) & (name == "raw_logprobs"))
        if not np.all(is_fine):
            raise ExportError(f"The {name} of interaction {row.interactions[-1]} are not finite; do not train on it.")
    raw = {} if row.raw_logprobs is None else {"raw_logprobs": _format_unknown(row.raw_logprobs)}
    return {
        "interaction_id": row.interactions[-1],
        "reward": row.reward,
        "turn_ids": list(row.interactions),
        "tag": row.tag,
        "turns": row.turns.tolist(),
        **raw,
        "tensor_dict": {name: array.tolist() for name, array in arrays.items()},
    }


def _format_unknown(values: Floats) -> list[float | None]:
    """``None`` where an engine did not know a value: JSON cannot say NaN."""
    return [None if isnan(value) else value for value in values.tolist()]


def from_document(document: Mapping[str, Any]) -> Exported:
    """What ``to_document`` was given. Raises ``ExportError`` for another format or version, or a malformed document."""
    found = document.get("format"), document.get("version")
    if found not in ((FORMAT, 1), (FORMAT, VERSION)):
        raise ExportError(
            f"This is {found[0]!r} version {found[1]!r}; only {FORMAT!r} up to version {VERSION} can be read."
        )
    try:
        session = SessionId(document["session_id"])
        return Exported(
            session=session,
            trajectories=tuple(_parse_row(session, row) for row in document["interactions"].values()),
            untrained=tuple(_parse_untrained(entry) for entry in document["untrained"]),
        )
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ExportError(f"The document of trajectories is malformed: {error!r}.") from error


def _parse_row(session: SessionId, row: Mapping[str, Any]) -> Trajectory:
    tensors = row["tensor_dict"]
    columns = {name: tensors[name][0] for name in ("input_ids", "loss_mask", "logprobs", "versions", "returns")}
    columns |= {name: tensors[name][0] for name in ("predecessors",) if name in tensors}
    columns |= {name: row[name] for name in ("raw_logprobs",) if name in row}
    lengths = {len(column) for column in (*columns.values(), row["turns"])}
    if len(lengths) != 1:
        msg = f"the columns of row {row['interaction_id']} differ in length: {sorted(lengths)}"
        raise ValueError(msg)
    if "predecessors" in columns and not is_tree_order(np.asarray(columns["predecessors"])):
        msg = f"a token of row {row['interaction_id']} follows one that stands behind it"
        raise ValueError(msg)
    return Trajectory(
        session=session,
        interactions=tuple(InteractionId(turn) for turn in row["turn_ids"]),
        turns=row["turns"],
        reward=float(row["reward"]),
        tag=row["tag"],
        **columns,
    )


def _parse_untrained(entry: Mapping[str, Any]) -> Untrained:
    return Untrained(
        interaction=InteractionId(entry["interaction_id"]),
        num_tokens=entry["num_tokens"],
        reason=UntrainedReason(entry["reason"]),
    )
