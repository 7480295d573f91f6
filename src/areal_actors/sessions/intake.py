"""The intake: turns the sessions that external agents finish into training data.

It does for them what the rollout runner does for its own agents.

::

    agent ─▶ Proxy ──StartSession──▶ Intake ──ClaimPermit──▶ Capacity
                                       │ ▲
                            OpenSession│ │SessionFinished
                                       ▼ │
                                     Sessions
    Intake ──ExportSession──▶ Exports ◀──DeliverGroup── Intake ──SettlePermit──▶ Capacity

A finalized session is taken at once, and so is one that was rewarded before it ended; for all others the intake waits
for a reward during the grace period. Nothing is polled: the session manager sends a message when a session ends. A
session that cannot be trained is rejected with a reason and forgotten. ``OpenGroups`` forms groups;
``SessionLeaseQueue`` lends sessions where no trainer consumes them.

With a journal, a group is written down before it is delivered, and sessions that an earlier process had taken are taken
again.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
from attrs import Factory, define, evolve, field, frozen
from attrs.validators import ge, gt

from areal_actors.domain import Episode, Group, GroupId, GroupQueued, Problem, SampleKey, SessionId, SessionRecord
from areal_actors.errors import (
    ActorError,
    ActorStopped,
    ArealError,
    Conflict,
    CustomFunctionError,
    NotFound,
    Unavailable,
    Unreachable,
)
from areal_actors.journal import Journal, NoJournal, RecoveredSession, RestoredGroups
from areal_actors.kernel import Actor, Context, Ref
from areal_actors.lib.change_signal import ChangeSignal
from areal_actors.lib.telemetry import get_logger
from areal_actors.messages import (
    Capacity,
    ClaimPermit,
    CollectSession,
    DeliverGroup,
    EpisodeFinished,
    Exports,
    ExportSession,
    ForgetSession,
    Intake,
    LiftStalenessLimit,
    OpenSession,
    Permit,
    Progress,
    RestorePermit,
    SessionArchived,
    SessionFinished,
    SessionOpened,
    Sessions,
    SessionsCounted,
    SettlePermit,
    SettleTaken,
    StartSession,
    TakenSession,
    TakeSession,
    TrainingEnded,
    WatchSessions,
)

_log = get_logger(__name__)

_SETTLE_SECONDS = 5.0
_CLAIM_SECONDS = 30.0
"""How long a permit may take to be granted or refused, which needs no waiting."""


@frozen(kw_only=True)
class IntakeConfig:
    """How external sessions form groups. ``seed`` keys the samples of sessions without a seed."""

    group_size: int = field(default=1, validator=ge(1))
    """Size of a group whose agents do not give one."""
    group_timeout_seconds: float = field(default=600.0, validator=gt(0))
    grace_seconds: float = field(default=60.0, validator=ge(0))
    is_delivering: bool = True
    """Whether groups go to the trainer; otherwise finished sessions are lent to clients that ask for them."""
    seed: int = 0
    next_position: int = 0


@frozen(kw_only=True)
class IntakePeers:
    """The actors that the intake sends messages to."""

    sessions: Ref[Sessions]
    exports: Ref[Exports]
    capacity: Ref[Capacity]
    progress: Ref[Progress] | None = None


class IntakeKeeper(Actor[Intake]):
    """The actor that owns external sessions' groups.

    ``restored`` is the state of an earlier process, when the run resumes from ``version``.
    """

    def __init__(
        self,
        *,
        peers: IntakePeers,
        config: IntakeConfig | None = None,
        journal: Journal | None = None,
        restored: RestoredGroups | None = None,
        version: int = 0,
        token_factory: Callable[[], str] = lambda: secrets.token_hex(6),
    ) -> None:
        self._peers = peers
        self._config = config or IntakeConfig()
        self._journal = journal or NoJournal()
        self._restored = restored
        self._resumed_version = version
        self._token = token_factory
        above = 0 if restored is None else restored.next_position
        self._groups = OpenGroups(next_position=max(self._config.next_position, above))
        self._leases = SessionLeaseQueue()
        self._starting = anyio.Lock()
        self._is_training_over = False
        self._context: Context

    @asynccontextmanager
    async def lifespan(self, context: Context) -> AsyncIterator[None]:
        """Watch the session manager for sessions that end, and restore the state of an earlier process."""
        self._context = context
        await self._peers.sessions.ask(WatchSessions(watcher=context.self_ref))
        restored = self._restored
        if restored is not None:
            # Take permits for the restored groups, journal the complete ones, and continue from there.
            waiting = [await self._restore_group(sessions, is_queued=True) for sessions in restored.waiting.values()]
            opened = [await self._restore_group(sessions, is_queued=False) for sessions in restored.open.values()]
            events = (_queued(group, tuple(session.id for session in sessions)) for group, sessions in waiting)
            await self._journal.write(*events)
            for done in restored.consumed:
                await self._peers.sessions.tell(ForgetSession(session=done))
            for group, sessions in (*waiting, *opened):
                for session in sessions:
                    if session.ended_at is not None:
                        is_final = session.is_final or group.is_closed
                        await self.finish(SessionFinished(session=session.id, is_final=is_final))
            awaited = [session.id for _, sessions in opened for session in sessions if session.ended_at is None]
            # Their agents may be gone; the log explains why nothing is trained.
            if awaited:
                _log.warning("sessions_restored", num_awaited=len(awaited), detail=_RESTORED, sessions=awaited[:8])
        yield

    # ---------------------------------------------------------------------------------------------- starting

    @StartSession.handler(concurrency=100_000)
    async def start(self, message: StartSession) -> SessionOpened:
        """Open a session under the permit of its group; the first session of a group claims the permit."""
        # One start at a time, so that two sessions of a new group do not both claim a permit for it.
        async with self._starting:
            group = self._groups.to_join(message.group, message.user)
            if group is None:
                group = await self._open_group(message)
            try:
                seat = group.sit(message, now=anyio.current_time())
            except Conflict:
                await self._leave(group, None)
                raise
            try:
                opened = await self._peers.sessions.ask(
                    OpenSession(
                        task=message.task,
                        api_key=message.api_key,
                        group=group.id,
                        key=sample_key(message, group, seat, seed=self._config.seed),
                        metadata={**message.metadata, **describe_session(group, seat)},
                        user=message.user,
                        user_key=message.user_key,
                        max_live=message.max_live,
                        is_durable=True,
                        roles=message.roles,
                        is_trained=True,
                    )
                )
            except BaseException:
                # Also on cancellation: a seat without a session would keep the group waiting.
                with anyio.move_on_after(_SETTLE_SECONDS, shield=True), suppress(ActorStopped):
                    await self._leave(group, seat)
                raise
            self._groups.seat_session(group, seat, opened.session)
            await self._count()
            return opened

    async def _open_group(self, wanted: StartSession) -> OpenGroup:
        name, permit = wanted.group, None
        # Shielded: a permit that was granted to a client that leaves meanwhile would be held until its lease expires.
        with anyio.CancelScope(shield=True):
            try:
                permit = await self._peers.capacity.ask(ClaimPermit(holder=name or wanted.task), timeout=_CLAIM_SECONDS)
            except (ActorStopped, Unreachable) as error:
                raise Unavailable(_ENDING) from error
        assert permit is not None  # the scope is never cancelled itself
        size = 1 if name is None else wanted.group_size or self._config.group_size
        position = self._groups.take_position(wanted.position)
        group_id = GroupId(f"{name or wanted.task}-{self._token()}")
        group = OpenGroup(
            id=group_id,
            name=name,
            owner=wanted.user,
            size=size,
            position=position,
            permit=permit,
            is_trained=not self._is_training_over,
        )
        self._add(group)
        return group

    def _add(self, group: OpenGroup) -> None:
        self._groups.add(group)
        if group.size > 1 and not group.is_closed:
            self._context.tasks.start_soon(self._close_in_time, group)

    @TrainingEnded.handler
    async def end_training(self, message: TrainingEnded) -> None:  # noqa: ARG002
        """Collect no session that starts from now on."""
        self._is_training_over = True
        # Groups that no step consumes would fill the budget, and all later sessions would be refused.
        await self._peers.capacity.ask(LiftStalenessLimit())

    async def _leave(self, group: OpenGroup, seat: Seat | None) -> None:
        """Free ``seat``, whose session did not start; end the group if it has no sessions."""
        if seat is not None and group.seats.get(seat.member) is seat:
            del group.seats[seat.member]
        if not group.seats:
            await self._end_group(group, is_accepted=False)
        else:
            await self._deliver_if_over(group)

    async def _close_in_time(self, group: OpenGroup) -> None:
        """Close the group to new members after its time limit.

        Members that have not started by then are given up; those that have started are waited for.
        """
        with anyio.move_on_after(self._config.group_timeout_seconds):
            await group.over.wait()
        if not group.over.is_set():
            group.is_closed = True
            if len(group.seats) < group.size:
                _log.warning("group_incomplete", group=group.id, members=len(group.seats), size=group.size)
            await self._deliver_if_over(group)

    # ---------------------------------------------------------------------------------------------- finishing

    @SessionFinished.handler
    async def finish(self, message: SessionFinished) -> None:
        """Record the end of a session. A background task does everything that has to wait."""
        place = self._groups.of_session(message.session)
        # Sessions of the rollout runner have no place here.
        if place is None:
            return
        group, seat = place
        seat.is_expired = seat.is_expired or message.is_expired
        if message.is_final or message.is_expired:
            seat.last_word.set()
        if not seat.is_ending:
            seat.is_ending = True
            self._groups.num_live -= 1
            await self._count()
            self._context.tasks.start_soon(self._take_in, group, seat, message.session)

    async def _count(self) -> None:
        """Tell how many sessions have not ended."""
        if self._peers.progress is not None:
            await self._peers.progress.tell(SessionsCounted(num_live=self._groups.num_live))

    async def _take_in(self, group: OpenGroup, seat: Seat, session: SessionId) -> None:
        """Turn a session into an episode of its group."""
        record = await self._read(session)
        if record is not None and not has_reward(record) and not seat.last_word.is_set():
            with anyio.move_on_after(self._config.grace_seconds):
                await seat.last_word.wait()
            record = await self._read(session)
        if not group.is_trained:
            self._groups.unseat_session(session)
            await self._peers.sessions.tell(ForgetSession(session=session))
            seat.episode = Episode(session=session, member=seat.member)
            await self._deliver_if_over(group)
            return
        episode = await self._episode(seat, session, record)
        episode = evolve(episode, seconds=anyio.current_time() - seat.started_at)
        if self._peers.progress is not None:
            progress, problem, version = self._peers.progress, group.problem, group.version
            # Reports on versions from the resumed one on were removed: those episodes are made again.
            is_repeated = seat.is_known and version < self._resumed_version
            await progress.tell(
                EpisodeFinished(episode=episode, problem=problem, version=version, is_repeated=is_repeated)
            )
            if record is not None and not is_repeated:
                await progress.tell(SessionArchived(record=record, episode=episode, problem=problem))
        if episode.failure is not None:
            _log.warning("session_rejected", session=session, reason=episode.failure)
            self._groups.unseat_session(session)
            await self._peers.sessions.tell(ForgetSession(session=session))
        elif not self._config.is_delivering and record is not None:
            self._leases.offer(TakenSession(record=record, episode=episode))
        seat.episode = episode
        await self._deliver_if_over(group)

    async def _read(self, session: SessionId) -> SessionRecord | None:
        with suppress(NotFound):
            return await self._peers.sessions.ask(CollectSession(session=session))
        return None

    async def _episode(self, seat: Seat, session: SessionId, record: SessionRecord | None) -> Episode:
        nothing = Episode(session=session, member=seat.member)
        if record is None:
            return evolve(nothing, failure="forgotten: another client made the service forget the session.")
        nothing = evolve(nothing, num_turns=len(record.interactions), logged=record.logged)
        if not has_reward(record):
            return evolve(nothing, failure=_EXPIRED if seat.is_expired else _NO_REWARD, is_rejected=not seat.is_expired)
        if seat.is_expired:
            return evolve(nothing, failure=_EXPIRED)
        try:
            return await self._peers.exports.ask(ExportSession(session=session, member=seat.member))
        except (ActorError, CustomFunctionError):
            raise
        except ArealError as error:
            return evolve(nothing, failure=f"Its rows cannot be built: {error}")

    # ------------------------------------------------------------------------------------------------- groups

    async def _deliver_if_over(self, group: OpenGroup) -> None:
        if not group.is_over or group.over.is_set():
            return
        group.over.set()
        is_accepted = False
        if group.is_trained and self._config.is_delivering:
            finished = group.finished()
            trained = tuple(episode.session for episode in finished.episodes if episode.failure is None)
            if trained:
                # Before the delivery: a crash in between restores the group as queued and delivers it again.
                await self._journal.write(_queued(group, trained))
            is_accepted = await self._peers.exports.ask(DeliverGroup(group=finished))
        await self._end_group(group, is_accepted=is_accepted)

    async def _end_group(self, group: OpenGroup, *, is_accepted: bool) -> None:
        group.over.set()
        if self._groups.remove(group):
            await self._peers.capacity.tell(SettlePermit(permit=group.permit.id, is_accepted=is_accepted))

    # ------------------------------------------------------------------------------------------------ by hand

    @TakeSession.handler(concurrency=100_000)
    async def take(self, message: TakeSession) -> TakenSession:
        """Lend the next finished session. Raises ``Conflict`` if the sessions go to a trainer."""
        if self._config.is_delivering:
            raise Conflict(
                "The sessions of this service go to its trainer; take them from a service that does not train on them."
            )
        return await self._leases.lend(message.taker)

    @SettleTaken.handler
    async def settle_taken(self, message: SettleTaken) -> None:
        """Settle a loan, and forget the session if it was kept."""
        kept = self._leases.settle(message.taker, is_kept=message.is_kept)
        if kept is not None:
            self._context.tasks.start_soon(self._peers.sessions.tell, ForgetSession(session=kept.episode.session))

    # ------------------------------------------------------------------------------------------------ restart

    async def _restore_group(
        self, sessions: tuple[RecoveredSession, ...], *, is_queued: bool
    ) -> tuple[OpenGroup, tuple[RecoveredSession, ...]]:
        permit = await self._peers.capacity.ask(RestorePermit(holder=sessions[0].group))
        group = restore_group(sessions, permit, is_queued=is_queued, now=anyio.current_time())
        self._add(group)
        for session in sessions:
            self._groups.seat_session(group, group.seats[int(session.metadata["member"])], session.id)
        return group, sessions


_RESTORED = "They hold permits until their agents end them, or until sessions.lifetimes.idle_seconds have passed."
_ENDING = "The service is stopping or starting again; the request may be repeated."
_EXPIRED = "expired: the session was idle for too long and was not ended."
_NO_REWARD = "no_reward: the session was not rewarded before its grace period was over; use set_reward or finalize."


def has_reward(record: SessionRecord) -> bool:
    """Return whether the session has a reward."""
    return any(turn.reward is not None for turn in record.interactions)


def _queued(group: OpenGroup, sessions: tuple[SessionId, ...]) -> GroupQueued:
    data: Mapping[str, object] = group.problem.data
    return GroupQueued(group=group.id, position=group.position, sessions=sessions, data=data)


@define(eq=False, kw_only=True)
class Seat:
    """The place of one session in its group. ``episode`` is its result, ``None`` until the session has ended."""

    member: int
    task: str
    started_at: float
    session: SessionId | None = None
    episode: Episode | None = None
    is_ending: bool = False
    is_expired: bool = False
    is_known: bool = False
    """Whether the session had ended in an earlier process, which may have reported it."""
    last_word: anyio.Event = field(factory=anyio.Event)
    """Set when no more rewards are expected."""

    @property
    def can_be_replaced(self) -> bool:
        """Whether its session failed, so that another may take its place."""
        return self.episode is not None and self.episode.failure is not None


@define(eq=False, kw_only=True)
class OpenGroup:
    """Sessions that share a permit. ``name`` is the agents' name for it, ``None`` for a single session.

    The group belongs to the user who began it (``owner``); other users may use the same name for their own groups.
    """

    id: GroupId
    name: str | None
    size: int
    position: int
    permit: Permit
    owner: str | None = None
    is_trained: bool = True
    """Whether its sessions become training data; those that start after the last step do not."""
    version: int = field(default=Factory(lambda self: self.permit.version, takes_self=True))
    """Version of the newest weights when the group began."""
    seats: dict[int, Seat] = field(factory=dict)
    is_closed: bool = False
    over: anyio.Event = field(factory=anyio.Event)

    @property
    def is_over(self) -> bool:
        """Whether all expected sessions have ended."""
        are_all_here = self.is_closed or len(self.seats) >= self.size
        return are_all_here and all(seat.episode is not None for seat in self.seats.values())

    @property
    def has_room(self) -> bool:
        """Whether another session may join."""
        return not self.is_closed and self._free_member() is not None

    @property
    def problem(self) -> Problem:
        """The problem of the group, in place of a dataset's item."""
        tasks = [self.seats[member].task for member in sorted(self.seats)]
        return Problem(position=self.position, data={"task_id": next(iter(tasks), ""), "group_id": self.name})

    def finished(self) -> Group:
        """Return the group in the form that the exporter takes."""
        seats = [self.seats[member] for member in sorted(self.seats)]
        episodes = tuple(seat.episode for seat in seats if seat.episode is not None)
        return Group(id=self.id, problem=self.problem, episodes=episodes)

    def sit(self, wanted: StartSession, *, now: float) -> Seat:
        """Return a seat for a session that starts.

        Raises:
            Conflict: the request does not fit the group.
        """
        if wanted.position not in (None, self.position):
            raise Conflict(f"Group {self.name} has position {self.position}, not {wanted.position}.")
        if wanted.group_size not in (None, self.size):
            raise Conflict(f"Group {self.name} has {self.size} members, not {wanted.group_size}.")
        member = self._free_member() if wanted.member is None else wanted.member
        assert member is not None, "a seat is taken only after room was found"
        if member >= self.size:
            raise Conflict(f"Group {self.name} has the members 0 to {self.size - 1}; there is no {member}.")
        taken = self.seats.get(member)
        if taken is not None and not taken.can_be_replaced:
            raise Conflict(f"Member {member} of group {self.name} was started before; take another one.")
        self.seats[member] = Seat(member=member, task=wanted.task, started_at=now)
        return self.seats[member]

    def _free_member(self) -> int | None:
        """Return the first seat that was never taken, or else the first whose session failed."""
        members = range(self.size)
        never_taken = next((member for member in members if member not in self.seats), None)
        if never_taken is not None:
            return never_taken
        return next((member for member in members if self.seats[member].can_be_replaced), None)


