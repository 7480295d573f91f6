"""Journal events: what a service remembers beyond its process, in the order in which it happened.

An event is written to the journal before its consequence is reported: a turn before it is answered, a reward before it
is acknowledged, the end of a session before it is confirmed. Read back in order, the events restore the sessions and
the groups that were not trained yet. ``journal`` defines how they are stored.

Times are seconds since 1970 of the machine's wall clock, because a monotonic clock does not survive a restart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

from areal_actors.domain.chat import Attempt, InteractionId, SessionId
from areal_actors.domain.sampling import SampleKey
from areal_actors.domain.tree import GroupId, Interaction, RewardScope


@frozen(kw_only=True)
class SessionStarted:
    """A session was opened. Only digests of its keys are kept; ``user`` is the owner of the key that started it.

    ``completion_digest`` is empty for a session opened by a version without completion keys.
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
    """An interaction completed, was cancelled or failed, with everything its tree needs to continue from it.

    ``frame`` is the digest of the context of its messages, and ``prompt_digest`` that of its messages as the client
    sent them; both as the tree's index stores them. With ``attempt`` and ``num_cached_tokens``, a retry is answered
    exactly as the first sending would have been. If an interaction has several such events, the last one counts.
    """

    session: SessionId
    interaction: Interaction
    frame: tuple[bytes, bytes, bytes] | None
    prompt_digest: bytes | None = None
    ended_at: float
    attempt: Attempt | None = None
    siblings: tuple[InteractionId, ...] = ()
    """All choices of its request, including itself, if there is an ``attempt``."""
    asked: tuple[str, int] | None = None
    """The digest of its prompt and how often its session had asked for that before, which keyed its random numbers.

    ``None`` for a request with a seed.
    """
    num_cached_tokens: int = 0
    stop_sequence: str | None = None


@frozen(kw_only=True)
class RewardSet:
    """A reward was assigned, replacing an earlier one. ``scope`` is what it was set for."""

    session: SessionId
    interaction: InteractionId
    reward: float
    scope: RewardScope = RewardScope.ANSWER


@frozen(kw_only=True)
class SessionEnded:
    """A session accepts no more completions. With ``is_final`` it was finalized, and no more rewards are expected."""

    session: SessionId
    ended_at: float
    is_final: bool = False


@frozen(kw_only=True)
class SessionForgotten:
    """A session was exported or given up, and is no longer needed."""

    session: SessionId


@frozen(kw_only=True)
class GroupQueued:
    """Ended sessions became a group that waits to be trained. Its rows are those of its sessions.

    A group of a dataset has its rows in ``content``, encoded, and names no sessions. A later event without either
    discards it.
    """

    group: GroupId
    position: int
    sessions: tuple[SessionId, ...]
    data: Mapping[str, Any] = field(factory=dict)
    content: bytes | None = field(default=None, repr=False)


@frozen(kw_only=True)
class StepLeased:
    """The step that makes ``version`` trains ``groups`` of a dataset, in this order; without groups, it was discarded.

    ``content`` is the encoded rest of the lease.
    """

    version: int
    groups: tuple[GroupId, ...]
    content: bytes = field(default=b"", repr=False)


@frozen(kw_only=True)
class GroupConsumed:
    """A group was trained in the step that made ``version``, or was dropped at it."""

    group: GroupId
    version: int
    is_trained: bool


@frozen(kw_only=True)
class VersionSaved:
    """The weights of ``version`` are on disk; groups consumed up to it need not be remembered."""

    version: int


JournalEvent = (
    SessionStarted
    | TurnEnded
    | RewardSet
    | SessionEnded
    | SessionForgotten
    | GroupQueued
    | StepLeased
    | GroupConsumed
    | VersionSaved
)
