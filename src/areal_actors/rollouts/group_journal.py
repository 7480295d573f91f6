"""The journal of a dataset run: its finished groups, and which of them each step trains.

A group is stored when it is delivered, and a step's groups when they are leased, before the step begins::

    DeliverGroup ──▶ GroupQueued ─┐ noted
    LeaseGroups ───▶ StepLeased ──┴─ written ──▶ Lease ──▶ train ──▶ AcknowledgeLease ──▶ GroupConsumed

A run that resumes from a checkpoint repeats the recorded steps with the same groups, and then trains the groups that
waited. Nothing of them is sampled again. As the steps of all versions that were published are recorded, the weights
of a version are made again from the same rows, so the versions of restored tokens keep their meaning.

Finished episodes of a group that is not complete are stored one by one, and a restarted group runs the others only,
from their beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import TypeVar, cast

from attrs import define, evolve, field, frozen

from areal_actors.domain import (
    Group,
    GroupConsumed,
    GroupId,
    GroupQueued,
    JournalEvent,
    Problem,
    StepLeased,
    VersionSaved,
)
from areal_actors.errors import JournalError, ProtocolError
from areal_actors.journal import Journal
from areal_actors.kernel.remote.codec import Codec
from areal_actors.lib.telemetry import get_logger
from areal_actors.messages import Drawn

_log = get_logger(__name__)


@frozen(kw_only=True)
class StoredGroup:
    """A delivered group as it is stored, without the data of its problem."""

    group: Group
    admitted: int
    """Version of the newest weights when it was admitted."""
    row: int | None = None
    """The row of its problem, one of ``num_problems``, if problems are drawn by difficulty."""
    num_problems: int | None = None
    drawn: Drawn = field(factory=Drawn)
    """The counts since the last lease, with this group."""
    step: int = 0
    """The version that the step makes whose lease was next."""
    settings: str = ""
    """Digest of the settings that it was sampled with."""
    member: int | None = None
    """The member whose episodes these are, if the group is not complete."""


@frozen(kw_only=True)
class RecordedStep:
    """The step that makes ``version``, and the lease that it was given."""

    version: int
    groups: tuple[StoredGroup, ...]
    drawn: Drawn


@frozen(kw_only=True)
class RestoredQueue:
    """The groups that an earlier process left.

    ``steps`` are repeated, without a gap, from the step after the checkpoint on. ``waiting`` groups were not leased.
    The problems of ``rejected`` groups are done. ``parts`` are finished members of groups that were running. ``drawn``
    are the counts since the last lease. ``void`` are events that discard everything else, so that a later restart does
    not find it.
    """

    steps: tuple[RecordedStep, ...] = ()
    waiting: tuple[StoredGroup, ...] = ()
    rejected: tuple[StoredGroup, ...] = ()
    parts: tuple[StoredGroup, ...] = ()
    drawn: Drawn = field(factory=Drawn)
    void: tuple[JournalEvent, ...] = ()

    next_step: int = 1
    """The version that the first step makes that is not recorded."""

    @property
    def held(self) -> tuple[StoredGroup, ...]:
        """The groups that were accepted as training data, in the order in which they are trained or were delivered."""
        return (*(stored for step in self.steps for stored in step.groups), *self.waiting)


@define(eq=False)
class GroupJournal:
    """Writes the groups of a dataset run to ``journal``. ``settings`` is the digest of what they are sampled with.

    A journal that cannot be written does not end the run: from then on, groups are not durable.
    """

    journal: Journal
    settings: str = ""
    next_step: int = 1
    """The version that the step makes whose lease is next."""
    _is_broken: bool = field(default=False, init=False)

    def add(self, stored: StoredGroup, *, rejected_at: int | None = None) -> None:
        """Store a delivered group. Log it if it cannot be stored.

        If it was rejected, its problem is done in the step that makes ``rejected_at``.
        """
        group, name = stored.group, _name(stored.group.id, stored.member)
        try:
            content = _encode(evolve(stored, settings=self.settings, step=self.next_step), StoredGroup)
        except ProtocolError as error:
            # Rows of a workflow may hold objects of its own. The group is trained, but lost if the run is killed.
            _log.warning("group_not_durable", group=group.id, reason=str(error))
            return
        self._note(GroupQueued(group=name, position=group.problem.position, sessions=(), content=content))
        if rejected_at is not None:
            self.reject(group.id, version=rejected_at)

    def end_parts(self, group: GroupId, members: Iterable[int]) -> None:
        """Store that the group is complete, so that its members that were stored one by one are not needed."""
        for member in members:
            self.reject(_name(group, member), version=self.next_step)

    def reject(self, group: GroupId, *, version: int) -> None:
        """Store that the group is not trained, and its problem not run again."""
        self._note(GroupConsumed(group=group, version=version, is_trained=False))

    async def begin_step(self, version: int, groups: tuple[Group, ...], drawn: Drawn) -> None:
        """Return when it is durable that the step to ``version`` trains ``groups``, with everything before."""
        self.next_step = max(self.next_step, version + 1)
        names = tuple(group.id for group in groups)
        await self._write(StepLeased(version=version, groups=names, content=_encode(drawn, Drawn)))

    def end_step(self, version: int, groups: tuple[Group, ...]) -> None:
        """Store that the groups were trained."""
        self._note(*(GroupConsumed(group=group.id, version=version, is_trained=True) for group in groups))

    async def discard_step(self, version: int, groups: tuple[Group, ...]) -> None:
        """Discard the groups of a step, which cannot be trained. A resumed run samples them again."""
        queued = (GroupQueued(group=group.id, position=group.problem.position, sessions=()) for group in groups)
        await self._write(StepLeased(version=version, groups=()), *queued)

    async def save(self, version: int) -> None:
        """Store that the weights of ``version`` are on disk. The groups that they were trained with are deleted."""
        await self._write(VersionSaved(version=version))

    async def discard(self, restored: RestoredQueue) -> None:
        """Discard what could not be restored."""
        if restored.void:
            await self._write(*restored.void)

    def _note(self, *events: JournalEvent) -> None:
        if not self._is_broken:
            self.journal.note(*events)

    async def _write(self, *events: JournalEvent) -> None:
        if self._is_broken:
            return
        try:
            await self.journal.write(*events)
        except JournalError as error:
            self._is_broken = True
            _log.warning("groups_not_durable", reason=str(error), detail="A resumed run samples them again.")


# --------------------------------------------------------------------------------------------------- restoring


def restore_queue(
    events: Iterable[JournalEvent],
    *,
    settings: str,
    version: int,
    first_version: int = 0,
    is_done: Callable[[Problem], bool] = lambda _: False,
) -> RestoredQueue:
    """Return what ``events``, in order, restore for a process that resumes from the checkpoint of ``version``.

    Groups sampled with other ``settings``, and those of problems that are done according to the checkpoint, are left
    out. Steps train groups from ``first_version`` on. Steps are restored up to the first that is not recorded, or of
    which a group is missing; groups with tokens of later versions are discarded, because those will be other weights.
    """
    queued, leased, rejected = _fold(events)
    parts: list[StoredGroup] = []
    over: set[GroupId] = set()
    """Members that were stored, of groups that were complete later. They are deleted with the next checkpoint."""
    usable: dict[GroupId, StoredGroup] = {}
    for name, event in queued.items():
        stored = None if event.content is None else _decode(event.content, StoredGroup)
        if stored is None or stored.settings != settings or is_done(stored.group.problem):
            continue
        if stored.member is None:
            usable[name] = _mark_restored(stored, version)
        elif name in rejected:
            over.add(name)
        else:
            parts.append(_mark_restored(stored, version))
    steps: list[RecordedStep] = []
    last = max(version, first_version)
    while (lease := leased.get(last + 1)) is not None and lease.groups:
        names = lease.groups
        chosen = tuple(usable[name] for name in names if name in usable and _tail_version(usable[name]) <= last)
        drawn = _decode(lease.content, Drawn)
        if len(chosen) < len(names) or drawn is None:
            break
        last += 1
        steps.append(RecordedStep(version=last, groups=chosen, drawn=drawn))
        for name in names:
            del usable[name]
    left = [stored for stored in usable.values() if _tail_version(stored) <= last]
    kept = {stored.group.id for stored in left} | {stored.group.id for step in steps for stored in step.groups}
    parts = [part for part in parts if _tail_version(part) <= last and part.group.id not in kept]
    kept |= over | {_name(part.group.id, part.member) for part in parts}
    unused = [event for event in queued.values() if event.content is not None and event.group not in kept]
    since = [stored.drawn for stored in left if stored.step == last + 1]
    return RestoredQueue(
        steps=tuple(steps),
        next_step=last + 1,
        waiting=tuple(stored for stored in left if stored.group.id not in rejected),
        rejected=tuple(stored for stored in left if stored.group.id in rejected),
        parts=tuple(parts),
        drawn=since[-1] if since else Drawn(),
        void=(
            *(StepLeased(version=at, groups=()) for at, lease in leased.items() if at > last and lease.groups),
            *(GroupQueued(group=event.group, position=event.position, sessions=()) for event in unused),
            # Lets the journal delete the row.
            *(GroupConsumed(group=event.group, version=version, is_trained=False) for event in unused),
        ),
    )


def _fold(
    events: Iterable[JournalEvent],
) -> tuple[dict[GroupId, GroupQueued], dict[int, StepLeased], set[GroupId]]:
    """Return the last event of each group, in order, and of each step, and the groups that were rejected."""
    queued: dict[GroupId, GroupQueued] = {}
    leased: dict[int, StepLeased] = {}
    rejected: set[GroupId] = set()
    for event in events:
        match event:
            case GroupQueued(group=group):
                queued.pop(group, None)  # a group that was run again is newer than those before
                queued[group] = event
                rejected.discard(group)
            case GroupConsumed(group=group, is_trained=False):
                rejected.add(group)
            case StepLeased(version=version):
                leased[version] = event
            case _:
                pass
    return queued, leased, rejected


def _name(group: GroupId, member: int | None) -> GroupId:
    """Return the name in the journal of a group, or of a member of a group that is not complete."""
    return group if member is None else GroupId(f"{group}/{member}")


def _tail_version(stored: StoredGroup) -> int:
    rows = (row for episode in stored.group.episodes for row in episode.trajectories)
    return max((row.tail_version for row in rows), default=-1)


def _mark_restored(stored: StoredGroup, version: int) -> StoredGroup:
    """Mark the episodes with tokens of weights that are not on disk.

    They are made again by the same steps, but not bit by bit on every device, nor with other settings of the trainer.
    """
    episodes = tuple(
        evolve(episode, is_restored=any(row.tail_version > version for row in episode.trajectories))
        for episode in stored.group.episodes
    )
    return evolve(stored, group=evolve(stored.group, episodes=episodes))


@cache
def _codec() -> Codec:
    # Creating one takes 3 ms, and 7 ms more at its first use.
    return Codec()


def _encode(value: object, kind: type) -> bytes:
    """Return ``value`` in the form in which it travels between processes. Raises ``ProtocolError``."""
    codec = _codec()
    return codec.to_bytes(codec.to_data(value, kind, kind.__name__))


T = TypeVar("T")


def _decode(content: bytes, kind: type[T]) -> T | None:
    """Return the value that was given to ``_encode``, or ``None`` if another release encoded it differently."""
    codec = _codec()
    try:
        return cast("T", codec.from_data(codec.from_bytes(content), kind, kind.__name__))
    except (ProtocolError, ValueError) as error:
        _log.info("group_not_readable", reason=str(error))
        return None
