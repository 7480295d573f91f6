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

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import anyio
from attrs import evolve, field, frozen
from attrs.validators import ge, in_, le

from areal_actors.cache import STYLES, export_trajectories
from areal_actors.cache.rewards import RULES, Unrewarded, load_rule
from areal_actors.datasets.difficulty import DifficultyConfig
from areal_actors.domain import DataPosition, Episode, Group, GroupConsumed, GroupId, Problem, SessionId, VersionSaved
from areal_actors.errors import Conflict, CustomFunctionError
from areal_actors.journal import Journal, NoJournal
from areal_actors.kernel import Actor, Context, Ref
from areal_actors.lib.change_signal import ChangeSignal
from areal_actors.lib.references import FunctionReference, builtin_or_reference
from areal_actors.lib.settings import constant
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
    SaveVersion,
    Sessions,
    StoreEpisodes,
    UntrainedGroup,
)
from areal_actors.rollouts.draws import DrawConfig, ProblemDraws
from areal_actors.rollouts.group_journal import GroupJournal, RecordedStep, RestoredQueue, StoredGroup
from areal_actors.rollouts.staleness import StaleGroups, is_too_stale, leaves_time
from areal_actors.training.metrics import measure_episodes

_log = get_logger(__name__)

_NO_MORE_REPLACED = (
    "This step takes further groups without signal as they come. Problems that are neither always solved nor never "
    "would help, or a higher trainer.advantages.max_refills."
)


@frozen(kw_only=True)
class ExportConfig:
    """Defaults for building rows, used where a request does not say otherwise."""

    export_style: str = field(default="individual", validator=in_(tuple(STYLES)))
    turn_discount: float = field(default=1.0, validator=[ge(0.0), le(1.0)])
    """The share of an answer's return that is passed on to the previous turn."""
    reward_rule: FunctionReference = field(default=FunctionReference("mean"), validator=builtin_or_reference(RULES))
    """How the returns of several continuations are combined: mean, sum, max, creation-order, or your own function."""
    unrewarded: Unrewarded = Unrewarded.INHERIT
    """How conversations without any rewarded answer are treated: they inherit the outcome that the agent returned, are
    not trained (skip), or return 0."""
    train_roles: tuple[str, ...] | None = constant(None)
    """The roles whose turns are trained; ``None`` trains all."""


