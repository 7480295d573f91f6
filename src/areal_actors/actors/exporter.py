"""The exporter: from ended sessions to training rows, and the queue between rollouts and the trainer.

Delivery has two phases. Groups are leased to the trainer and forgotten only when it acknowledges that it has trained
them; a lease that was not acknowledged is offered again as it was. Staleness is enforced here, when a batch is
consumed, beside the bound at admission (``capacity.py``): a group that waited too long is dropped, and its place is
refunded.

Each decision is one change without a wait in it, so that an asker who is cancelled loses nothing; what others must
hear of it is told by a task of the actor's own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from attrs import field, frozen
from attrs.validators import ge, in_, le

from areal_actors.actors.positions import ConsumedPositions, HighestPosition
from areal_actors.cache import STYLES, export_trajectories, total_reward
from areal_actors.cache.journal import Journal, NoJournal
from areal_actors.cache.rewards import RULES, Unrewarded, load_rule
from areal_actors.core import Actor, Context, Ref
from areal_actors.domain import DataPosition, Episode, Group, GroupConsumed, GroupId, SessionId, VersionSaved
from areal_actors.errors import Conflict, CustomFunctionError
from areal_actors.messages import (
    AcknowledgeLease,
    Capacity,
    CollectSession,
    DeliverGroup,
    Exports,
    ExportSession,
    ForgetSession,
    Lease,
    LeaseGroups,
    RefundGroup,
    SaveVersion,
    Sessions,
)
from areal_actors.references import FunctionReference, builtin_or_reference
from areal_actors.staleness import is_too_stale
from areal_actors.telemetry import get_logger

__all__ = ["ExportConfig", "Exporter"]

_log = get_logger(__name__)


@frozen(kw_only=True)
class ExportConfig:
    """How rows are built where a request does not say."""

    style: str = field(default="individual", validator=in_(tuple(STYLES)))
    discount: float = field(default=1.0, validator=[ge(0.0), le(1.0)])
    rule: FunctionReference = field(default=FunctionReference("mean"), validator=builtin_or_reference(RULES))
    unrewarded: Unrewarded = Unrewarded.INHERIT


class Exporter(Actor[Exports]):
    """Builds rows from what the session manager remembers, and lends finished groups to the trainer.

    ``are_problems_external`` says that positions are labels of others, which may come twice. With a ``journal``, what
    was trained is written down before it is acknowledged, and its sessions are kept until the weights are safe: whoever
    goes on from older ones trains it again.
    """

    def __init__(
        self,
        *,
        sessions: Ref[Sessions],
        capacity: Ref[Capacity],
        config: ExportConfig | None = None,
        start: DataPosition | None = None,
        are_problems_external: bool = False,
        journal: Journal | None = None,
    ) -> None:
        self._sessions = sessions
        self._capacity = capacity
        self._config = config or ExportConfig()
        self._rule = load_rule(self._config.rule)
        self._consumed = HighestPosition(start) if are_problems_external else ConsumedPositions(start)
        self._journal = None if isinstance(journal, NoJournal) else journal
        self._unsaved: list[tuple[int, Group]] = []
        self._ready: dict[GroupId, Group] = {}
        self._held: set[GroupId] = set()  # ready or lent
        self._lease: Lease | None = None
        self._leased_version = 0
        self._next_lease = 0
        self._num_dropped = 0
        self._changed = anyio.Event()
        self._context: Context

    @asynccontextmanager
    async def lifespan(self, context: Context) -> AsyncIterator[None]:
        """Keep the context, whose tasks tell others what became of groups."""
        self._context = context
        yield

    @ExportSession.handler(concurrency=64)
    async def export(self, message: ExportSession) -> Episode:
        """Read the session and build its rows; nothing is forgotten by that."""
        record = await self._sessions.ask(CollectSession(session=message.session))
        try:
            exported = export_trajectories(
                record,
                style=message.style or self._config.style,
                discount=self._config.discount if message.discount is None else message.discount,
                rule=self._rule,
                unrewarded=self._config.unrewarded,
            )
        except CustomFunctionError as error:
            raise CustomFunctionError(f"{error} It was asked for session {message.session}.") from error
        return Episode(
            session=message.session,
            member=message.member,
            reward=total_reward(record),
            trajectories=exported.trajectories,
            untrained=exported.untrained,
            num_turns=len(record.interactions),
            is_restored=record.is_restored,
            num_empty_turns=record.num_empty_turns,
        )

    @DeliverGroup.handler
    async def deliver(self, message: DeliverGroup) -> bool:
        """Queue a group that has something to train; count the problem of any other as consumed.

        A group with empty answers is queued in any case: the trainer's gate says that the engine is broken.
        """
        group = message.group
        if group.id in self._held:
            return True
        if group.problem.position in self._consumed:
            return False
        is_accepted = any(
            episode.num_empty_turns or any(row.num_trained_tokens for row in episode.trajectories)
            for episode in group.episodes
        )
        if is_accepted:
            self._held.add(group.id)
            self._ready[group.id] = group
            self._notify()
        else:
            self._consume(group)
        return is_accepted

    @LeaseGroups.handler(concurrency=64)
    async def lease(self, message: LeaseGroups) -> Lease:
        """Wait for enough groups that are fresh enough, and lend those whose problems come first.

        There is one lease at a time: whoever asks before it is acknowledged is given the same.
        """
        while self._lease is None:
            self._drop_stale(message)
            if len(self._ready) >= message.num_groups:
                self._lend(message)
            else:
                await self._changed.wait()
        return self._lease

    def _lend(self, wanted: LeaseGroups) -> None:
        ready = sorted(self._ready.values(), key=lambda group: group.problem.position)
        chosen = ready[: wanted.num_groups]
        self._leased_version = wanted.version
        for group in chosen:
            del self._ready[group.id]
        self._lease = Lease(id=self._next_lease, groups=tuple(chosen), dropped=self._num_dropped)
        self._next_lease += 1
        self._num_dropped = 0
        self._notify()

    def _drop_stale(self, wanted: LeaseGroups) -> None:
        for group in list(self._ready.values()):
            if _is_stale(group, wanted):
                _log.info("group_dropped", group=group.id, head_version=group.head_version, version=wanted.version)
                del self._ready[group.id]
                self._num_dropped += 1
                if self._journal is not None:
                    self._journal.note(GroupConsumed(group=group.id, version=wanted.version, is_trained=False))
                self._consume(group, version=wanted.version, is_refunded=True)

    @AcknowledgeLease.handler
    async def acknowledge(self, message: AcknowledgeLease) -> DataPosition:
        """Forget what was trained. Acknowledging twice is harmless; acknowledging what was never lent is not."""
        if message.lease >= self._next_lease:
            raise Conflict(f"Lease {message.lease} was never given; acknowledge the lease that LeaseGroups returned.")
        if self._lease is not None and self._lease.id == message.lease:
            await self._write_trained(self._lease)
            lease, self._lease = self._lease, None
            for group in lease.groups:
                self._consume(group, version=self._leased_version + 1)
        return self._consumed.summary()

    async def _write_trained(self, lease: Lease) -> None:
        if self._journal is not None:
            version = self._leased_version + 1
            facts = (GroupConsumed(group=group.id, version=version, is_trained=True) for group in lease.groups)
            await self._journal.write(*facts)

    @SaveVersion.handler
    async def save(self, message: SaveVersion) -> None:
        """Let go of what the safe weights were trained with."""
        if self._journal is None:
            return
        await self._journal.write(VersionSaved(version=message.version))
        safe = [group for version, group in self._unsaved if version <= message.version]
        self._unsaved = [(version, group) for version, group in self._unsaved if version > message.version]
        for group in safe:
            self._context.tasks.start_soon(self._forget, _sessions_of(group))

    def _consume(self, group: Group, *, version: int | None = None, is_refunded: bool = False) -> None:
        """``version``: that of the step, for a group that had been accepted."""
        self._consumed.add(group.problem.position)
        self._held.discard(group.id)
        if is_refunded:
            self._context.tasks.start_soon(self._capacity.tell, RefundGroup())
        if version is not None and self._journal is not None:
            self._unsaved.append((version, group))
        else:
            self._context.tasks.start_soon(self._forget, _sessions_of(group))

    async def _forget(self, sessions: tuple[SessionId, ...]) -> None:
        """Free what others keep of a consumed group."""
        for session in sessions:
            await self._sessions.tell(ForgetSession(session=session))

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


def _sessions_of(group: Group) -> tuple[SessionId, ...]:
    return tuple(episode.session for episode in group.episodes)


def _is_stale(group: Group, wanted: LeaseGroups) -> bool:
    """What has no version at all is not old: the trainer's gate says what is wrong with it."""
    head = group.head_version
    return head >= 0 and is_too_stale(head, version=wanted.version, max_staleness=wanted.max_staleness)