class OpenGroups:
    """The groups that are not complete, by id and by the name under which they may be joined."""

    def __init__(self, *, next_position: int = 0) -> None:
        self._next_position = next_position
        self._by_id: dict[GroupId, OpenGroup] = {}
        self._by_name: dict[tuple[str | None, str], OpenGroup] = {}
        self._by_session: dict[SessionId, tuple[OpenGroup, Seat]] = {}
        self.num_live = 0
        """Sessions that have not ended."""

    def to_join(self, name: str | None, owner: str | None = None) -> OpenGroup | None:
        """Return the user's group of that name if it waits for members."""
        group = None if name is None else self._by_name.get((owner, name))
        return group if group is not None and group.has_room else None

    def add(self, group: OpenGroup) -> None:
        """Add a group that begins."""
        self._by_id[group.id] = group
        if group.name is not None and not group.is_closed:
            self._by_name[group.owner, group.name] = group
        self.take_position(group.position)

    def take_position(self, position: int | None) -> int:
        """Return the position that the caller chose, or the next free one."""
        position = self._next_position if position is None else position
        # A position that a client chose must not be assigned again.
        self._next_position = max(self._next_position, position + 1)
        return position

    def seat_session(self, group: OpenGroup, seat: Seat, session: SessionId) -> None:
        """Record that the session of ``seat`` has started."""
        seat.session = session
        self.num_live += 1
        self._by_session[session] = (group, seat)

    def of_session(self, session: SessionId) -> tuple[OpenGroup, Seat] | None:
        """Return the group and the seat of a session; ``None`` for a session that the intake did not start."""
        return self._by_session.get(session)

    def unseat_session(self, session: SessionId) -> None:
        """Remove a session that failed."""
        # A retry takes the seat with another session, so ``remove`` would not find this one and its entry would leak.
        self._by_session.pop(session, None)

    def remove(self, group: OpenGroup) -> bool:
        """Remove a group that is complete; return whether it was known."""
        name = (group.owner, group.name or "")
        if self._by_name.get(name) is group:
            del self._by_name[name]
        for seat in group.seats.values():
            if seat.session is not None:
                self._by_session.pop(seat.session, None)
        return self._by_id.pop(group.id, None) is not None


