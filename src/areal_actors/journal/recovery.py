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

__all__ = [
    "EndedSession",
    "Recovered",
    "RecoveredSession",
    "RestoredGroups",
    "RestoredSession",
    "UnfinishedWork",
    "as_of",
    "read_journal",
    "recover",
    "restate",
    "restore_groups",
]


@frozen(kw_only=True)
class EndedSession:
    """A session that has ended but is still needed: its export has not arrived, or its group's training is not saved.

    With ``is_forgotten``, it was forgotten when its group was trained, but the resulting weights are not on disk.
    """

    started: SessionStarted
    ended_at: float
    is_final: bool
    is_forgotten: bool


@frozen(kw_only=True)
class RecoveredSession:
    """One recovered session. ``turns`` have ended, in this order, with the rewards that they have in ``tree``.

    ``ended_at`` is in seconds since 1970, ``None`` for a session that is live.
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


@frozen(kw_only=True)
class UnfinishedWork:
    """Unfinished work of an earlier process, without the trees, which the session manager owns."""

    ended: tuple[EndedSession, ...] = ()
    groups: tuple[GroupQueued, ...] = ()
    unsaved: tuple[GroupQueued, ...] = ()
    consumed: Mapping[GroupId, int] = field(factory=dict)
    saved_version: int | None = None


@frozen(kw_only=True)
class Recovered:
    """The state that the events restore.

    ``sessions`` are those that were not forgotten, and those of groups that wait or are unsaved, oldest first.
    ``groups`` wait to be trained, in the order in which they were queued. ``consumed`` maps a group to the version at
    which it was trained or dropped. ``unsaved`` are groups that were trained in steps after ``saved_version``, so that
    no weights on disk include them.
    """

    sessions: Mapping[SessionId, RecoveredSession] = field(factory=dict)
    groups: tuple[GroupQueued, ...] = ()
    unsaved: tuple[GroupQueued, ...] = ()
    consumed: Mapping[GroupId, int] = field(factory=dict)
    saved_version: int | None = None

    @property
    def unfinished(self) -> UnfinishedWork:
        """The unfinished work, without the trees."""
        ended = tuple(
            EndedSession(
                started=session.started,
                ended_at=session.ended_at,
                is_final=session.is_final,
                is_forgotten=session.is_forgotten,
            )
            for session in self.sessions.values()
            if session.ended_at is not None
        )
        return UnfinishedWork(
            ended=ended,
            groups=self.groups,
            unsaved=self.unsaved,
            consumed=self.consumed,
            saved_version=self.saved_version,
        )


def recover(events: Iterable[JournalEvent]) -> Recovered:
    """Return what ``events`` restore. Events of unknown sessions are skipped."""
    folding = _Folding()
    for event in events:
        folding.add(event)
    return folding.result()


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


def restate(events: Iterable[JournalEvent], recovered: Recovered, *, version: int) -> tuple[JournalEvent, ...]:
    """Return the events that a process resuming from ``version`` must write again, because ``as_of`` changes them.

    Writing them makes the change permanent: once a lost version number is used again, the old meaning cannot be
    detected.
    """
    changed = {
        (event.session, event.interaction.id)
        for event in events
        if isinstance(event, TurnEnded) and as_of(event, version) is not event
    }
    turns = (turn for session in recovered.sessions.values() for turn in session.turns)
    return tuple(turn for turn in turns if (turn.session, turn.interaction.id) in changed)


async def read_journal(journal: Journal) -> Recovered:
    """Return what the events of ``journal`` restore. Raises ``JournalError`` if it cannot be read."""
    folding = _Folding()
    async for event in journal.read():
        folding.add(event)
    return folding.result()


@define
class _Session:
    """The state of a session so far. Its tree is built at the end, when the final state of each turn is known."""

    started: SessionStarted
    turns: dict[InteractionId, TurnEnded] = field(factory=dict)
    ended_at: float | None = None
    is_final: bool = False
    is_forgotten: bool = False

    def add(self, event: TurnEnded | RewardSet | SessionEnded | SessionForgotten) -> None:
        match event:
            case TurnEnded(interaction=interaction):
                # Moved to the end, so that turns are in the order of their last event.
                self.turns.pop(interaction.id, None)
                self.turns[interaction.id] = event
            case RewardSet(interaction=name):
                # The reward of a pending interaction is repeated in the event of its end.
                if (turn := self.turns.get(name)) is not None:
                    rewarded = evolve(turn.interaction, reward=event.reward, reward_scope=event.scope)
                    self.turns[name] = evolve(turn, interaction=rewarded)
            case SessionEnded():
                # The first end counts; a later one may make it final.
                self.ended_at = event.ended_at if self.ended_at is None else self.ended_at
                self.is_final = self.is_final or event.is_final
            case SessionForgotten():
                self.is_forgotten = True
                # A live session ends when it is forgotten.
                if self.ended_at is None:
                    self.ended_at = max([self.started.started_at, *(turn.ended_at for turn in self.turns.values())])

    def result(self) -> RecoveredSession:
        turns, started = tuple(self.turns.values()), self.started
        tree = ConversationTree.restore(started.session, turns, group=started.group, metadata=started.metadata)
        return RecoveredSession(
            started=started,
            tree=tree,
            turns=turns,
            ended_at=self.ended_at,
            is_final=self.is_final,
            is_forgotten=self.is_forgotten,
        )


@define
class _Folding:
    """The accumulated state between two events."""

    sessions: dict[SessionId, _Session] = field(factory=dict)
    queued: dict[GroupId, GroupQueued] = field(factory=dict)
    consumed: dict[GroupId, GroupConsumed] = field(factory=dict)
    saved_version: int | None = None

    def add(self, event: JournalEvent) -> None:
        match event:
            case SessionStarted():
                self.sessions[event.session] = _Session(event)
            case GroupQueued():
                self.queued[event.group] = event
                self.consumed.pop(event.group, None)
            case GroupConsumed():
                self.consumed[event.group] = event
            case VersionSaved():
                self.saved_version = max(event.version, self.saved_version or 0)
            case TurnEnded() | RewardSet() | SessionEnded() | SessionForgotten():
                session = self.sessions.get(event.session)
                if session is not None:
                    session.add(event)

    def result(self) -> Recovered:
        groups = tuple(queued for queued in self.queued.values() if queued.group not in self.consumed)
        saved = self.saved_version or 0
        lost = {name for name, event in self.consumed.items() if event.is_trained and event.version > saved}
        unsaved = tuple(queued for queued in self.queued.values() if queued.group in lost)
        needed = {name for queued in (*groups, *unsaved) for name in queued.sessions}
        sessions = [(name, s) for name, s in self.sessions.items() if not s.is_forgotten or name in needed]
        return Recovered(
            sessions={name: session.result() for name, session in sessions},
            groups=groups,
            unsaved=unsaved,
            consumed={name: event.version for name, event in self.consumed.items()},
            saved_version=self.saved_version,
        )


@frozen(kw_only=True)
class RestoredSession:
    """A session that is not forgotten. ``metadata`` is what it was started with."""

    id: SessionId
    group: GroupId
    metadata: Mapping[str, Any]
    is_ended: bool = False
    is_final: bool = False


@frozen(kw_only=True)
class RestoredGroups:
    """The restored groups by id: ``waiting`` were queued and not trained, ``open`` were not complete.

    The sessions in ``consumed`` were trained by weights that are saved, and can be forgotten. ``next_position`` is
    above all known positions.
    """

    waiting: Mapping[GroupId, tuple[RestoredSession, ...]]
    open: Mapping[GroupId, tuple[RestoredSession, ...]]
    consumed: tuple[SessionId, ...] = ()
    next_position: int = 0


@frozen
class _Reading:
    sessions: dict[SessionId, RestoredSession]
    queued: dict[GroupId, GroupQueued]
    consumed: dict[GroupId, int]

    def take(self, event: JournalEvent) -> None:
        match event:
            # Only sessions of the intake have a ``group_size``.
            case SessionStarted(session=name, group=group) if group is not None and "group_size" in event.metadata:
                self.sessions[name] = RestoredSession(id=name, group=group, metadata=event.metadata)
            case SessionEnded(session=name) if name in self.sessions:
                known = self.sessions[name]
                self.sessions[name] = evolve(known, is_ended=True, is_final=known.is_final or event.is_final)
            case SessionForgotten(session=name):
                self.sessions.pop(name, None)
            case GroupQueued(group=group):
                self.queued[group] = event
                self.consumed.pop(group, None)
            case GroupConsumed(group=group):
                self.consumed[group] = event.version
            case _:
                pass


def restore_groups(events: Iterable[JournalEvent], *, version: int) -> RestoredGroups:
    """Read ``events``, in order, for a process that resumes from the weights of ``version``."""
    reading = _Reading({}, {}, {})
    for event in events:
        reading.take(event)
    by_group: dict[GroupId, list[RestoredSession]] = {}
    for session in reading.sessions.values():
        by_group.setdefault(session.group, []).append(session)
    consumed = {group for group, at in reading.consumed.items() if at <= version}
    groups = {group: tuple(sessions) for group, sessions in by_group.items() if group not in consumed}
    positions = [int(session.metadata["position"]) for session in reading.sessions.values()]
    queued = {
        group: tuple(session for session in sessions if session.id in reading.queued[group].sessions)
        for group, sessions in groups.items()
        if group in reading.queued
    }
    return RestoredGroups(
        waiting={group: sessions for group, sessions in queued.items() if sessions},
        open={group: sessions for group, sessions in groups.items() if group not in reading.queued},
        consumed=tuple(session.id for group in consumed for session in by_group.get(group, ())),
        next_position=max(positions, default=-1) + 1,
    )
