"""Durable sessions: what happens in one is in the journal before anybody is told of it.

Facts of one session are written one after another, and each is applied to the session when it is written: what was
written is what is remembered, in one order. Sessions do not wait for one another, so that a journal can write many of
them at once. A fact that could not be written was never applied::

    lock ── decide what changes ── write ──┬── written ──▶ change it ──▶ tell
                                           └── failed ───▶ nothing changes; the client may try again (503)

What a fact says of a turn is in ``answering``, how facts become sessions again in ``cache/journal/recovery``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import anyio
from attrs import define, field

from areal_actors.actors.attempts import Attempts
from areal_actors.actors.turns import SampleKeys
from areal_actors.cache import Session
from areal_actors.cache.journal import Journal, RecoveredSession
from areal_actors.domain import (
    Answer,
    Fact,
    Interaction,
    InteractionId,
    InteractionStatus,
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
from areal_actors.telemetry import get_logger

__all__ = ["Ledger", "restore_attempts", "restore_keys", "restore_session"]

_log = get_logger(__name__)

WRITE_SECONDS = 30.0
"""For a write that its client does not wait for any longer. A disk that takes longer is as good as gone."""


@define(eq=False, kw_only=True)
class Ledger:
    """The facts of one durable session. Whoever writes holds ``lock`` until what was written is applied.

    ``clock`` gives seconds since 1970.
    """

    session: SessionId
    clock: Callable[[], float]
    lock: anyio.Lock = field(factory=lambda: anyio.Lock(fast_acquire=True), init=False)
    _journal: Journal = field(alias="journal")

    async def write(self, *facts: Fact) -> None:
        """Return when ``facts`` are durable; a client that leaves meanwhile changes nothing of it.

        Raises:
            Unavailable: they are not, or nobody knows.
        """
        try:
            with anyio.fail_after(WRITE_SECONDS, shield=True):
                await self._journal.write(*facts)
        except (JournalError, TimeoutError) as error:
            _log.error("journal_failed", session=self.session, error=repr(error))
            raise Unavailable("This could not be made durable; it was not done, and may be repeated.") from error

    async def write_start(self, session: Session, key: SampleKey) -> None:
        """The session itself, whose samples are named by ``key``. Raises as ``write`` does."""
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
        """The reward of ``rewarded``. Raises as ``write`` does."""
        await self.write(self._reward(rewarded))

    async def write_end(self, rewarded: Interaction | None) -> None:
        """The end, with the final reward of a session that is finalized. Raises as ``write`` does."""
        ended = SessionEnded(session=self.session, ended_at=self.clock(), is_final=rewarded is not None)
        await self.write(*([] if rewarded is None else [self._reward(rewarded)]), ended)

    def _reward(self, rewarded: Interaction) -> RewardSet:
        assert rewarded.reward is not None
        return RewardSet(
            session=self.session, interaction=rewarded.id, reward=rewarded.reward, scope=rewarded.reward_scope
        )

    def note(self, *facts: Fact) -> None:
        """Write ``facts`` without waiting."""
        self._journal.note(*facts)

    def note_forgotten(self) -> None:
        """Nobody asks for the session any more."""
        self.note(SessionForgotten(session=self.session))


# --------------------------------------------------------------------------------------------------- restoring


def restore_session(recovered: RecoveredSession, *, now: float, wall_now: float) -> Session:
    """The session as it stood: the grace period went on while nobody was there, the clock of idleness begins anew.

    ``now`` is of the clock of sessions, ``wall_now`` in seconds since 1970.
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


def restore_keys(recovered: RecoveredSession) -> SampleKeys:
    """Keys that go on where the session stood, so that nothing is sampled twice with the same random numbers."""
    keys = SampleKeys(recovered.started.sample_key)
    for turn in recovered.turns:
        if turn.asked is not None:
            keys.note_asked(*turn.asked)
    return keys


def restore_attempts(recovered: RecoveredSession, *, now: float, wall_now: float) -> Attempts[Any]:
    """The requests of the session that may be sent again: those that were answered in full.

    What a later turn continues, or was rewarded, has been read. Requests that were cut off by the end of the process
    are unknown, and their retries are sampled.
    """
    attempts: Attempts[Any] = Attempts()
    known: dict[InteractionId, TurnEnded] = {}
    for turn in recovered.turns:
        known[turn.interaction.id] = turn
        if turn.interaction.parent is not None:
            attempts.note_read(turn.interaction.parent)
        answers = _answers([known[name] for name in turn.siblings if name in known])
        if turn.attempt is not None and len(answers) == len(turn.siblings):
            sending = attempts.begin(turn.attempt, turn.siblings, None, now)
            sending.end(answers, now - max(wall_now - turn.ended_at, 0.0))
    for name, turn in known.items():
        if turn.interaction.reward is not None:
            attempts.note_read(name)
    return attempts


def _answers(turns: Iterable[TurnEnded]) -> tuple[Answer, ...]:
    return tuple(_answer(turn) for turn in turns if turn.interaction.status is InteractionStatus.COMPLETED)


def _answer(turn: TurnEnded) -> Answer:
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
    )