def describe_session(group: OpenGroup, seat: Seat) -> Mapping[str, Any]:
    """Return the metadata with which a session's group can be restored."""
    return {
        "task_id": seat.task,
        "group_id": group.name,
        "group_owner": group.owner,
        "group_size": group.size,
        "position": group.position,
        "member": seat.member,
        "version": group.version,
        "is_trained": group.is_trained,
    }


def restore_group(sessions: tuple[RecoveredSession, ...], permit: Permit, *, is_queued: bool, now: float) -> OpenGroup:
    """Rebuild a group from the metadata of ``describe_session``. A group that was complete cannot be joined."""
    first = sessions[0].metadata
    group = OpenGroup(
        id=sessions[0].group,
        name=first["group_id"],
        owner=first["group_owner"],
        size=first["group_size"],
        position=first["position"],
        permit=permit,
        version=first["version"],
        is_closed=is_queued,
        is_trained=first["is_trained"],
    )
    for session in sessions:
        member, task = int(session.metadata["member"]), session.metadata["task_id"]
        is_known = session.ended_at is not None
        group.seats[member] = Seat(member=member, task=task, started_at=now, is_known=is_known)
    return group


def sample_key(wanted: StartSession, group: OpenGroup, seat: Seat, *, seed: int) -> SampleKey:
    """Return the key of a session's samples: the same as for this member of a group made from a dataset's problem."""
    chosen = seed if wanted.seed is None else wanted.seed
    return SampleKey(seed=chosen, path=("train", group.position, seat.member))


class SessionLeaseQueue:
    """A queue whose items are lent before they are removed."""

    def __init__(self) -> None:
        self._offered: deque[TakenSession] = deque()
        self._lent: dict[str, TakenSession] = {}
        self._changed = ChangeSignal()

    def offer(self, taken: TakenSession) -> None:
        """Put a session at the end of the queue."""
        self._offered.append(taken)
        self._changed.notify()

    async def lend(self, taker: str) -> TakenSession:
        """Wait for a session and lend it. Asking again under the same name before settling returns the same session."""
        while taker not in self._lent:
            if self._offered:
                self._lent[taker] = self._offered.popleft()
            else:
                await self._changed.wait()
        return self._lent[taker]

    def settle(self, taker: str, *, is_kept: bool) -> TakenSession | None:
        """End a loan and return the session if it is kept.

        A session that is not kept returns to the head of the queue.
        """
        taken = self._lent.pop(taker, None)
        if taken is None or is_kept:
            return taken
        self._offered.appendleft(taken)
        self._changed.notify()
        return None
