"""Killed at any moment, and started again: no session whose reward was acknowledged is lost, none is trained twice.

Each life begins from the events that were written and from the weights of the last checkpoint, and ends at any event.
"""

from __future__ import annotations

from contextlib import suppress

import anyio
import pytest
from attrs import define, field
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.stacks.inference_stack import encode, renderer, say
from tests.stacks.rollout_stack import Notebook

from areal_actors.cache import SessionSettings
from areal_actors.domain import (
    CompletionRequest,
    Credential,
    GroupConsumed,
    GroupId,
    GroupQueued,
    JournalEvent,
    SampleKey,
    Sampling,
    SessionForgotten,
    SessionId,
    SessionStarted,
    VersionSaved,
)
from areal_actors.errors import CapacityExhausted, NotFound, Unavailable
from areal_actors.errors import SessionEnded as CameTooLate
from areal_actors.generation.actor import GenerationActor
from areal_actors.journal import MemoryJournal, recover, restore_groups
from areal_actors.kernel import ActorSystem, Message, Ref
from areal_actors.messages import (
    AcknowledgeLease,
    Capacity,
    Complete,
    DescribeCapacity,
    EndSession,
    EpisodeFinished,
    Exports,
    Intake,
    LeaseGroups,
    Progress,
    SaveVersion,
    Sessions,
    StartSession,
    VersionAdvanced,
)
from areal_actors.rollouts.capacity import CapacityGranter
from areal_actors.rollouts.exporter import Exporter
from areal_actors.rollouts.staleness import CapacityLimits, CapacityState
from areal_actors.sessions.intake import IntakeConfig, IntakeKeeper, IntakePeers
from areal_actors.sessions.manager import SessionManager, SessionsConfig
from areal_actors.testing.engines import EchoEngine
from areal_actors_testing.journal_contract import restorable

LIMITS = CapacityLimits(max_concurrent=8, max_staleness=4, batch_size=2)


class Power:
    """Fails after so many events: the process is gone, and what it was doing with it."""

    def __init__(self) -> None:
        self.remaining: int | None = None
        self.has_failed = False
        self.scope = anyio.CancelScope()

    def use(self) -> None:
        if self.remaining is None:
            return
        if self.remaining == 0:
            self.has_failed = True
            self.scope.cancel()
        self.remaining -= 1


class FailingJournal(MemoryJournal):
    """Nothing is written after the power has failed, and what was noted is written with the next write, if at all."""

    def __init__(self, events: list[JournalEvent], power: Power) -> None:
        self.events = events
        self.power = power
        self.noted: list[JournalEvent] = []

    async def write(self, *events: JournalEvent) -> None:
        self.power.use()
        if self.power.has_failed:
            await anyio.sleep_forever()
        self.events.extend((*self.noted, *events))
        self.noted.clear()

    def note(self, *events: JournalEvent) -> None:
        self.noted.extend(events)


class Reporter(Notebook):
    """Keeps what it is told of sessions, as the files of a run do: a plain word once, a repeated one in its place."""

    def __init__(self, told: dict[SessionId, int]) -> None:
        super().__init__()
        self._told = told

    async def write(self, message: Message[Progress, None]) -> None:
        if isinstance(message, EpisodeFinished):
            session = message.episode.session
            assert message.is_repeated or session not in self._told
            self._told[session] = message.version


