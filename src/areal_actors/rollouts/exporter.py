"""The exporter: builds training rows from ended sessions, and queues finished groups between rollouts and the trainer.

Delivery has two phases. Groups are leased to the trainer and forgotten only when it acknowledges that it has trained
them. A lease that was not acknowledged is offered again unchanged.

The exporter assigns problems to groups and therefore knows which groups are running. This lets it enforce the bound on
staleness for every group: a step is given its batch only when every group that is left can still be trained in time
(``staleness.leaves_time``). Without this rule, long episodes would be trained less often than they are sampled. A group
that is too old nevertheless is discarded and its capacity refunded. Groups without signal can be replaced in the same
way, up to a limit for each step; after that the step takes whatever groups there are.

Every decision is one change without an await in it, so that a caller that is cancelled loses nothing. Messages to other
actors about the decision are sent by background tasks.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from itertools import count

import anyio
from attrs import evolve, field, frozen
from attrs.validators import ge, in_, le

from areal_actors.cache import STYLES, export_trajectories, total_reward
from areal_actors.cache.rewards import RULES, Unrewarded, load_rule
from areal_actors.datasets.difficulty import DifficultyConfig, Pool, ProblemPools
from areal_actors.domain import DataPosition, Episode, Group, GroupConsumed, GroupId, SessionId, VersionSaved
from areal_actors.errors import Conflict, CustomFunctionError
from areal_actors.journal import Journal, NoJournal
from areal_actors.kernel import Actor, Context, Ref
from areal_actors.lib.change_signal import ChangeSignal
from areal_actors.lib.references import FunctionReference, builtin_or_reference
from areal_actors.lib.telemetry import get_logger
from areal_actors.messages import (
    AcknowledgeLease,
    BeginGroup,
    Capacity,
    CollectSession,
    DeliverGroup,
    DiscardLease,
    Draw,
    Drawn,
    Exports,
    ExportSession,
    ForgetSession,
    Lease,
    LeaseGroups,
    RefundGroup,
    ReplacedGroup,
    SaveVersion,
    Sessions,
    StoreEpisodes,
)
from areal_actors.rollouts.group_journal import GroupJournal, RecordedStep, RestoredQueue, StoredGroup
from areal_actors.rollouts.staleness import StaleGroups, is_too_stale, leaves_time
from areal_actors.training.metrics import measure_episodes

__all__ = ["ConsumedPositions", "ExportConfig", "Exporter", "HighestPosition", "QueueConfig", "positions_from"]

_log = get_logger(__name__)

_NO_MORE_REPLACED = (
    "This step takes further groups without signal as they come. Problems that are neither always solved nor never "
    "would help, or a higher trainer.advantages.max_refills."
)


@frozen(kw_only=True)
class ExportConfig:
    """Defaults for building rows, used where a request does not say otherwise."""

    style: str = field(default="individual", validator=in_(tuple(STYLES)))
    discount: float = field(default=1.0, validator=[ge(0.0), le(1.0)])
    rule: FunctionReference = field(default=FunctionReference("mean"), validator=builtin_or_reference(RULES))
    unrewarded: Unrewarded = Unrewarded.INHERIT
    train_roles: tuple[str, ...] | None = None


@frozen(kw_only=True)
class QueueConfig:
    """Selection of problems to run and of finished groups to train.

    ``max_replaced`` limits the groups without signal that a step replaces. ``seed`` seeds the draws by ``difficulty``.
    """

    stale_groups: StaleGroups = StaleGroups.WAIT
    max_replaced: int = field(default=0, validator=ge(0))
    difficulty: DifficultyConfig = field(factory=DifficultyConfig)
    seed: int = 0


@frozen(kw_only=True)
class _Ready:
    """A group that waits for its step. ``admitted`` is the version at which it was admitted."""

    group: Group
    admitted: int


class Exporter(Actor[Exports]):
    """Builds rows from the session manager's records, and leases finished groups to the trainer.

    With ``are_problems_external``, positions are labels chosen by clients and may occur twice. Such problems cannot be
    run again and their agents are not waited for, so stale groups are trained unless the configuration drops them.
    Groups for which ``has_signal`` is false are replaced, as far as ``queue`` allows. With a ``journal``, trained
    groups are written down before the lease is acknowledged, and their sessions are kept until the weights are saved: a
    run that resumes from older weights trains them again.

    With a ``group_journal``, groups of a dataset are stored when they are delivered. ``restored`` are those of an
    earlier process; its steps are repeated with the same groups.
    """

    def __init__(
        self,
        *,
        sessions: Ref[Sessions],
        capacity: Ref[Capacity],
        config: ExportConfig | None = None,
        queue: QueueConfig | None = None,
        has_signal: Callable[[Group], bool] = lambda _: True,
        start: DataPosition | None = None,
        are_problems_external: bool = False,
        journal: Journal | None = None,
        group_journal: GroupJournal | None = None,
        restored: RestoredQueue | None = None,
    ) -> None:
        self._sessions = sessions
        self._capacity = capacity
        self._config = config or ExportConfig()
        self._rule = load_rule(self._config.rule)
        self._queue = queue or QueueConfig()
        # External problems cannot be run again, and their agents cannot be waited for.
        if are_problems_external and self._queue.stale_groups is not StaleGroups.DROP:
            self._queue = evolve(self._queue, stale_groups=StaleGroups.TRAIN)
        self._has_signal = has_signal
        self._start = start or DataPosition()
        self._positions = positions_from(self._start)
        self._pools: ProblemPools | None = None
        self._num_problems: int | None = None
        self._requeued: set[int] = set()
        self._running: dict[int, int] = {}  # by position, the version at which the group was admitted
        self._consumed = HighestPosition(start) if are_problems_external else ConsumedPositions(start)
        self._journal = None if isinstance(journal, NoJournal) else journal
        self._unsaved: list[tuple[int, Group]] = []
        self._ready: dict[GroupId, _Ready] = {}
        self._held: set[GroupId] = set()  # ready or lent
        self._lease: Lease | None = None
        self._leased_version = 0
        self._next_lease = 0
        self._drawn = Drawn()
        self._group_journal = group_journal
        self._is_lease_written = True
        self._recorded: dict[int, RecordedStep] = {}
        self._parts: dict[int, list[StoredGroup]] = {}
        """By position, the members of running groups that are stored."""
        self._changed = ChangeSignal()
        if restored is not None:
            self._restore(restored)
        self._context: Context

    def _restore(self, restored: RestoredQueue) -> None:
        self._recorded = {step.version: step for step in restored.steps}
        self._held = {stored.group.id for stored in restored.held}
        self._ready = {
            stored.group.id: _Ready(group=stored.group, admitted=stored.admitted) for stored in restored.waiting
        }
        self._drawn = restored.drawn
        positions = {stored.group.problem.position for stored in (*restored.held, *restored.rejected)}
        self._positions = (position for position in self._positions if position not in positions)
        for stored in restored.parts:
            self._parts.setdefault(stored.group.problem.position, []).append(stored)
        for stored in (*restored.held, *restored.rejected, *restored.parts):
            if stored.row is not None:
                self._open_pools(stored.num_problems).assign(stored.group.problem.position, stored.row)
        for stored in restored.rejected:
            self._consumed.add(stored.group.problem.position)
            if self._pools is not None:
                self._pools.learn(stored.group.problem.position, stored.group)

    @asynccontextmanager
    async def lifespan(self, context: Context) -> AsyncIterator[None]:
        """Store the context, whose background tasks notify other actors about groups."""
        self._context = context
        yield

    @ExportSession.handler(concurrency=64)
    async def export(self, message: ExportSession) -> Episode:
        """Read the session and build its rows. The session is kept."""
        record = await self._sessions.ask(CollectSession(session=message.session))
        try:
            exported = export_trajectories(
                record,
                style=message.style or self._config.style,
                discount=self._config.discount if message.discount is None else message.discount,
                rule=self._rule,
                unrewarded=self._config.unrewarded,
                train_roles=self._config.train_roles,
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
            logged=record.logged,
        )

    @BeginGroup.handler
    async def begin(self, message: BeginGroup) -> Draw:
        """Return the first problem that has to be run again, or otherwise the next one."""
        position = min(self._requeued) if self._requeued else next(self._positions)
        self._requeued.discard(position)
        parts = self._parts.get(position, [])
        # Members that an earlier process finished are as old as they were.
        self._running[position] = min([message.version, *(part.admitted for part in parts)])
        if self._queue.difficulty.enabled and message.num_problems:
            self._open_pools(message.num_problems)
        finished = tuple(episode for part in parts for episode in part.group.episodes)
        row = None if self._pools is None else self._pools.draw(position)
        return Draw(position=position, row=row, finished=finished)

    @StoreEpisodes.handler
    async def store(self, message: StoreEpisodes) -> None:
        """Store the episodes of a member, if the run has a journal of groups."""
        position = message.group.problem.position
        if self._group_journal is not None and position in self._running:
            part = self._stored(message.group, admitted=self._running[position], member=message.member)
            self._parts.setdefault(position, []).append(part)
            self._group_journal.add(part)

    def _stored(self, group: Group, *, admitted: int, member: int | None = None) -> StoredGroup:
        return StoredGroup(
            group=evolve(group, problem=evolve(group.problem, data={})),
            admitted=admitted,
            row=None if self._pools is None else self._pools.draw(group.problem.position),
            num_problems=self._num_problems,
            drawn=self._drawn,
            member=member,
        )

    def _open_pools(self, num_problems: int | None) -> ProblemPools:
        """Return the pools, created with the first group, because only the runner knows the number of problems."""
        if self._pools is None:
            assert num_problems is not None, "a group with a row is stored with the number of rows"
            self._num_problems = num_problems
            self._pools = ProblemPools(
                self._queue.difficulty, num_problems=num_problems, seed=self._queue.seed, start=self._start.pools
            )
        return self._pools

    @DeliverGroup.handler
    async def deliver(self, message: DeliverGroup) -> bool:
        """Queue a group that has something to train; count the problem of any other group as consumed.

        A group with empty answers is queued in any case, because the trainer's gate then reports that the engine is
        broken.
        """
        group = message.group
        # The intake's groups were not begun here; their oldest version stands in for the one at admission.
        admitted = self._running.pop(group.problem.position, group.head_version)
        if group.id in self._held:
            return True
        if group.problem.position in self._consumed:
            return False
        lengths = measure_episodes([group])
        self._drawn = evolve(
            self._drawn, tokens=self._drawn.tokens + lengths.tokens, turns=self._drawn.turns + lengths.turns
        )
        is_broken = any(episode.num_empty_turns for episode in group.episodes)
        has_rows = any(row.num_trained_tokens for episode in group.episodes for row in episode.trajectories)
        is_accepted = is_broken or (has_rows and not self._replace(group))
        if self._group_journal is not None:
            stored = self._stored(group, admitted=admitted)
            # Not waited for: a group that is lost in the last moments is run again.
            self._group_journal.add(stored, rejected_at=None if is_accepted else self._next_consumption)
            parts = self._parts.pop(group.problem.position, [])
            self._group_journal.end_parts(group.id, (part.member for part in parts if part.member is not None))
        if is_accepted:
            self._held.add(group.id)
            self._ready[group.id] = _Ready(group=group, admitted=admitted)
        else:
            self._consume(group)
        # A rejected group also matters: one fewer to wait for.
        self._changed.notify()
        return is_accepted

    @property
    def _next_consumption(self) -> int:
        """The version whose checkpoint is the first that contains what is consumed now."""
        assert self._group_journal is not None
        return self._group_journal.next_step if self._lease is None else self._leased_version + 1

    def _replace(self, group: Group) -> bool:
        """Count a group without signal as replaced by another group; return whether it was one."""
        if len(self._drawn.replaced) >= self._queue.max_replaced or self._has_signal(group):
            return False
        rewards = tuple(episode.reward for episode in group.episodes if episode.failure is None)
        replaced = ReplacedGroup(
            source=group.problem.source, rewards=rewards, num_failed=len(group.episodes) - len(rewards)
        )
        self._drawn = evolve(self._drawn, replaced=(*self._drawn.replaced, replaced))
        if len(self._drawn.replaced) == self._queue.max_replaced:
            _log.warning("no_more_replaced", replaced=len(self._drawn.replaced), detail=_NO_MORE_REPLACED)
        return True

    @LeaseGroups.handler(concurrency=64)
    async def lease(self, message: LeaseGroups) -> Lease:
        """Wait for enough groups that are fresh enough, and lease the oldest.

        There is one lease at a time: a caller that asks before it is acknowledged receives the same lease.
        """
        held_since: float | None = None
        while self._lease is None:
            step = self._recorded.pop(message.version + 1, None)
            if step is not None:
                # Neither too old nor too few: an earlier process trained them in this step.
                self._lend(message, tuple(stored.group for stored in step.groups), drawn=step.drawn)
                break
            self._discard_stale(message)
            has_enough = len(self._ready) >= message.num_groups
            if has_enough and held_since is None:
                held_since = anyio.current_time()
            is_timely = self._queue.stale_groups is not StaleGroups.WAIT or leaves_time(
                [entry.admitted for entry in self._ready.values()],
                list(self._running.values()),
                version=message.version,
                batch_size=message.num_groups,
                max_staleness=message.max_staleness,
            )
            if not (has_enough and is_timely):
                await self._changed.wait()
                continue
            # Oldest first, before they exceed the staleness bound; those of one version in the order of their problems.
            ready = sorted(self._ready.values(), key=lambda entry: (entry.admitted, entry.group.problem.position))
            chosen = tuple(entry.group for entry in ready[: message.num_groups])
            for group in chosen:
                del self._ready[group.id]
            drawn = evolve(self._drawn, held_seconds=anyio.current_time() - (held_since or 0.0))
            if self._pools is not None:
                drawn = evolve(drawn, easy=self._pools.count(Pool.EASY), hard=self._pools.count(Pool.HARD))
            self._drawn = Drawn()
            self._lend(message, chosen, drawn=drawn)
        lease = self._lease
        assert lease is not None
        if self._group_journal is not None and not self._is_lease_written:
            # Before the step begins: no group with tokens of its weights can be stored before its groups are known.
            await self._group_journal.begin_step(message.version + 1, lease.groups, lease.drawn)
            self._is_lease_written = True
        return lease

    def _lend(self, wanted: LeaseGroups, groups: tuple[Group, ...], *, drawn: Drawn) -> None:
        max_staleness = None if self._queue.stale_groups is StaleGroups.TRAIN else wanted.max_staleness
        self._leased_version = wanted.version
        self._lease = Lease(id=self._next_lease, groups=groups, max_staleness=max_staleness, drawn=drawn)
        self._next_lease += 1
        self._is_lease_written = False
        self._changed.notify()

    def _discard_stale(self, wanted: LeaseGroups) -> None:
        """Discard groups that are too old.

        Where steps wait for the oldest groups, only a group whose permit had expired can be too old.
        """
        if self._queue.stale_groups is StaleGroups.TRAIN:
            return
        is_dropping = self._queue.stale_groups is StaleGroups.DROP
        for group in [entry.group for entry in self._ready.values()]:
            head, version = group.head_version, wanted.version
            # A group without any version is not stale: the trainer's gate reports what is wrong with it.
            if head < 0 or not is_too_stale(head, version=version, max_staleness=wanted.max_staleness):
                continue
            event = "group_dropped" if is_dropping else "group_requeued"
            _log.info(event, group=group.id, head_version=head, version=version)
            del self._ready[group.id]
            if is_dropping:
                self._drawn = evolve(self._drawn, dropped=self._drawn.dropped + 1)
                if self._journal is not None:
                    self._journal.note(GroupConsumed(group=group.id, version=version, is_trained=False))
                if self._group_journal is not None:
                    self._group_journal.reject(group.id, version=self._next_consumption)
                self._consume(group, version=version, is_refunded=True)
            else:
                self._drawn = evolve(self._drawn, requeued=self._drawn.requeued + 1)
                self._held.discard(group.id)
                self._requeued.add(group.problem.position)
                self._context.tasks.start_soon(self._capacity.tell, RefundGroup())
                self._context.tasks.start_soon(self._forget, _sessions_of(group))

    @AcknowledgeLease.handler
    async def acknowledge(self, message: AcknowledgeLease) -> DataPosition:
        """Forget the groups that were trained. Acknowledging twice is harmless.

        Raises:
            Conflict: the lease was never given.
        """
        if message.lease >= self._next_lease:
            raise Conflict(f"Lease {message.lease} was never given; acknowledge the lease that LeaseGroups returned.")
        if self._lease is not None and self._lease.id == message.lease:
            version = self._leased_version + 1
            if self._journal is not None:
                groups = self._lease.groups
                events = (GroupConsumed(group=group.id, version=version, is_trained=True) for group in groups)
                # Before the lease is dropped: if the write fails, the lease is offered again.
                await self._journal.write(*events)
            lease, self._lease = self._lease, None
            if self._group_journal is not None:
                self._group_journal.end_step(version, lease.groups)
            for group in lease.groups:
                self._consume(group, version=version)
        pools = self._start.pools if self._pools is None else self._pools.summary()
        return evolve(self._consumed.summary(), pools=pools)

    @DiscardLease.handler
    async def discard(self, message: DiscardLease) -> None:
        """Remove the groups of the lease from the journal. They stay leased."""
        if self._group_journal is not None and self._lease is not None and self._lease.id == message.lease:
            await self._group_journal.discard_step(self._leased_version + 1, self._lease.groups)

    @SaveVersion.handler
    async def save(self, message: SaveVersion) -> None:
        """Release the sessions that the saved weights were trained with."""
        if self._group_journal is not None:
            await self._group_journal.save(message.version)
        if self._journal is None:
            return
        await self._journal.write(VersionSaved(version=message.version))
        safe = [group for version, group in self._unsaved if version <= message.version]
        self._unsaved = [(version, group) for version, group in self._unsaved if version > message.version]
        for group in safe:
            self._context.tasks.start_soon(self._forget, _sessions_of(group))

    def _consume(self, group: Group, *, version: int | None = None, is_refunded: bool = False) -> None:
        """Count a group as consumed. ``version`` is that of the step, for a group that had been accepted."""
        self._consumed.add(group.problem.position)
        if self._pools is not None:
            self._pools.learn(group.problem.position, group)
        self._held.discard(group.id)
        if is_refunded:
            self._context.tasks.start_soon(self._capacity.tell, RefundGroup())
        if version is not None and self._journal is not None:
            self._unsaved.append((version, group))
        else:
            self._context.tasks.start_soon(self._forget, _sessions_of(group))

    async def _forget(self, sessions: tuple[SessionId, ...]) -> None:
        """Let the session manager free the sessions of a consumed group."""
        for session in sessions:
            await self._sessions.tell(ForgetSession(session=session))


def _sessions_of(group: Group) -> tuple[SessionId, ...]:
    return tuple(episode.session for episode in group.episodes)


class ConsumedPositions:
    """The positions that need not be run again. Its memory is bounded by how far problems overtake one another."""

    def __init__(self, start: DataPosition | None = None) -> None:
        start = start or DataPosition()
        self._floor = min(start.pending, default=start.next)
        self._above = set(range(self._floor, start.next)) - set(start.pending)

    def add(self, position: int) -> None:
        """Count ``position`` as consumed: trained, rejected or dropped. Adding it twice is harmless."""
        if position >= self._floor:
            self._above.add(position)
        # Positions below the floor need no entry, which bounds the set.
        while self._floor in self._above:
            self._above.remove(self._floor)
            self._floor += 1

    def __contains__(self, position: int) -> bool:
        """Return whether ``position`` is consumed."""
        return position < self._floor or position in self._above

    def summary(self) -> DataPosition:
        """Return the position to store in a checkpoint."""
        end = max(self._above, default=self._floor - 1) + 1
        return DataPosition(next=end, pending=tuple(p for p in range(self._floor, end) if p not in self._above))


class HighestPosition:
    """The counterpart of ``ConsumedPositions`` for external problems: only the highest position is kept.

    External problems are never run again. Their positions are labels, and several groups may have the same one.
    """

    def __init__(self, start: DataPosition | None = None) -> None:
        self._next = (start or DataPosition()).next

    def add(self, position: int) -> None:
        """Count ``position`` as consumed."""
        self._next = max(self._next, position + 1)

    def __contains__(self, position: int) -> bool:
        """Return ``False``: a position that was seen before may be used again."""
        return False

    def summary(self) -> DataPosition:
        """Return the position to store in a checkpoint."""
        return DataPosition(next=self._next)


def positions_from(start: DataPosition) -> Iterator[int]:
    """Yield the positions to run: the pending ones first, then all following ones without end."""
    yield from start.pending
    yield from count(start.next)
