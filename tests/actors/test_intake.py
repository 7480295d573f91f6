"""External sessions become groups of training data: when, which, under whose permit, and what is told of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from attrs import define, field
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.actors.house import House, open_house, say
from tests.actors.theatre import Notebook

from areal_actors.actors.intake import IntakeConfig, IntakeKeeper, IntakePeers
from areal_actors.actors.outcomes import MemberOutcome
from areal_actors.actors.sessions import SessionsConfig
from areal_actors.cache import SessionSettings
from areal_actors.core import Ref
from areal_actors.domain import Credential, Group, SessionId
from areal_actors.errors import CapacityExhausted, Conflict, NotFound
from areal_actors.messages import (
    AcknowledgeLease,
    DescribeCapacity,
    DescribeSessions,
    EndSession,
    EpisodeFinished,
    Intake,
    LeaseGroups,
    SessionArchived,
    SetReward,
    SettleTaken,
    StartSession,
    TakenSession,
    TakeSession,
    VersionAdvanced,
)
from areal_actors.staleness import CapacityLimits

pytestmark = pytest.mark.anyio

GRACE = 60.0
IDLE = 600.0


@define
class Service:
    """What is open, and what an agent does with it."""

    house: House
    intake: Ref[Intake]
    notebook: Notebook
    sessions: list[SessionId] = field(factory=list)

    async def start(self, group: str | None = None, **options: Any) -> SessionId:
        opened = await self.intake.ask(StartSession(task="task", group=group, **options))
        self.sessions.append(opened.session)
        return opened.session

    async def play(self, session: SessionId, *, reward: float | None = None, final: float | None = None) -> None:
        """One turn, and the end; a ``final`` reward finalizes."""
        await self.house.complete(session, say("what?"))
        credential = Credential(session=session)
        if reward is not None:
            await self.house.sessions.ask(SetReward(credential=credential, reward=reward))
        await self.house.sessions.ask(EndSession(credential=credential, final_reward=final))

    async def lease(self, num_groups: int = 1, *, seconds: float = 0.0) -> tuple[Group, ...]:
        """The groups that are ready within ``seconds``; none if there are not so many."""
        with anyio.move_on_after(seconds + 0.01):
            wanted = LeaseGroups(num_groups=num_groups, version=0, max_staleness=0)
            lease = await self.house.exports.ask(wanted)
            await self.house.exports.ask(AcknowledgeLease(lease=lease.id))
            return lease.groups
        return ()

    async def counts(self) -> tuple[int, int]:
        """Groups that run, and that were accepted, when nothing more can happen by itself."""
        await anyio.wait_all_tasks_blocked()
        view = await self.house.capacity.ask(DescribeCapacity())
        return view.running, view.accepted

    async def num_sessions(self) -> int:
        view = await self.house.sessions.ask(DescribeSessions())
        return view.num_live + view.num_ended

    @property
    def failures(self) -> list[str | None]:
        return [news.episode.failure for news in self.notebook.news if isinstance(news, EpisodeFinished)]


@asynccontextmanager
async def open_service(*, max_concurrent: int = 8, batch_size: int = 8, **options: Any) -> AsyncIterator[Service]:
    lifetimes = SessionSettings(grace_seconds=GRACE, idle_seconds=IDLE)
    limits = CapacityLimits(max_concurrent=max_concurrent, batch_size=batch_size)
    config = IntakeConfig(grace_seconds=GRACE, **options)
    opening = open_house(
        limits=limits, sessions=SessionsConfig(lifetimes=lifetimes), exporter={"are_problems_external": True}
    )
    async with opening as house:
        notebook = Notebook()
        progress = await house.system.spawn(notebook, name="progress")
        peers = IntakePeers(sessions=house.sessions, exports=house.exports, capacity=house.capacity, progress=progress)
        intake = await house.system.spawn(IntakeKeeper(peers=peers, config=config), name="intake")
        yield Service(house, intake, notebook)


# ------------------------------------------------------------------------------------------------ when, and what


async def test_a_finalized_session_is_taken_at_once():
    """A group of one, with its reward, told to the reporter; and its memory is freed once it was trained."""
    async with open_service() as service:
        await service.play(await service.start(), final=0.5)
        (group,) = await service.lease()
        (episode,) = group.episodes
        await anyio.wait_all_tasks_blocked()

        assert (0.5, 1, None) == (episode.reward, len(episode.trajectories), episode.failure)
        assert [EpisodeFinished, SessionArchived] == [type(news) for news in service.notebook.news]
        assert (0, 1) == await service.counts()
        assert 0 == await service.num_sessions()


async def test_a_session_that_was_rewarded_is_taken_when_it_ends():
    """There is no reason to wait for more."""
    async with open_service() as service:
        await service.play(await service.start(), reward=0.25)
        (group,) = await service.lease()

        assert 0.25 == group.episodes[0].reward


async def test_a_late_reward_counts():
    """A session that ends without one is kept for the grace period, and taken with what it was worth then."""
    async with open_service() as service:
        session = await service.start()
        await service.play(session)
        assert () == await service.lease(seconds=GRACE / 2)
        await service.house.sessions.ask(SetReward(credential=Credential(session=session), reward=0.75))
        (group,) = await service.lease(seconds=GRACE)

        assert 0.75 == group.episodes[0].reward


async def test_finalizing_after_the_end_does_not_wait_for_the_grace_period():
    """No more rewards are awaited."""
    async with open_service() as service:
        session = await service.start()
        await service.play(session)
        assert () == await service.lease()
        await service.house.sessions.ask(EndSession(credential=Credential(session=session), final_reward=1.0))
        (group,) = await service.lease()

        assert 1.0 == group.episodes[0].reward


async def test_a_session_that_nobody_rewards_is_rejected():
    """With its reason, its permit returned, and nothing kept of it."""
    async with open_service() as service:
        await service.play(await service.start())
        assert (1, 0) == await service.counts()
        assert () == await service.lease(seconds=2 * GRACE)

        assert ["no_reward"] == [str(failure).split(":")[0] for failure in service.failures]
        assert (0, 0) == await service.counts()
        assert 0 == await service.num_sessions()


async def test_a_client_that_is_gone_costs_its_permit_until_its_session_expires():
    """Whoever never ends its session is rejected as expired, and another may start."""
    async with open_service(max_concurrent=1) as service:
        session = await service.start()
        await service.house.complete(session, say("what?"))
        with pytest.raises(CapacityExhausted):
            await service.start()
        await anyio.sleep(2 * IDLE)
        await service.play(await service.start(), final=1.0)

        assert (0, 1) == await service.counts()
        assert ["expired", "None"] == [str(failure).split(":")[0] for failure in service.failures]


async def test_what_an_expired_session_had_may_be_kept():
    """``keep_partial``: what was rewarded before the client vanished is trained."""
    async with open_service(member_outcome=MemberOutcome.KEEP_PARTIAL) as service:
        session = await service.start()
        await service.house.complete(session, say("what?"))
        await service.house.sessions.ask(SetReward(credential=Credential(session=session), reward=0.5))
        (group,) = await service.lease(seconds=2 * IDLE)

        assert (0.5, True) == (group.episodes[0].reward, str(group.episodes[0].cut_short).startswith("expired"))


async def test_a_session_that_was_forgotten_behind_our_back_is_rejected():
    """Its group goes on without it."""
    from areal_actors.messages import ForgetSession

    async with open_service() as service:
        session = await service.start()
        await service.play(session)
        await service.house.sessions.ask(ForgetSession(session=session))
        await anyio.sleep(2 * GRACE)

        assert ["forgotten"] == [str(failure).split(":")[0] for failure in service.failures]
        assert (0, 0) == await service.counts()


# ------------------------------------------------------------------------------------------------------- groups


async def test_sessions_of_one_name_are_one_group_under_one_permit():
    """Members in any order; delivered when the last one is over, and not before."""
    async with open_service(group_size=3) as service:
        sessions = [await service.start("g") for _ in range(3)]
        for session in reversed(sessions[1:]):
            await service.play(session, final=1.0)
        assert () == await service.lease()
        assert (1, 0) == await service.counts()
        await service.play(sessions[0], final=0.0)
        (group,) = await service.lease()

        assert sessions == [episode.session for episode in group.episodes]
        assert [0, 1, 2] == [episode.member for episode in group.episodes]
        assert (0, 1) == await service.counts()


async def test_starts_at_the_same_time_share_the_permit():
    """However many arrive before the first one has it."""
    async with open_service(group_size=5, max_concurrent=1) as service, anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(service.start, "g")
        await anyio.wait_all_tasks_blocked()

        assert 5 == len(service.sessions)
        assert (1, 0) == await service.counts()


async def test_a_full_group_is_followed_by_another_of_its_name():
    """A second epoch may use the same names."""
    async with open_service(group_size=2) as service:
        for session in [await service.start("g") for _ in range(4)]:
            await service.play(session, final=1.0)
        groups = await service.lease(2)

        assert [0, 1] == [group.problem.position for group in groups]
        assert [[0, 1], [0, 1]] == [[episode.member for episode in group.episodes] for group in groups]


async def test_users_do_not_share_groups_by_sharing_a_name():
    """Nobody can slip a session into somebody else's group."""
    async with open_service(group_size=2) as service:
        await service.start("g", user="ada")
        await service.start("g", user="ben")

        assert (2, 0) == await service.counts()