@define
class World:
    """What outlives a process: the events, the weights, what they were trained with, and what was told of sessions."""

    events: list[JournalEvent] = field(factory=list)
    told: dict[SessionId, int] = field(factory=dict)
    """With the version of each; a process removes those that were told of versions which it makes again."""
    acknowledged: set[SessionId] = field(factory=set)
    live: list[SessionId] = field(factory=list)
    saved: tuple[tuple[SessionId, ...], ...] = ()
    """For each version of the saved weights, the sessions that it was trained with."""

    async def live_on(self, moves: list[str], power: Power) -> None:
        """A process, from its start to its end."""
        async with ActorSystem.open(grace=0.0) as system:
            process = await self._start(system, FailingJournal(self.events, power))
            for move in moves:
                await getattr(process, move)()
            await anyio.wait_all_tasks_blocked()

    async def _start(self, system: ActorSystem, journal: FailingJournal) -> Process:
        version = len(self.saved)
        self.events[:] = restorable(self.events)  # what a journal must keep, and no more
        for session in [name for name, told in self.told.items() if told >= version]:
            del self.told[session]
        progress = await system.spawn(Reporter(self.told))
        generation = await system.spawn(GenerationActor(EchoEngine(lambda _: encode("42"))))
        capacity = await system.spawn(CapacityGranter(CapacityState.at_version(LIMITS, version)))
        manager = SessionManager(
            renderer=renderer(),
            generation=generation,
            config=SessionsConfig(lifetimes=SessionSettings(idle_seconds=300.0, grace_seconds=60.0)),
            journal=journal,
            recovered=recover(self.events),
            wall_clock=anyio.current_time,
        )
        sessions = await system.spawn(manager)
        exporter = Exporter(sessions=sessions, capacity=capacity, are_problems_external=True, journal=journal)
        exports = await system.spawn(exporter)
        restored = restore_groups(tuple(self.events), version=version)
        keeper = IntakeKeeper(
            peers=IntakePeers(sessions=sessions, exports=exports, capacity=capacity, progress=progress),
            config=IntakeConfig(group_size=2, group_timeout_seconds=50.0),
            journal=journal,
            restored=restored,
            version=version,
        )
        intake = await system.spawn(keeper)
        view = await capacity.ask(DescribeCapacity())
        num_restored = len(restored.waiting) + len(restored.open)

        assert version * LIMITS.batch_size + num_restored == view.running + view.accepted
        return Process(self, sessions, exports, capacity, intake, list(self.saved))


@define
class Process:
    """One life of the service; its methods are the moves of agents and of the trainer."""

    world: World
    sessions: Ref[Sessions]
    exports: Ref[Exports]
    capacity: Ref[Capacity]
    intake: Ref[Intake]
    steps: list[tuple[SessionId, ...]]

    async def single(self) -> None:
        await self._begin(None)

    async def member(self) -> None:
        await self._begin("g")

    async def _begin(self, group: str | None) -> None:
        with suppress(CapacityExhausted):
            opened = await self.intake.ask(StartSession(task="t", group=group))
            self.world.live.append(opened.session)

    async def finish(self) -> None:
        """One turn of the oldest session, and its reward; from its acknowledgement on, it may not be lost."""
        if not self.world.live:
            return
        session = self.world.live.pop(0)
        credential = Credential(session=session, has_control=True)
        request = CompletionRequest(messages=say("what?"), sampling=Sampling(max_new_tokens=4))
        with suppress(CameTooLate, NotFound):  # it had expired
            await self.sessions.ask(Complete(credential=credential, request=request))
            await self.sessions.ask(EndSession(credential=credential, final_reward=1.0))
            self.world.acknowledged.add(session)

    async def step(self) -> None:
        """Train, if there is a batch."""
        with anyio.move_on_after(1):
            wanted = LeaseGroups(num_groups=LIMITS.batch_size, version=len(self.steps), max_staleness=99)
            lease = await self.exports.ask(wanted)
            self.steps.append(tuple(e.session for g in lease.groups for e in g.episodes if e.trajectories))
            await self.exports.ask(AcknowledgeLease(lease=lease.id))
            await self.capacity.tell(VersionAdvanced(version=len(self.steps)))

    async def save(self) -> None:
        """Write a checkpoint, and tell of it."""
        self.world.saved = tuple(self.steps)
        await self.exports.ask(SaveVersion(version=len(self.steps)))

    async def wait(self) -> None:
        await anyio.sleep(200)


