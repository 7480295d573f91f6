"""Groups of a dataset outlive a killed run: each is trained once, in the step that it was recorded for."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from attrs import define, evolve, field
from hypothesis import given
from hypothesis import strategies as st
from tests.rollouts.test_exporter import make_group
from tests.stacks.inference_stack import encode, renderer
from tests.stacks.journals import Breakable
from tests.stacks.rollout_stack import Episode, Notebook, open_rollout_stack

from areal_actors.datasets import DifficultyConfig
from areal_actors.domain import (
    DataPosition,
    Group,
    GroupId,
    GroupQueued,
    JournalEvent,
    Problem,
    StepLeased,
)
from areal_actors.generation.actor import GenerationActor
from areal_actors.journal import MemoryJournal
from areal_actors.kernel import ActorSystem, Ref
from areal_actors.kernel.remote.codec import Codec
from areal_actors.messages import (
    AcknowledgeLease,
    BeginGroup,
    Capacity,
    ClaimPermit,
    DeliverGroup,
    DescribeCapacity,
    DiscardLease,
    EpisodeFinished,
    Exports,
    Lease,
    LeaseGroups,
    Progress,
    SaveVersion,
    SettlePermit,
    StoreEpisodes,
    VersionAdvanced,
)
from areal_actors.rollouts.draws import DrawConfig
from areal_actors.rollouts.exporter import QueueConfig
from areal_actors.rollouts.group_journal import GroupJournal, RestoredQueue, StoredGroup, restore_queue
from areal_actors.rollouts.staleness import CapacityLimits
from areal_actors.run.inference import InferenceConfig, spawn_session_actors
from areal_actors.testing.engines import EchoEngine

pytestmark = pytest.mark.anyio

LIMITS = CapacityLimits(max_concurrent=6, batch_size=2, max_staleness=1)
QUEUES = {
    "plain": QueueConfig(),
    "pools": QueueConfig(difficulty=DifficultyConfig(enabled=True), seed=3),
    "sources": QueueConfig(sources={"a": DrawConfig(weight=1.0), "b": DrawConfig(weight=2.0)}),
}
Place = tuple[str, int]
"""A source and a position."""


def group_at(place: Place, **options: Any) -> Group:
    group = make_group(place[1], **options)
    problem = Problem(source=place[0], position=place[1], data={})
    return evolve(group, id=GroupId(f"train-{problem.task}"), problem=problem)


class Killable(MemoryJournal):
    """What is only noted is lost when the process is killed, except for the ``kept`` first events."""

    def __init__(self, events: list[JournalEvent], *, kept: int) -> None:
        super().__init__(events)
        self._noted: list[JournalEvent] = []
        self._kept = kept

    async def write(self, *events: JournalEvent) -> None:
        await super().write(*self._noted, *events)
        self._noted.clear()

    def note(self, *events: JournalEvent) -> None:
        self._noted += events

    @property
    def surviving(self) -> list[JournalEvent]:
        return [*self.events, *self._noted[: self._kept]]


@define
class World:
    """What is on disk, and what all processes have seen."""

    events: list[JournalEvent] = field(factory=list)
    saved: int = 0
    position: DataPosition = field(factory=DataPosition)
    steps: dict[int, list[Place]] = field(factory=dict)
    """The problems that each step was given, by all processes."""
    queue: QueueConfig = field(factory=QueueConfig)

    @property
    def stored(self) -> set[Place]:
        return {place_of(event) for event in self.events if isinstance(event, GroupQueued) and "/" not in event.group}

    @property
    def parts(self) -> set[Place]:
        """The problems of groups of which only a member is stored."""
        queued = {place_of(event) for event in self.events if isinstance(event, GroupQueued) and event.content}
        return queued - self.stored

    def restore(self, version: int | None = None) -> RestoredQueue:
        done = self.queue.open_draws(self.position)
        at = self.saved if version is None else version
        return restore_queue(self.events, settings="s", version=at, is_done=done.is_consumed)

    @asynccontextmanager
    async def open_process(
        self, journal: MemoryJournal, *, progress: Ref[Progress] | None = None
    ) -> AsyncIterator[Process]:
        restored = self.restore()
        async with ActorSystem.open(grace=0.0) as system:
            group_journal = GroupJournal(journal, settings="s", next_step=restored.next_step)
            await group_journal.discard(restored)
            actors = await spawn_session_actors(
                system,
                InferenceConfig(limits=LIMITS, queue=self.queue),
                renderer=renderer(),
                generation=await system.spawn(GenerationActor(EchoEngine(lambda _: encode("42")))),
                version=self.saved,
                start=self.position,
                progress=progress,
                group_journal=group_journal,
                restored_queue=restored,
            )
            view = await actors.capacity.ask(DescribeCapacity())
            assert self.saved * LIMITS.batch_size + len(restored.held) == view.accepted
            yield Process(self, actors.exports, actors.capacity, self.saved, self.position, self.stored, self.parts)


@define
class Process:
    """One process of the run; its methods are the moves of the runner and of the trainer."""

    world: World
    exports: Ref[Exports]
    capacity: Ref[Capacity]
    version: int
    position: DataPosition
    stored: set[Place]
    parts: set[Place]
    begun: list[tuple[Place, int, int]] = field(factory=list)
    lease: Lease | None = None

    async def begin(self) -> None:
        if (await self.capacity.ask(DescribeCapacity())).available <= 0:
            return
        permit = await self.capacity.ask(ClaimPermit(holder="test"))
        draw = await self.exports.ask(BeginGroup(version=permit.version, num_problems={"": 5}))
        place = draw.source, draw.position
        assert place not in self.stored, "a stored group is not sampled again"
        assert bool(draw.finished) == (place in self.parts), "nor is a stored member"
        self.begun.append((place, permit.id, permit.version))

    async def store(self) -> None:
        """A member of the newest group is over, and others are not."""
        if self.begun:
            place, _, version = self.begun[-1]
            await self.exports.ask(StoreEpisodes(group=group_at(place, version=version), member=0))

    async def deliver(self, at: int = 0) -> None:
        """The oldest group is over; of every third, nothing can be trained."""
        if len(self.begun) <= at:
            return
        place, permit, version = self.begun.pop(at)
        group = group_at(place, version=version, num_trained=0 if place[1] % 3 == 2 else 2)
        is_accepted = await self.exports.ask(DeliverGroup(group=group))
        await self.capacity.ask(SettlePermit(permit=permit, is_accepted=is_accepted))

    async def deliver_second(self) -> None:
        await self.deliver(1)

    async def lend(self) -> None:
        with anyio.move_on_after(1):
            wanted = LeaseGroups(num_groups=LIMITS.batch_size, version=self.version, max_staleness=1)
            self.lease = await self.exports.ask(wanted)
            places = [group.problem.place for group in self.lease.groups]
            assert self.world.steps.setdefault(self.version + 1, places) == places, "a step is always the same"
            assert max(group.head_version for group in self.lease.groups) <= self.version

    async def step(self) -> None:
        await self.lend()
        if self.lease is not None:
            self.position = await self.exports.ask(AcknowledgeLease(lease=self.lease.id))
            self.lease = None
            self.version += 1
            await self.capacity.ask(VersionAdvanced(version=self.version))

    async def save(self) -> None:
        if self.lease is None:
            self.world.saved, self.world.position = self.version, self.position
            await self.exports.ask(SaveVersion(version=self.version))


MOVES = st.lists(
    st.sampled_from(
        ["begin", "begin", "begin", "deliver", "deliver", "deliver_second", "store", "lend", "step", "step", "save"]
    ),
    max_size=30,
)


def place_of(event: GroupQueued) -> Place:
    """The problem of a group by its name."""
    _, source, position = f"-{event.group.partition('/')[0]}".rsplit("-", 2)
    return ("" if source == "train" else source), int(position)


@given(lives=st.lists(st.tuples(MOVES, st.integers(0, 3)), max_size=5), queue=st.sampled_from(sorted(QUEUES)))
async def test_killed_at_any_moment_each_group_is_trained_once_in_its_step(
    lives: list[tuple[list[str], int]], queue: str
):
    """Stored groups are not sampled again, recorded steps have their groups, and no position is lost or repeated."""
    world = World(queue=QUEUES[queue])
    rounds = ["begin"] * 6 + ["deliver"] * 6 + ["step"] * 3
    for moves, kept in [*lives, (rounds * 4 + ["save"], 0)]:
        journal = Killable(world.events, kept=kept)
        async with world.open_process(journal) as process:
            for move in moves:
                await getattr(process, move)()
        world.events = journal.surviving
    trained = [place for version in range(1, world.saved + 1) for place in world.steps[version]]

    assert world.saved >= 4
    if world.position.pools is not None:
        num_drawn = sum(problem.num_drawn for problem in world.position.pools.problems)
        num_done = world.position.next - len(world.position.pending)
        assert num_drawn == num_done + len(world.position.pools.assigned), "each problem is drawn once"
    assert len(trained) == len(set(trained))
    for source in world.queue.sources or [""]:
        own = [position for name, position in trained if name == source]
        done = {*own, *(position for position in range(max(own)) if position % 3 == 2)}
        assert max(own) - len(done) < LIMITS.max_concurrent  # the others run, or wait for a batch


def stored(position: int, *, version: int = 0, settings: str = "s", is_rejected: bool = False) -> list[JournalEvent]:
    """The events of a delivered group."""
    journal = MemoryJournal()
    group_journal = GroupJournal(journal, settings=settings)
    entry = StoredGroup(group=make_group(position, version=version), admitted=version)
    group_journal.add(entry, rejected_at=1 if is_rejected else None)
    return journal.events


def leased(version: int, *positions: int) -> StepLeased:
    groups = tuple(make_group(at).id for at in positions)
    return StepLeased(version=version, groups=groups, content=Codec().to_bytes({}))


def positions(groups: tuple[StoredGroup, ...]) -> list[int]:
    return [entry.group.problem.position for entry in groups]


def test_groups_of_the_checkpoint_are_not_restored():
    """Steps up to its version are over, and so are the problems that it counts as done."""
    events = [*stored(0), *stored(1), leased(1, 0), leased(2, 1), *stored(2)]
    restored = restore_queue(events, settings="s", version=1, is_done=lambda problem: problem.position == 0)

    assert [(2, [1])] == [(step.version, positions(step.groups)) for step in restored.steps]
    assert ([2], 3) == (positions(restored.waiting), restored.next_step)


@pytest.mark.parametrize("lost", ["group", "step", "settings"])
def test_steps_are_repeated_up_to_a_gap(lost: str):
    """Tokens of later versions are discarded with the steps that made those, once and for all."""
    events = [
        *stored(0),
        *stored(1),
        leased(1, 0),
        *stored(2, version=1, settings="other" if lost == "settings" else "s"),
    ]
    events += [leased(2, 2), *stored(3, version=2), *stored(4, version=1), leased(3, 3)]
    if lost == "group":
        events = [event for event in events if not (isinstance(event, GroupQueued) and event.position == 2)]
    if lost == "step":
        events = [event for event in events if not (isinstance(event, StepLeased) and event.version == 2)]
    restored = restore_queue(events, settings="s", version=0)
    again = restore_queue([*events, *restored.void], settings="s", version=0)

    assert [[0]] == [positions(step.groups) for step in restored.steps]
    assert set(positions(restored.waiting)) == ({1, 4, 2} if lost == "step" else {1, 4})
    assert (restored.steps, restored.waiting, ()) == (again.steps, again.waiting, again.void)


def test_only_tokens_of_lost_weights_are_marked():
    """They are not checked against weights that are made again; those of the checkpoint are."""
    events = [*stored(0), leased(1, 0), *stored(1, version=1), *stored(2, is_rejected=True)]
    restored = restore_queue(events, settings="s", version=0)
    (waiting,) = restored.waiting
    (done,) = restored.rejected

    assert [True] == [episode.is_restored for episode in waiting.group.episodes]
    assert [False] == [episode.is_restored for episode in restored.steps[0].groups[0].group.episodes]
    assert 2 == done.group.problem.position


async def test_members_that_were_finished_are_not_run_again():
    """The rest of their group is, by the agent; the whole is trained as if nothing had happened."""
    journal, members, slow = Killable([], kept=99), [], anyio.Event()

    async def act(episode: Episode) -> float:
        members.append(episode.context.member)
        if episode.context.member == 1:
            await slow.wait()
        await episode.ask()
        return 0.5

    async def run(restored: RestoredQueue, num_groups: int) -> list[Group]:
        group_journal = GroupJournal(journal, settings="s", next_step=restored.next_step)
        durable = {"group_journal": group_journal, "restored": restored}
        limits = CapacityLimits(max_concurrent=1, batch_size=1)
        async with open_rollout_stack(act, is_producing=True, limits=limits, exporter=durable) as rollout_stack:
            await anyio.wait_all_tasks_blocked()
            wanted = LeaseGroups(num_groups=num_groups, version=0, max_staleness=0)
            return list((await rollout_stack.inference.exports.ask(wanted)).groups) if num_groups else []

    await run(RestoredQueue(), 0)
    restored = restore_queue(journal.surviving, settings="s", version=0)
    slow.set()
    (group,) = await run(restored, 1)
    left = restore_queue(journal.surviving, settings="s", version=0)

    assert [0, 1, 1] == sorted(members)
    assert [0] == [part.member for part in restored.parts]
    assert restored.parts[0].group.episodes[0].session == group.episodes[0].session
    assert [(0, None), (1, None)] == [(episode.member, episode.failure) for episode in group.episodes]
    assert ((), 1) == (left.parts, len(left.steps))


async def test_batch_that_cannot_be_trained_is_sampled_again():
    """A resumed run would fail on it again."""
    world = World()
    journal = Killable(world.events, kept=99)
    async with world.open_process(journal) as process:
        for move in ("begin", "begin", "deliver", "deliver", "lend"):
            await getattr(process, move)()
        assert process.lease is not None
        await process.exports.ask(DiscardLease(lease=process.lease.id))
    world.events = journal.surviving

    assert RestoredQueue() == evolve(world.restore(), void=())


async def test_journal_that_breaks_does_not_end_the_run():
    """Groups are trained on; only a crash samples them again."""
    world, journal = World(), Breakable()
    async with world.open_process(journal) as process:
        journal.is_broken = True
        for move in ("begin", "begin", "deliver", "deliver", "step", "save"):
            await getattr(process, move)()

    assert (1, {1: [("", 0), ("", 1)]}) == (process.version, world.steps)
    assert [] == journal.events


async def test_rows_that_cannot_be_stored_are_trained():
    """Objects of a workflow have no form on a disk."""
    journal = MemoryJournal()
    group = make_group(0)
    odd = evolve(group, episodes=(evolve(group.episodes[0], logged={"x": object()}),))  # type: ignore[dict-item]
    GroupJournal(journal).add(StoredGroup(group=odd, admitted=0))

    assert [] == journal.events


async def test_restored_episodes_are_reported_once():
    """The reporter removed what was reported of the versions from the checkpoint's on."""
    world = World(events=[*stored(0), *stored(1, is_rejected=True), *stored(2)])
    async with ActorSystem.open() as system:
        notebook = Notebook()
        progress = await system.spawn(notebook)
        for _ in range(2):
            async with world.open_process(Killable(world.events, kept=0), progress=progress):
                await anyio.wait_all_tasks_blocked()
            world.saved, world.position = 1, DataPosition(next=1)  # the second process resumes from there

    assert all(isinstance(news, EpisodeFinished) for news in notebook.news)
    told = [(news.problem.position, news.is_repeated) for news in notebook.news]
    assert [(0, False), (2, False), (1, False), (2, True), (1, True)] == told
