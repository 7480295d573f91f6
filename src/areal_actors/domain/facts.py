"""Facts: what a service remembers beyond its own life, in the order in which it happened.

A fact is written to the journal before its consequence is told to anybody: a turn before it is answered, a reward
before it is acknowledged, the end of a session before it is confirmed. Read back in order, the facts restore the
sessions and the groups that were not trained yet. How they are stored is in ``cache/journal``.

Times are seconds since 1970 of the machine's wall clock, because they outlive every monotonic one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

from areal_actors.domain.chat import Attempt, InteractionId, SessionId
from areal_actors.domain.sampling import SampleKey
from areal_actors.domain.tree import GroupId, Interaction, RewardScope

__all__ = [
    "Fact",
    "GroupConsumed",
    "GroupQueued",
    "RewardSet",
    "SessionEnded",
    "SessionForgotten",
    "SessionStarted",
    "TurnEnded",
    "VersionSaved",
]


@frozen(kw_only=True)
class SessionStarted:
    """A session was opened. Of its keys only digests are kept; ``user`` is the owner of the key that started it.

    ``completion_digest`` is empty for a session that was opened by a version without completion keys.
    """

    session: SessionId
    key_digest: bytes = field(repr=False)
    completion_digest: bytes = field(default=b"", repr=False)
    sample_key: SampleKey
    started_at: float
    group: GroupId | None = None
    user: str | None = None
    metadata: Mapping[str, Any] = field(factory=dict)


@frozen(kw_only=True)
class TurnEnded:
    """An interaction completed, was cancelled or failed; what its tree needs to go on from there.

    ``frame`` is the digest of what surrounded its messages, and ``prompt_digest`` that of its messages as its client
    sent them; both as the tree's index keeps them. ``attempt`` and ``num_cached_tokens`` are there so that a retry is
    answered as the first sending would have been. Said again of the same interaction, the later fact holds.
    """

    session: SessionId
    interaction: Interaction
    frame: tuple[bytes, bytes, bytes] | None
    prompt_digest: bytes | None = None
    ended_at: float
    attempt: Attempt | None = None
    siblings: tuple[InteractionId, ...] = ()
    """All choices of its request, itself among them, where there is an ``attempt``."""
    asked: tuple[str, int] | None = None
    """The digest of its prompt and how often its session had asked that before, which named its random numbers;
    ``None`` for a request with a seed of its own."""
    num_cached_tokens: int = 0
    stop_sequence: str | None = None


@frozen(kw_only=True)
class RewardSet:
    """A reward was assigned, replacing an earlier one. ``scope`` says what it was set for."""

    session: SessionId
    interaction: InteractionId
    reward: float
    scope: RewardScope = RewardScope.ANSWER


@frozen(kw_only=True)
class SessionEnded:
    """A session takes no more completions. ``is_final``: it was finalized, so that no more rewards are awaited."""

    session: SessionId
    ended_at: float
    is_final: bool = False


@frozen(kw_only=True)
class SessionForgotten:
    """A session was exported or given up; nobody will ask for it again."""

    session: SessionId


@frozen(kw_only=True)
class GroupQueued:
    """Ended sessions became a group that waits to be trained. Its rows are those of its sessions."""

    group: GroupId
    position: int
    sessions: tuple[SessionId, ...]
    data: Mapping[str, Any] = field(factory=dict)


@frozen(kw_only=True)
class GroupConsumed:
    """A group was trained in the step that made ``version``, or was dropped at it."""

    group: GroupId
    version: int
    is_trained: bool


@frozen(kw_only=True)
class VersionSaved:
    """The weights of ``version`` are safe on disk: what was consumed up to it need not be remembered any longer."""

    version: int


Fact = (
    SessionStarted
    | TurnEnded
    | RewardSet
    | SessionEnded
    | SessionForgotten
    | GroupQueued
    | GroupConsumed
    | VersionSaved
)