async def test_members_that_never_start_are_not_waited_for():
    """After the time-out the group is what there is; who is still playing may finish."""
    async with open_service(group_size=4, group_timeout_seconds=100.0) as service:
        first, second = await service.start("g"), await service.start("g")
        await service.play(first, final=1.0)
        assert () == await service.lease(seconds=150.0)
        await service.play(second, final=0.5)
        (group,) = await service.lease()

        assert [1.0, 0.5] == [episode.reward for episode in group.episodes]


async def test_whoever_failed_may_try_again():
    """While its group is open, a session of which nothing came makes room for another."""
    async with open_service(group_size=2) as service:
        first, second = await service.start("g"), await service.start("g")
        await service.play(first)
        await anyio.sleep(2 * GRACE)
        third = await service.start("g")
        await service.play(second, final=1.0)
        await service.play(third, final=0.5)
        (group,) = await service.lease()

        assert [(0, third), (1, second)] == [(episode.member, episode.session) for episode in group.episodes]


async def test_a_failed_member_costs_its_group_what_the_settings_say():
    """``fail_group``: an expired member takes its siblings with it, and the permit returns."""
    async with open_service(group_size=2, member_outcome=MemberOutcome.FAIL_GROUP) as service:
        first, _ = await service.start("g"), await service.start("g")
        await service.play(first, final=1.0)
        assert () == await service.lease(seconds=3 * IDLE)

        assert (0, 0) == await service.counts()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"position": 4}, "position 3, not 4"),
        ({"group_size": 5}, "2 members, not 5"),
        ({"member": 2}, "members 0 to 1"),
        ({"member": 0}, "was started before"),
    ],
)
async def test_what_does_not_fit_its_group_is_refused(options: dict, words: str):
    """And the group goes on as it was."""
    async with open_service(group_size=2) as service:
        await service.start("g", position=3)
        with pytest.raises(Conflict, match=words):
            await service.start("g", **options)
        second = await service.start("g")
        for session in (service.sessions[0], second):
            await service.play(session, final=1.0)

        assert [3] == [group.problem.position for group in await service.lease()]


