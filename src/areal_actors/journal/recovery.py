"""Recovery: from journal events to sessions with their trees, and the groups that wait to be trained.

These are pure functions. ``run`` reads the journal and hands the parts to the actors that own them.

Groups that were consumed only by weights that were lost with the process return to the queue. Their return is written
as well (a second ``GroupQueued``), so that a version that is reached again, with other groups, does not count for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from attrs import define, evolve, field, frozen

from areal_actors.cache.tree import ConversationTree
from areal_actors.domain import (
    GroupConsumed,
    GroupId,
    GroupQueued,
    InteractionId,
    JournalEvent,
    RewardSet,
    SessionEnded,
    SessionForgotten,
    SessionId,
    SessionStarted,
    TurnEnded,
    VersionSaved,
    restate_digest,
)
from areal_actors.journal.base import Journal


@frozen(kw_only=True)
class RecoveredSession:
    """One recovered session. ``turns`` have ended, in this order, with the rewards that they have in ``tree``.

    ``ended_at`` is in seconds since 1970, ``None`` for a session that is live. With ``is_forgotten``, it is kept for
    its group, which waits, or was trained by weights that are not on disk.
    """

    started: SessionStarted
    tree: ConversationTree = field(eq=False, repr=False)
    turns: tuple[TurnEnded, ...] = field(repr=False)
    ended_at: float | None = None
    is_final: bool = False
    is_forgotten: bool = False

    @property
    def id(self) -> SessionId:
        """The session's id."""
        return self.started.session

    @property
    def group(self) -> GroupId:
        """The group that the intake gave it."""
        return self.started.group or GroupId("")

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The metadata that it was started with."""
        return self.started.metadata


def recover(events: Iterable[JournalEvent]) -> dict[SessionId, RecoveredSession]:
    """Return the sessions that ``events`` restore, oldest first. Events of unknown sessions are skipped.

    They are those that were not forgotten, and those of groups that wait, or that were trained in steps whose weights
    are not saved.
    """
    state = _State()
    for event in events:
        state.add(event)
    return state.sessions_to_restore()


async def read_journal(journal: Journal) -> dict[SessionId, RecoveredSession]:
    """Return the sessions in ``journal``, as ``recover``. Raises ``JournalError`` if it cannot be read."""
    return recover([event async for event in journal.read()])


def as_of(event: JournalEvent, version: int) -> JournalEvent:
    """Return ``event`` for a process that resumes from the weights of ``version``, so that newer weights are lost.

    Tokens sampled by newer weights are attributed to ``version``, from which those were made. The lost version numbers
    will be used again, for other weights. The digest of such a turn is extended, not replaced.
    """
    if not isinstance(event, TurnEnded) or event.interaction.completion is None:
        return event
    completion = event.interaction.completion
    if not len(completion.versions) or int(completion.versions.max()) <= version:
        return event
    known = evolve(completion, versions=np.minimum(completion.versions, version))
    turn = event.interaction
    digest = None if turn.digest is None else restate_digest(turn.digest, turn.id, known)
    return evolve(event, interaction=evolve(turn, completion=known, digest=digest))


def restate(
    events: Iterable[JournalEvent], recovered: Mapping[SessionId, RecoveredSession], *, version: int
) -> tuple[JournalEvent, ...]:
    """Return the events that a process resuming from ``version`` must write again, because ``as_of`` changes them.

    Writing them makes the change permanent: once a lost version number is used again, the old meaning cannot be
    detected.
    """
    changed = {
        (event.session, event.interaction.id)
        for event in events
        if isinstance(event, TurnEnded) and as_of(event, version) is not event
    }
    turns = (turn for session in recovered.values() for turn in session.turns)
    return tuple(turn for turn in turns if (turn.session, turn.interaction.id) in changed)


@frozen(kw_only=True)
class RestoredGroups:
    """The sessions of the intake's groups by group: ``waiting`` were queued and not trained, ``open`` not complete.

    The sessions in ``consumed`` were trained by weights that are saved, and can be forgotten. ``next_position`` is
    above all known positions.
    """

    waiting: Mapping[GroupId, tuple[RecoveredSession, ...]]
    open: Mapping[GroupId, tuple[RecoveredSession, ...]]
    consumed: tuple[SessionId, ...] = ()
    next_position: int = 0


def restore_groups(events: Iterable[JournalEvent], *, version: int) -> RestoredGroups:
    """Return the groups in ``events`` for a process that resumes from the weights of ``version``."""
    state = _State()
    for event in events:
        if not isinstance(event, TurnEnded):
            state.add(event)
    by_group: dict[GroupId, list[RecoveredSession]] = {}
    for session in state.sessions.values():
        # Only sessions of the intake have a ``group_size``.
        if not session.is_forgotten and session.started.group is not None and "group_size" in session.metadata:
            by_group.setdefault(session.group, []).append(session)
    consumed = {group for group, event in state.consumed.items() if event.version <= version}
    waiting: dict[GroupId, tuple[RecoveredSession, ...]] = {}
    opened: dict[GroupId, tuple[RecoveredSession, ...]] = {}
    for group, sessions in by_group.items():
        if group in consumed:
            continue
        if group not in state.queued:
            opened[group] = tuple(sessions)
        elif members := tuple(session for session in sessions if session.id in state.queued[group].sessions):
            waiting[group] = members
    positions = [int(session.metadata["position"]) for sessions in by_group.values() for session in sessions]
    return RestoredGroups(
        waiting=waiting,
        open=opened,
        consumed=tuple(session.id for group in consumed for session in by_group.get(group, ())),
        next_position=max(positions, default=-1) + 1,
    )


@define
class _State:
    """The accumulated state after some events. Trees are built at the end, from the final state of each turn."""

    sessions: dict[SessionId, RecoveredSession] = field(factory=dict)
    turns: dict[SessionId, dict[InteractionId, TurnEnded]] = field(factory=dict)
    queued: dict[GroupId, GroupQueued] = field(factory=dict)
    consumed: dict[GroupId, GroupConsumed] = field(factory=dict)
    saved_version: int = 0

    def add(self, event: JournalEvent) -> None:
        match event:
            case SessionStarted(session=name):
                tree = ConversationTree(name)
                self.sessions[name] = RecoveredSession(started=event, tree=tree, turns=())
                self.turns[name] = {}
            case GroupQueued():
                self.queued[event.group] = event
                self.consumed.pop(event.group, None)
            case GroupConsumed():
                self.consumed[event.group] = event
            case VersionSaved():
                self.saved_version = max(event.version, self.saved_version)
            case TurnEnded() | RewardSet() | SessionEnded() | SessionForgotten():
                if event.session in self.sessions:
                    self._add_to(self.sessions[event.session], self.turns[event.session], event)

    def _add_to(
        self,
        session: RecoveredSession,
        turns: dict[InteractionId, TurnEnded],
        event: TurnEnded | RewardSet | SessionEnded | SessionForgotten,
    ) -> None:
        match event:
            case TurnEnded(interaction=interaction):
                # Moved to the end, so that turns are in the order of their last event.
                turns.pop(interaction.id, None)
                turns[interaction.id] = event
            case RewardSet(interaction=name):
                # The reward of a pending interaction is repeated in the event of its end.
                if (turn := turns.get(name)) is not None:
                    rewarded = evolve(turn.interaction, reward=event.reward, reward_scope=event.scope)
                    turns[name] = evolve(turn, interaction=rewarded)
            case SessionEnded():
                # The first end counts; a later one may make it final.
                ended_at = event.ended_at if session.ended_at is None else session.ended_at
                is_final = session.is_final or event.is_final
                self.sessions[session.id] = evolve(session, ended_at=ended_at, is_final=is_final)
            case SessionForgotten():
                # A live session ends when it is forgotten.
                last = max([session.started.started_at, *(turn.ended_at for turn in turns.values())])
                ended_at = last if session.ended_at is None else session.ended_at
                self.sessions[session.id] = evolve(session, ended_at=ended_at, is_forgotten=True)

    def sessions_to_restore(self) -> dict[SessionId, RecoveredSession]:
        needed: set[SessionId] = set()
        for group, event in self.queued.items():
            consumed = self.consumed.get(group)
            if consumed is None or (consumed.is_trained and consumed.version > self.saved_version):
                needed |= set(event.sessions)
        kept = [each for name, each in self.sessions.items() if not each.is_forgotten or name in needed]
        return {session.id: self._with_tree(session) for session in kept}

    def _with_tree(self, session: RecoveredSession) -> RecoveredSession:
        started, turns = session.started, tuple(self.turns[session.id].values())
        tree = ConversationTree.restore(session.id, turns, group=started.group, metadata=started.metadata)
        return evolve(session, tree=tree, turns=turns)
