"""Durable sessions: every event is in the journal before it is acknowledged.

The events of one session are written one after another, and each is applied to the session as soon as it is written, so
that the journal and the memory agree on one order. Sessions do not wait for one another, so that the journal can write
the events of many of them in one batch. An event that could not be written is never applied::

    lock ── decide what changes ── write ──┬── written ──▶ apply it ──▶ acknowledge
                                           └── failed ───▶ nothing changes; the client may try again (503)

``request`` builds the event of a turn; ``journal/recovery`` turns events back into sessions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
from attrs import define, field

from areal_actors.cache import Session
from areal_actors.domain import (
    Answer,
    Interaction,
    InteractionId,
    InteractionStatus,
    JournalEvent,
    RewardSet,
    SampleKey,
    SessionEnded,
    SessionForgotten,
    SessionId,
    SessionStarted,
    TurnEnded,
    Usage,
)
from areal_actors.errors import JournalError, Unavailable
from areal_actors.journal import Journal, RecoveredSession
from areal_actors.lib.telemetry import get_logger
from areal_actors.sessions.retries import RetryCache

_log = get_logger(__name__)

WRITE_SECONDS = 30.0
"""Time limit of one write. A disk that takes longer is treated as lost.

The limit is needed because a write continues after its client has left.
"""


@define(eq=False, kw_only=True)
class SessionJournal:
    """The journal writer of one durable session. A writer holds ``lock`` until its events are applied.

    ``clock`` returns seconds since 1970.
    """

    session: SessionId
    clock: Callable[[], float]
    lock: anyio.Lock = field(factory=lambda: anyio.Lock(fast_acquire=True), init=False)
    _journal: Journal = field(alias="journal")

    async def write(self, *events: JournalEvent) -> None:
        """Return when ``events`` are durable. The write continues if the caller is cancelled meanwhile.

        Raises:
            Unavailable: the events are not durable, or it is unknown whether they are.
        """
        try:
            # Shielded: after a cancelled write it would be unknown whether the events are durable.
            with anyio.fail_after(WRITE_SECONDS, shield=True):
                await self._journal.write(*events)
        except (JournalError, TimeoutError) as error:
            _log.error("journal_failed", session=self.session, error=repr(error))
            raise Unavailable("This could not be made durable; it was not done, and may be repeated.") from error

    async def write_start(self, session: Session, key: SampleKey) -> None:
        """Write the start of the session, whose samples are keyed by ``key``. Raises as ``write`` does."""
        started = SessionStarted(
            session=session.id,
            key_digest=session.key_digest,
            completion_digest=session.completion_digest,
            sample_key=key,
            started_at=self.clock(),
            group=session.tree.group,
            user=session.user,
            metadata=session.tree.metadata,
        )
        await self.write(started)

    async def write_reward(self, rewarded: Interaction) -> None:
        """Write the reward of ``rewarded``. Raises as ``write`` does."""
        await self.write(self._reward(rewarded))

    async def write_end(self, rewarded: Interaction | None) -> None:
        """Write the end of the session, with the final reward if it is finalized. Raises as ``write`` does."""
        ended = SessionEnded(session=self.session, ended_at=self.clock(), is_final=rewarded is not None)
        await self.write(*([] if rewarded is None else [self._reward(rewarded)]), ended)

    def _reward(self, rewarded: Interaction) -> RewardSet:
        assert rewarded.reward is not None
        return RewardSet(
            session=self.session, interaction=rewarded.id, reward=rewarded.reward, scope=rewarded.reward_scope
        )

    def note(self, *events: JournalEvent) -> None:
        """Write ``events`` without waiting."""
        self._journal.note(*events)

    def note_forgotten(self) -> None:
        """Write that the session is no longer needed."""
        self.note(SessionForgotten(session=self.session))


# --------------------------------------------------------------------------------------------------- restoring


def restore_session(recovered: RecoveredSession, *, now: float, wall_now: float) -> Session:
    """Return the session as it was when the earlier process ended.

    Its grace period has continued while no process ran; its idle time starts again. ``now`` is a time of the sessions'
    clock, ``wall_now`` is in seconds since 1970.
    """
    ended_at = recovered.ended_at
    return Session(
        id=recovered.id,
        tree=recovered.tree,
        key_digest=recovered.started.key_digest,
        completion_digest=recovered.started.completion_digest,
        last_used_at=now,
        ended_at=None if ended_at is None else now - max(wall_now - ended_at, 0.0),
    )


def restore_retry_cache(recovered: RecoveredSession, *, now: float, wall_now: float) -> RetryCache[Any]:
    """Return the retry cache of the session: the requests that were answered in full.

    Answers that a later turn continues, or that have a reward, were read by the client. Requests that were cut off by
    the end of the process are unknown, and their retries are sampled.
    """
    attempts: RetryCache[Any] = RetryCache()
    known: dict[InteractionId, TurnEnded] = {}
    for turn in recovered.turns:
        known[turn.interaction.id] = turn
        if turn.interaction.parent is not None:
            attempts.note_read(turn.interaction.parent)
        siblings = [known[name] for name in turn.siblings if name in known]
        answers = tuple(answer_of(each) for each in siblings if each.interaction.status is InteractionStatus.COMPLETED)
        if turn.attempt is not None and len(answers) == len(turn.siblings):
            cached = attempts.begin(turn.attempt, turn.siblings, None, now)
            cached.end(answers, now - max(wall_now - turn.ended_at, 0.0))
    for name, turn in known.items():
        if turn.interaction.reward is not None:
            attempts.note_read(name)
    return attempts


def answer_of(turn: TurnEnded) -> Answer:
    """Return the answer of a completed turn, as it was given."""
    interaction = turn.interaction
    assert interaction.output is not None
    assert interaction.completion is not None
    usage = Usage(
        prompt_tokens=interaction.num_prompt_tokens,
        completion_tokens=len(interaction.completion.token_ids),
        cached_tokens=turn.num_cached_tokens,
    )
    return Answer(
        interaction=interaction.id,
        message=interaction.output,
        completion=interaction.completion,
        usage=usage,
        stop_sequence=turn.stop_sequence,
        temperature=None if interaction.sampling is None else interaction.sampling.temperature,
    )