async def test_a_start_that_fails_leaves_nothing():
    """A key that is in use: the permit of the group that would have begun returns."""
    async with open_service() as service:
        await service.start(api_key="sk-in-use")
        with pytest.raises(Conflict):
            await service.start(api_key="sk-in-use")
        with pytest.raises(Conflict):
            await service.start("g", group_size=2, member=7)

        assert (1, 0) == await service.counts()


async def test_capacity_is_refused_by_group():
    """Without room for another group, those that run may still fill up."""
    async with open_service(group_size=2, batch_size=1) as service:
        await service.start("g")
        with pytest.raises(CapacityExhausted):
            await service.start("h")
        for session in (service.sessions[0], await service.start("g")):
            await service.play(session, final=1.0)
        await service.lease()
        with pytest.raises(CapacityExhausted):
            await service.start("h")
        await service.house.capacity.tell(VersionAdvanced(version=1))
        await service.start("h")


@settings(max_examples=settings().max_examples // 2)
@given(
    members=st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["final", "late", "none", "gone"])), max_size=12)
)
async def test_every_session_ends_in_one_group_and_every_permit_returns(members: list[tuple[str, str]]):
    """For any mix of fates: what was rewarded is trained exactly once, the rest is told, and nothing stays."""
    async with open_service(group_size=3, max_concurrent=64, batch_size=64) as service:
        rewarded = set()
        for name, fate in members:
            session = await service.start(name)
            if fate != "gone":
                await service.play(session, final=1.0 if fate == "final" else None)
            if fate == "late":
                await service.house.sessions.ask(SetReward(credential=Credential(session=session), reward=0.5))
            if fate in ("final", "late"):
                rewarded.add(session)
        await anyio.sleep(5 * IDLE)
        running, accepted = await service.counts()
        groups = await service.lease(accepted) if accepted else ()
        await anyio.wait_all_tasks_blocked()
        trained = [e.session for group in groups for e in group.episodes if e.trajectories]

        assert 0 == running
        assert sorted(rewarded) == sorted(trained)
        assert len(members) == len(service.failures)
        assert 0 == await service.num_sessions()


# ------------------------------------------------------------------------------------------------------ by hand


async def take(service: Service, taker: str, *, is_kept: bool = True) -> TakenSession:
    taken = await service.intake.ask(TakeSession(taker=taker))
    await service.intake.tell(SettleTaken(taker=taker, is_kept=is_kept))
    return taken


async def test_finished_sessions_are_lent_one_each():
    """In the order of their ends; what is not kept goes to the next, and what is kept is forgotten."""
    async with open_service(is_delivering=False) as service:
        first, second = await service.start(), await service.start()
        for session in (first, second):
            await service.play(session, final=1.0)
        given_back = await take(service, "a", is_kept=False)
        kept = [await take(service, name) for name in ("b", "c")]
        await anyio.wait_all_tasks_blocked()

        assert first == given_back.episode.session
        assert [first, second] == [taken.episode.session for taken in kept]
        assert (0, 0) == await service.counts()
        with pytest.raises(NotFound):
            await service.house.record(first)


async def test_where_the_trainer_gets_them_nobody_else_does():
    """Asking for one is a mistake that is named."""
    async with open_service() as service:
        with pytest.raises(Conflict, match="go to its trainer"):
            await service.intake.ask(TakeSession(taker="a"))