async def run_killed(world: World, moves: list[str], *, after: int | None) -> None:
    power = Power()
    power.remaining = after
    with power.scope:
        try:
            await world.live_on(moves, power)
        except* Unavailable:  # what an agent may be told as its service dies
            assert power.has_failed


MOVES = st.lists(st.sampled_from(["single", "member", "finish", "finish", "step", "save", "wait"]), max_size=14)


@pytest.mark.anyio
@settings(max_examples=settings().max_examples, deadline=None)
@example(lives=[(["single", "finish", "single", "finish", "step", "save"], 99)])  # saved, and not yet forgotten
@example(  # a session expires in the moment of the end, and is told of
    lives=[(["single", "single", "single", "finish", "finish"], 9), (["step", "save", "wait", "wait"], 5)]
)
@given(lives=st.lists(st.tuples(MOVES, st.integers(0, 25)), max_size=5))
async def test_kills_lose_no_session_and_train_none_twice(lives: list[tuple[list[str], int]]):
    """Each acknowledged session is in the lineage of the surviving weights once."""
    world = World()
    for moves, after in lives:
        await run_killed(world, moves, after=after)
    num_more = len(world.acknowledged) + 4
    drain = ["wait", "step", "save"] * num_more + ["single", "finish"] * 2 + ["wait", "step", "save"] * 3
    world.live.clear()
    await run_killed(world, drain, after=None)
    lineage = [session for step in world.saved for session in step]

    assert len(lineage) == len(set(lineage))
    assert set(lineage) <= set(world.told)
    missing = world.acknowledged - set(lineage)
    assert len(missing) < LIMITS.batch_size * 2  # what does not make a whole batch waits
    waiting = restore_groups(tuple(world.events), version=len(world.saved)).waiting
    assert missing <= {session.id for sessions in waiting.values() for session in sessions}


# ---------------------------------------------------------------------------------------------------- the reading


def started(name: str, group: str, position: int = 0) -> SessionStarted:
    metadata = {"task_id": "t", "group_id": None, "group_size": 1, "position": position, "member": 0, "version": 0}
    return SessionStarted(
        session=SessionId(name),
        key_digest=b"",
        sample_key=SampleKey(seed=0),
        started_at=0.0,
        group=GroupId(group),
        metadata=metadata,
    )


QUEUED = (started("s", "g", 7), GroupQueued(group=GroupId("g"), position=7, sessions=(SessionId("s"),)))


def consumed(version: int) -> GroupConsumed:
    return GroupConsumed(group=GroupId("g"), version=version, is_trained=True)


@pytest.mark.parametrize(
    ("events", "version", "is_back"),
    [
        (QUEUED, 3, True),
        ((*QUEUED, consumed(3)), 3, False),
        ((*QUEUED, consumed(4)), 3, True),
        ((*QUEUED, consumed(4), QUEUED[1]), 4, True),
        ((*QUEUED, consumed(4), QUEUED[1], consumed(5)), 5, False),
        ((*QUEUED, consumed(3), VersionSaved(version=3), SessionForgotten(session=SessionId("s"))), 3, False),
    ],
    ids=["waiting", "trained", "weights lost", "lost, then another lineage", "trained at last", "forgotten"],
)
def test_groups_of_lost_weights_are_restored(*, events: tuple[JournalEvent, ...], version: int, is_back: bool):
    """A version that is reached again does not count for the first one."""
    restored = restore_groups(events, version=version)

    assert is_back == (GroupId("g") in restored.waiting)
    assert {} == restored.open


def test_sessions_of_the_runner_are_not_restored_as_groups():
    """They have no group size."""
    other = SessionStarted(
        session=SessionId("s"), key_digest=b"", sample_key=SampleKey(seed=0), started_at=0.0, group=GroupId("train-0")
    )
    restored = restore_groups((other,), version=0)

    assert ({}, {}) == (restored.waiting, restored.open)
