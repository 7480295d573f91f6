"""The names of what a service may be doing when it is killed, and of the points at which it can kill itself."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["DATASET_POINTS", "POINTS", "Point", "Stage"]


class Stage(StrEnum):
    """What the process does; several at once."""

    LOADING = "loading"
    """Imports, the model, the checkpoint."""
    RESTORING = "restoring"
    """The journal is read, and actors are started."""
    SERVING = "serving"
    """Agents may come."""
    ANSWERING = "answering"
    """The first turn was committed."""
    COMMITTING = "committing"
    """The journal is in a transaction."""
    TRAINING = "training"
    TRAINED = "trained"
    """Between two training steps: weights are published, groups acknowledged."""
    SAVING = "saving"
    """A checkpoint is written."""


class Point(StrEnum):
    """Where a process can kill itself. Those of facts are before or after the commit that holds one."""

    START = "session"
    TURN = "turn"
    REWARD = "reward"
    END = "end"
    FORGET = "forgotten"
    QUEUE = "queued"
    LEASE = "leased"
    CONSUME = "consumed"
    SAVE = "saved"
    RESTORING = "restoring"
    RESTORED = "restored"
    TRAINED = "trained"
    CHECKPOINT_PART = "checkpoint-part"
    CHECKPOINT_INSTALL = "checkpoint-install"
    CHECKPOINT_WRITTEN = "checkpoint-written"


_FACTS = (Point.START, Point.TURN, Point.REWARD, Point.END, Point.QUEUE, Point.CONSUME, Point.SAVE)
_OF_DATASETS = (Point.START, Point.TURN, Point.FORGET, Point.QUEUE, Point.LEASE, Point.CONSUME, Point.SAVE)
_OTHERS = tuple(point for point in Point if point not in (*_FACTS, Point.LEASE, Point.FORGET))

POINTS: tuple[str, ...] = (*(f"{when} {point}" for point in _FACTS for when in ("before", "after")), *_OTHERS)
"""All of them, as ``CHAOS_TRAP`` names them."""
DATASET_POINTS: tuple[str, ...] = (
    *(f"{when} {point}" for point in _OF_DATASETS for when in ("before", "after")),
    *_OTHERS,
)
"""Those of a run over a dataset."""
