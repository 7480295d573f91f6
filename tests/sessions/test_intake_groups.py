"""External sessions become groups: whose they are, when they are full, under whose permit."""

from __future__ import annotations

import anyio
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.stacks.service import GRACE, IDLE, open_service

from areal_actors.domain import Credential
from areal_actors.errors import CapacityExhausted, Conflict
from areal_actors.messages import SessionFinished, SetReward, VersionAdvanced

pytestmark = pytest.mark.anyio


async def test_sessions_of_one_name_form_a_group():
    """It is delivered when the last one has ended."""
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


async def test_concurrent_starts_share_a_permit():
    async with open_service(group_size=5, max_concurrent=1) as service, anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(service.start, "g")
        await anyio.wait_all_tasks_blocked()

        assert 5 == len(service.sessions)
        assert (1, 0) == await service.counts()


async def test_full_group_is_followed_by_another_of_its_name():
    async with open_service(group_size=2) as service:
        for session in [await service.start("g") for _ in range(4)]:
            await service.play(session, final=1.0)
        groups = await service.lease(2)

        assert [0, 1] == [group.problem.position for group in groups]
        assert [[0, 1], [0, 1]] == [[episode.member for episode in group.episodes] for group in groups]


async def test_groups_of_two_users_with_one_name_are_separate():
    async with open_service(group_size=2) as service:
        await service.start("g", user="ada")
        await service.start("g", user="ben")

        assert (2, 0) == await service.counts()


async def test_group_is_closed_after_its_timeout():
    """Members that run may finish."""
    async with open_service(group_size=4, group_timeout_seconds=100.0) as service:
        first, second = await service.start("g"), await service.start("g")
        await service.play(first, final=1.0)
        assert () == await service.lease(seconds=150.0)
        await service.play(second, final=0.5)
        (group,) = await service.lease()

        assert [1.0, 0.5] == [episode.reward for episode in group.episodes]


async def test_failed_member_can_be_replaced():
    """Its group is still open."""
    async with open_service(group_size=2) as service:
        first, second = await service.start("g"), await service.start("g")
        await service.play(first)
        await anyio.sleep(2 * GRACE)
        third = await service.start("g")
        await service.play(second, final=1.0)
        await service.play(third, final=0.5)
        (group,) = await service.lease()
        await anyio.wait_all_tasks_blocked()

        assert {} == service.keeper._groups._by_session, "their groups' rows would be kept with them"
        assert [(0, third), (1, second)] == [(episode.member, episode.session) for episode in group.episodes]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"position": 4}, "position 3, not 4"),
        ({"group_size": 5}, "2 members, not 5"),
        ({"member": 2}, "members 0 to 1"),
        ({"member": 0}, "was started before"),
    ],
)
async def test_start_that_does_not_fit_its_group_is_refused(options: dict, words: str):
    """The group continues."""
    async with open_service(group_size=2) as service:
        await service.start("g", position=3)
        with pytest.raises(Conflict, match=words):
            await service.start("g", **options)
        second = await service.start("g")
        for session in (service.sessions[0], second):
            await service.play(session, final=1.0)

        assert [3] == [group.problem.position for group in await service.lease()]


async def test_failed_start_returns_the_permit():
    """Its key is in use."""
    async with open_service() as service:
        await service.start(api_key="sk-in-use")
        with pytest.raises(Conflict):
            await service.start(api_key="sk-in-use")
        with pytest.raises(Conflict):
            await service.start("g", group_size=2, member=7)

        assert (1, 0) == await service.counts()


async def test_repeated_end_is_delivered_once():
    async with open_service(group_size=2) as service:
        sessions = [await service.start("g") for _ in range(2)]
        for session in sessions:
            await service.play(session, final=1.0)
            await service.intake.tell(SessionFinished(session=session, is_final=True))
        (group,) = await service.lease()
        for session in sessions:
            await service.intake.tell(SessionFinished(session=session, is_final=True))

        assert sessions == [episode.session for episode in group.episodes]
        assert () == await service.lease()
        assert (0, 1) == await service.counts()


@pytest.mark.parametrize("num_moments", range(0, 16, 3))
async def test_cancelled_start_returns_the_permit(num_moments: int):
    """The session may have been opened by then."""
    async with open_service(max_concurrent=1) as service:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(service.start, "g")
            for _ in range(num_moments):
                await checkpoint()
            tasks.cancel_scope.cancel()
        await anyio.sleep(2 * IDLE + GRACE)

        assert (0, 0) == await service.counts()
        await service.play(await service.start("h"), final=1.0)
        assert 1 == len(await service.lease())


async def test_exhausted_capacity_refuses_new_groups_only():
    async with open_service(group_size=2, batch_size=1) as service:
        await service.start("g")
        with pytest.raises(CapacityExhausted):
            await service.start("h")
        for session in (service.sessions[0], await service.start("g")):
            await service.play(session, final=1.0)
        await service.lease()
        with pytest.raises(CapacityExhausted):
            await service.start("h")
        await service.inference.capacity.tell(VersionAdvanced(version=1))
        await service.start("h")


@settings(max_examples=settings().max_examples // 2)
@given(
    members=st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["final", "late", "none", "gone"])), max_size=12)
)
async def test_every_session_ends_in_one_group_and_every_permit_returns(members: list[tuple[str, str]]):
    """Rewarded sessions are trained exactly once."""
    async with open_service(group_size=3, max_concurrent=64, batch_size=64) as service:
        rewarded = set()
        for name, fate in members:
            session = await service.start(name)
            if fate != "gone":
                await service.play(session, final=1.0 if fate == "final" else None)
            if fate == "late":
                await service.inference.sessions.ask(
                    SetReward(credential=Credential(session=session, has_control=True), reward=0.5)
                )
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