@frozen(kw_only=True)
class QueueConfig:
    """Selection of problems to run and of finished groups to train.

    ``max_replaced`` limits the groups without signal that a step replaces. ``seed`` seeds the draws by ``difficulty``.
    With ``sources``, problems are drawn from these instead of one dataset.
    """

    stale_groups: StaleGroups = StaleGroups.WAIT
    max_replaced: int = field(default=0, validator=ge(0))
    difficulty: DifficultyConfig = field(factory=DifficultyConfig)
    sources: Mapping[str, DrawConfig] = field(factory=dict)
    seed: int = 0

    def open_draws(self, start: DataPosition | None = None, *, is_external: bool = False) -> ProblemDraws:
        """Return the draws of a run that continues from ``start``."""
        sources = self.sources or {"": DrawConfig(difficulty=self.difficulty)}
        return ProblemDraws(sources, seed=self.seed, start=start, is_external=is_external)


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
        self._rule = load_rule(self._config.reward_rule)
        self._queue = queue or QueueConfig()
        # External problems cannot be run again, and their agents cannot be waited for.
        if are_problems_external and self._queue.stale_groups is not StaleGroups.DROP:
            self._queue = evolve(self._queue, stale_groups=StaleGroups.TRAIN)
        self._has_signal = has_signal
        self._draws = self._queue.open_draws(start, is_external=are_problems_external)
        self._running: dict[tuple[str, int], int] = {}
        """By the place of their problems, the versions at which running groups were admitted."""
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
        self._parts: dict[tuple[str, int], list[StoredGroup]] = {}
        """By the place of their problems, the members of running groups that are stored."""
        self._begun_before: dict[tuple[str, int], int] = {}
        """By place, the groups that an earlier process had begun and this one has not: their oldest version."""
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
        for stored in restored.parts:
            place = stored.group.problem.place
            self._parts.setdefault(place, []).append(stored)
            self._begun_before[place] = min(stored.admitted, self._begun_before.get(place, stored.admitted))
        for stored in (*restored.held, *restored.rejected, *restored.parts):
            is_drawn = stored.member is None
            self._draws.restore(stored.group.problem, stored.row, stored.num_problems, is_drawn=is_drawn)
        for stored in restored.rejected:
            self._draws.consume(stored.group)

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
            return export_trajectories(
                record,
                style=message.style or self._config.export_style,
                discount=self._config.turn_discount if message.discount is None else message.discount,
                rule=self._rule,
                unrewarded=self._config.unrewarded,
                train_roles=self._config.train_roles,
                member=message.member,
            )
        except CustomFunctionError as error:
            raise CustomFunctionError(f"{error} It was asked for session {message.session}.") from error

    @BeginGroup.handler
    async def begin(self, message: BeginGroup) -> Draw:
        """Return the first problem that has to be run again, or otherwise the next one."""
        # The oldest first: in another order, more groups could be as old as it than steps are left to train them in.
        begun = min(self._begun_before, key=self._age_of, default=None)
        source, position, row = self._draws.draw(message.num_problems, begun=begun)
        place = source, position
        # Members that an earlier process finished are as old as they were.
        self._running[place] = min(message.version, self._begun_before.pop(place, message.version))
        finished = tuple(episode for part in self._parts.get(place, []) for episode in part.group.episodes)
        return Draw(source=source, position=position, row=row, finished=finished)

    def _age_of(self, begun: tuple[str, int]) -> tuple[int, tuple[float, int]]:
        """Return a key that sorts groups that an earlier process had begun, by age and then as they were drawn."""
        source, position = begun
        return self._begun_before[begun], self._draws.order(Problem(source=source, position=position, data={}))

    @StoreEpisodes.handler
    async def store(self, message: StoreEpisodes) -> None:
        """Store the episodes of a member, if the run has a journal of groups."""
        place = message.group.problem.place
        if self._group_journal is not None and place in self._running:
            part = self._stored(message.group, admitted=self._running[place], member=message.member)
            self._parts.setdefault(place, []).append(part)
            self._group_journal.add(part)

    def _stored(self, group: Group, *, admitted: int, member: int | None = None) -> StoredGroup:
        source, position = group.problem.place
        return StoredGroup(
            group=evolve(group, problem=evolve(group.problem, data={})),
            admitted=admitted,
            row=self._draws.row_of(source, position),
            num_problems=self._draws.num_problems(source),
            drawn=self._drawn,
            member=member,
        )

    @DeliverGroup.handler
    async def deliver(self, message: DeliverGroup) -> bool:
        """Queue a group that has something to train; count the problem of any other group as consumed.

        A group with empty answers is queued in any case, because the trainer's gate then reports that the engine is
        broken.
        """
        group = message.group
        # The intake's groups were not begun here; their oldest version stands in for the one at admission.
        admitted = self._running.pop(group.problem.place, group.head_version)
        if group.id in self._held:
            return True
        if self._draws.is_consumed(group.problem):
            return False
        tokens, turns = measure_episodes([group])
        self._drawn = evolve(self._drawn, tokens=self._drawn.tokens + tokens, turns=self._drawn.turns + turns)
        is_broken = any(episode.num_empty_turns for episode in group.episodes)
        has_rows = any(row.num_trained_tokens for episode in group.episodes for row in episode.trajectories)
        is_accepted = is_broken or (has_rows and not self._replace(group))
        if not (is_accepted or has_rows):
            self._drawn = evolve(self._drawn, failed=(*self._drawn.failed, _describe_untrained(group)))
        if self._group_journal is not None:
            stored = self._stored(group, admitted=admitted)
            # Not waited for: a group that is lost in the last moments is run again.
            self._group_journal.add(stored, rejected_at=None if is_accepted else self._next_consumption)
            parts = self._parts.pop(group.problem.place, [])
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
        self._drawn = evolve(self._drawn, replaced=(*self._drawn.replaced, _describe_untrained(group)))
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
                # Groups that are begun again in a moment would otherwise be too old when they are over.
                [*self._running.values(), *self._begun_before.values()],
                version=message.version,
                batch_size=message.num_groups,
                max_staleness=message.max_staleness,
            )
            if not (has_enough and is_timely):
                await self._changed.wait()
                continue
            # Oldest first, before they exceed the staleness bound; those of one version in the order of their problems.
            ready = sorted(
                self._ready.values(), key=lambda entry: (entry.admitted, self._draws.order(entry.group.problem))
            )
            chosen = tuple(entry.group for entry in ready[: message.num_groups])
            for group in chosen:
                del self._ready[group.id]
            drawn = evolve(self._drawn, held_seconds=anyio.current_time() - (held_since or 0.0))
            drawn = evolve(drawn, pools=self._draws.pool_sizes())
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
                self._draws.requeue(group.problem)
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
        return self._draws.summary()

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
        self._draws.consume(group)
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


def _describe_untrained(group: Group) -> UntrainedGroup:
    rewards = tuple(episode.reward for episode in group.episodes if episode.failure is None)
    return UntrainedGroup(
        source=group.problem.source,
        rewards=rewards,
        num_failed=len(group.episodes) - len(rewards),
        num_rejected=sum(episode.is_rejected for episode in group.episodes),
    )


def _sessions_of(group: Group) -> tuple[SessionId, ...]:
    return tuple(episode.session for episode in group.episodes)
