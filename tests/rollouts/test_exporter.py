"""The exporter: groups are leased, acknowledged and forgotten once, also after cancellations and repeated requests."""

from __future__ import annotations

from itertools import islice

import anyio
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from tests.stacks.inference_stack import InferenceStack, echo_of, open_inference_stack, say

from areal_actors.datasets import DifficultyConfig
from areal_actors.domain import (
    Credential,
    DataPosition,
    Episode,
    Group,
    GroupId,
    InteractionId,
    Problem,
    SessionId,
    SourcePosition,
    Trajectory,
)
from areal_actors.errors import NotFound
from areal_actors.messages import (
    AcknowledgeLease,
    AcquirePermit,
    BeginGroup,
    DeliverGroup,
    DescribeCapacity,
    ExportSession,
    Lease,
    LeaseGroups,
    SetReward,
    SettlePermit,
)
from areal_actors.rollouts.draws import positions_from
from areal_actors.rollouts.exporter import QueueConfig
from areal_actors.rollouts.staleness import CapacityLimits, StaleGroups

pytestmark = pytest.mark.anyio

DROPPING = {"queue": QueueConfig(stale_groups=StaleGroups.DROP)}


def make_group(position: int, *, version: int = 0, num_trained: int = 2, session: str | None = None) -> Group:
    """A group of one row that was sampled by ``version``."""
    trained = [1] * num_trained + [0]
    row = Trajectory(
        session=SessionId(session or f"s{position}"),
        interactions=(InteractionId("turn"),),
        input_ids=range(len(trained)),
        loss_mask=trained,
        logprobs=[-1.0 * t for t in trained],
        versions=[version if t else -1 for t in trained],
        returns=[1.0 * t for t in trained],
        turns=[t - 1 for t in trained],
        reward=1.0,
    )
    episode = Episode(session=row.session, member=0, trajectories=(row,))
    return Group(id=GroupId(f"train-{position}"), problem=Problem(position=position, data={}), episodes=(episode,))


def ask_for(num_groups: int, *, version: int = 0, max_staleness: int = 0) -> LeaseGroups:
    return LeaseGroups(num_groups=num_groups, version=version, max_staleness=max_staleness)


def positions_of(lease: Lease) -> list[int]:
    return [group.problem.position for group in lease.groups]


async def deliver(inference: InferenceStack, *groups: Group) -> list[bool]:
    return [await inference.exports.ask(DeliverGroup(group=group)) for group in groups]


async def is_known(inference: InferenceStack, session: SessionId) -> bool:
    await anyio.wait_all_tasks_blocked()
    try:
        await inference.record(session)
    except NotFound:
        return False
    return True


# ------------------------------------------------------------------------------------------------------- rows


async def test_session_is_exported_as_often_as_one_asks():
    """The rows follow the rewards, the discount and the style of the request; nothing is forgotten by reading."""
    async with open_inference_stack() as inference:
        session = (await inference.open()).session
        credential = Credential(session=session, has_control=True)
        (first,) = await inference.complete(session, say("one?"))
        await inference.complete(session, (*say("one?"), echo_of(first), *say("two?")))
        await inference.sessions.ask(SetReward(credential=credential, reward=1.0))
        await inference.sessions.ask(SetReward(credential=credential, reward=0.25, interaction=first.interaction))
        plain = await inference.exports.ask(ExportSession(session=session, member=3))
        halved = await inference.exports.ask(ExportSession(session=session, discount=0.5, style="concat"))

        assert (3, 1.25, 2) == (plain.member, plain.reward, plain.num_turns)
        assert [1.25, 1.0] == [row.reward for row in plain.trajectories]
        assert [[0.75, 1.0]] == [sorted({float(r) for r in row.returns if r}) for row in halved.trajectories]
        assert sum(row.num_trained_tokens for row in plain.trajectories) == halved.trajectories[0].num_trained_tokens
        assert await is_known(inference, session)


# ------------------------------------------------------------------------------------------------------ leases


async def test_lowest_positions_are_lent_first():
    """Groups that finish early do not overtake the problems before them, where both are there."""
    async with open_inference_stack() as inference:
        await deliver(inference, *map(make_group, (3, 0, 2, 1)))

        assert [0, 1, 2] == positions_of(await inference.exports.ask(ask_for(3)))


async def test_lease_that_was_not_acknowledged_is_offered_again():
    """A trainer that died between lease and step finds the same groups; once acknowledged they are gone."""
    async with open_inference_stack() as inference:
        await deliver(inference, *map(make_group, range(4)))
        lease = await inference.exports.ask(ask_for(2))
        again = await inference.exports.ask(ask_for(2))
        position = await inference.exports.ask(AcknowledgeLease(lease=lease.id))
        twice = await inference.exports.ask(AcknowledgeLease(lease=lease.id))

        assert lease == again
        assert DataPosition(next=2) == position == twice
        assert [2, 3] == positions_of(await inference.exports.ask(ask_for(2)))


async def test_group_delivered_twice_is_trained_once():
    """While it waits, while it is lent, and after it was trained."""
    async with open_inference_stack() as inference:
        group = make_group(0)
        answers = await deliver(inference, group, group)
        lease = await inference.exports.ask(ask_for(1))
        answers += await deliver(inference, group)
        await inference.exports.ask(AcknowledgeLease(lease=lease.id))
        answers += await deliver(inference, group)
        await deliver(inference, make_group(1))

        assert [True, True, True, False] == answers
        assert [1] == positions_of(await inference.exports.ask(ask_for(1)))


async def test_group_with_nothing_to_train_is_consumed_at_once():
    """It is not queued, its sessions are forgotten, and a resumed run does not try it again."""
    async with open_inference_stack() as inference:
        session = (await inference.open()).session
        empty = make_group(0, num_trained=0, session=session)
        assert [False, False] == await deliver(inference, empty, empty)
        await deliver(inference, make_group(1))
        lease = await inference.exports.ask(ask_for(1))

        assert [1] == positions_of(lease)
        assert DataPosition(next=2) == await inference.exports.ask(AcknowledgeLease(lease=lease.id))
        assert not await is_known(inference, session)


async def test_sessions_are_forgotten_when_their_rows_were_trained_and_not_before():
    """What was lent may have to be built again; what was acknowledged frees its memory."""
    async with open_inference_stack() as inference:
        session = (await inference.open()).session
        await deliver(inference, make_group(0, session=session))
        lease = await inference.exports.ask(ask_for(1))
        assert await is_known(inference, session)

        await inference.exports.ask(AcknowledgeLease(lease=lease.id))
        assert not await is_known(inference, session)


async def test_stale_groups_are_dropped_refunded_and_counted_once():
    """A group beyond η is not trained; another may take its place, and its problem counts as consumed."""
    async with open_inference_stack(
        limits=CapacityLimits(max_concurrent=8, batch_size=2), exporter=DROPPING
    ) as inference:
        for position in range(2):
            permit = await inference.capacity.ask(AcquirePermit(holder="test"))
            await deliver(inference, make_group(position))
            await inference.capacity.ask(SettlePermit(permit=permit.id, is_accepted=True))
        full = await inference.capacity.ask(DescribeCapacity())
        await deliver(inference, make_group(2, version=1), make_group(3, version=2), make_group(4, version=2))
        lease = await inference.exports.ask(ask_for(2, version=2, max_staleness=1))
        await anyio.wait_all_tasks_blocked()
        refunded = await inference.capacity.ask(DescribeCapacity())
        position = await inference.exports.ask(AcknowledgeLease(lease=lease.id))
        await deliver(inference, make_group(5, version=2))
        following = await inference.exports.ask(ask_for(1, version=2, max_staleness=1))

        assert (2, 0) == (full.accepted, refunded.accepted)
        assert ([2, 3], 2) == (positions_of(lease), lease.drawn.dropped)
        assert DataPosition(next=4) == position
        assert ([4], 0) == (positions_of(following), following.drawn.dropped)


async def test_lease_waits_until_there_are_enough_groups():
    """The asker sleeps; each delivery wakes it to count again."""
    async with open_inference_stack() as inference, anyio.create_task_group() as tasks:
        leases = []

        async def lease() -> None:
            leases.append(await inference.exports.ask(ask_for(2)))

        tasks.start_soon(lease)
        await anyio.wait_all_tasks_blocked()
        await deliver(inference, make_group(1))
        await anyio.wait_all_tasks_blocked()
        assert [] == leases

        await deliver(inference, make_group(0))
        await anyio.wait_all_tasks_blocked()
        assert [[0, 1]] == list(map(positions_of, leases))


async def test_two_who_wait_are_given_the_same_lease():
    """There is one lease at a time: a second trainer can neither take groups away nor wait for ever."""
    async with open_inference_stack() as inference:
        leases = []

        async def lease() -> None:
            leases.append(await inference.exports.ask(ask_for(1)))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lease)
            tasks.start_soon(lease)
            await anyio.wait_all_tasks_blocked()
            await deliver(inference, make_group(0), make_group(1))
        await inference.exports.ask(AcknowledgeLease(lease=leases[0].id))

        assert [[0], [0]] == list(map(positions_of, leases))
        assert [1] == positions_of(await inference.exports.ask(ask_for(1)))


async def test_asker_who_leaves_loses_nothing():
    """Cancelled while waiting, and again after stale groups were dropped: groups and counts are there for the next."""
    async with open_inference_stack(exporter=DROPPING) as inference:
        await deliver(inference, make_group(0), make_group(1, version=2))
        with anyio.move_on_after(1) as scope:
            await inference.exports.ask(ask_for(2, version=1))
        await deliver(inference, make_group(2, version=2))
        lease = await inference.exports.ask(ask_for(2, version=2))

        assert scope.cancelled_caught
        assert ([1, 2], 1) == (positions_of(lease), lease.drawn.dropped)


async def test_resumed_exporter_goes_on_from_the_position():
    """Problems that were consumed before the checkpoint are refused, those that were pending are not."""
    async with open_inference_stack(start=DataPosition(next=4, pending=(1,))) as inference:
        accepted = await deliver(inference, *map(make_group, (0, 1, 3, 4)))
        lease = await inference.exports.ask(ask_for(2))

        assert [False, True, False, True] == accepted
        assert DataPosition(next=5) == await inference.exports.ask(AcknowledgeLease(lease=lease.id))


# ------------------------------------------------------------------------------------------- which are trained


async def begin(inference: InferenceStack, num: int, *, version: int = 0) -> list[int]:
    return [
        (await inference.exports.ask(BeginGroup(version=version, num_problems={"": 4}))).position for _ in range(num)
    ]


async def test_stale_group_is_run_again_where_its_problem_can_be():
    """Its place is refunded, its session forgotten, its problem given out first, and trained once."""
    requeueing = {"queue": QueueConfig(stale_groups=StaleGroups.REQUEUE)}
    async with open_inference_stack(exporter=requeueing) as inference:
        session = (await inference.open()).session
        await begin(inference, 2)
        await deliver(inference, make_group(0, session=session), make_group(1, version=2))
        lease = await inference.exports.ask(ask_for(1, version=2, max_staleness=1))
        position = await inference.exports.ask(AcknowledgeLease(lease=lease.id))
        again = await begin(inference, 2)
        (is_accepted,) = await deliver(inference, make_group(0, version=2))
        following = await inference.exports.ask(ask_for(1, version=2, max_staleness=1))

        assert ([1], 1, 0) == (positions_of(lease), lease.drawn.requeued, lease.drawn.dropped)
        assert DataPosition(next=2, pending=(0,)) == position
        assert [0, 2] == again
        assert is_accepted
        assert [0] == positions_of(following)
        assert not await is_known(inference, session)


async def test_problems_of_others_are_neither_waited_for_nor_run_again():
    """Agents that come by themselves: groups are trained as they come, whatever their age."""
    async with open_inference_stack(exporter={"are_problems_external": True}) as inference:
        await deliver(inference, make_group(0))
        lease = await inference.exports.ask(ask_for(1, version=5, max_staleness=1))

        assert ([0], None) == (positions_of(lease), lease.max_staleness)


async def test_failed_group_is_not_waited_for():
    """A step that waits for the oldest group goes on when that has nothing to train."""
    async with open_inference_stack() as inference, anyio.create_task_group() as tasks:
        leases = []

        async def lease() -> None:
            leases.append(await inference.exports.ask(ask_for(1, version=1, max_staleness=1)))

        await begin(inference, 1, version=0)
        await begin(inference, 1, version=1)
        await deliver(inference, make_group(1, version=1))
        tasks.start_soon(lease)
        await anyio.wait_all_tasks_blocked()
        assert [] == leases

        await deliver(inference, make_group(0, num_trained=0))
        await anyio.wait_all_tasks_blocked()
        assert [[1]] == list(map(positions_of, leases))


def has_even_position(group: Group) -> bool:
    return group.problem.position % 2 == 0


async def test_groups_without_signal_are_replaced_up_to_a_bound():
    """They are refused, consumed and counted; a step that was refused too many takes the next as they are."""
    replacing = {"queue": QueueConfig(max_replaced=2), "has_signal": has_even_position}
    async with open_inference_stack(exporter=replacing) as inference:
        accepted = await deliver(inference, *(make_group(position) for position in range(6)))
        lease = await inference.exports.ask(ask_for(4))
        position = await inference.exports.ask(AcknowledgeLease(lease=lease.id))
        accepted += await deliver(inference, make_group(7), make_group(8))
        following = await inference.exports.ask(ask_for(1))

        assert [True, False, True, False, True, True, False, True] == accepted
        assert [0, 2, 4, 5] == positions_of(lease)
        assert [(0.0,), (0.0,)] == [group.rewards for group in lease.drawn.replaced]
        assert DataPosition(next=6) == position
        assert ([8], 1) == (positions_of(following), len(following.drawn.replaced))


async def test_groups_that_failed_are_told_with_the_next_lease():
    """Their places are taken by others; those that a workflow rejected on purpose are told apart."""
    failed, rejected, partly = (make_group(position, num_trained=0) for position in range(3))
    failure = Episode(session=SessionId("f"), member=0, failure="boom")
    failed = evolve(failed, episodes=(failure, evolve(failure, member=1)))
    rejected = evolve(rejected, episodes=(evolve(failure, is_rejected=True),))
    partly = evolve(partly, episodes=(*failed.episodes, *rejected.episodes))
    async with open_inference_stack() as inference:
        accepted = await deliver(inference, failed, rejected, partly, make_group(3))
        lease = await inference.exports.ask(ask_for(1))
        await inference.exports.ask(AcknowledgeLease(lease=lease.id))
        await deliver(inference, make_group(4))
        following = await inference.exports.ask(ask_for(1))

        assert [False, False, False, True] == accepted
        told = [(group.num_failed, group.num_rejected, group.is_rejected) for group in lease.drawn.failed]
        assert [(2, 0, False), (1, 1, True), (3, 1, False)] == told
        assert () == following.drawn.failed == lease.drawn.replaced


async def test_lengths_of_what_was_drawn_are_told_once():
    """Trained or not: of each successful episode, since the last lease."""
    replacing = {"queue": QueueConfig(max_replaced=2), "has_signal": has_even_position}
    async with open_inference_stack(exporter=replacing) as inference:
        await deliver(
            inference, make_group(0, num_trained=5), make_group(1, num_trained=3), make_group(0, num_trained=5)
        )
        lease = await inference.exports.ask(ask_for(1))
        await inference.exports.ask(AcknowledgeLease(lease=lease.id))
        await deliver(inference, make_group(2))
        following = await inference.exports.ask(ask_for(1))

    assert (5, 3) == lease.drawn.tokens
    assert (2,) == following.drawn.tokens


async def test_draws_by_difficulty_are_kept_with_the_position():
    """The checkpoint's position says which rows were drawn, how they were solved, and what still runs."""
    pools = {"queue": QueueConfig(difficulty=DifficultyConfig(enabled=True), seed=3)}
    async with open_inference_stack(exporter=pools) as inference:
        draws = [await inference.exports.ask(BeginGroup(version=0, num_problems={"": 4})) for _ in range(3)]
        await deliver(inference, make_group(0))
        lease = await inference.exports.ask(ask_for(1, max_staleness=3))
        position = await inference.exports.ask(AcknowledgeLease(lease=lease.id))
    async with open_inference_stack(exporter=pools, start=position) as inference:
        again = [await inference.exports.ask(BeginGroup(version=1, num_problems={"": 4})) for _ in range(2)]

    assert len({draw.row for draw in draws}) == 3
    assert draws[1:] == again
    assert 1 == position.next
    assert [0.0] == [known.solve_rate for known in position.pools.problems if known.row == draws[0].row]


steps = st.lists(
    st.one_of(
        st.tuples(st.just("deliver"), st.integers(0, 9), st.sampled_from([0, 2])),
        st.tuples(st.sampled_from(["lease", "leave", "acknowledge", "advance"])),
    ),
    max_size=40,
)


@given(program=steps)
async def test_every_accepted_group_is_trained_once_or_dropped(program: list[tuple]):
    """Random deliveries, leases, hang-ups and versions: nothing twice, nothing lost, and exact positions."""
    trained: list[int] = []
    fates: dict[int, bool] = {}
    version, lease = 0, None
    async with open_inference_stack(exporter=DROPPING) as inference:
        for name, *arguments in program:
            if name == "deliver":
                where, num_trained = arguments
                (is_accepted,) = await deliver(inference, make_group(where, version=version, num_trained=num_trained))
                assert fates.setdefault(where, is_accepted) or not is_accepted
            elif name == "acknowledge" and lease is not None:
                await inference.exports.ask(AcknowledgeLease(lease=lease.id))
                trained += positions_of(lease)
                lease = None
            elif name == "advance" and lease is None:
                version += 1
            elif name in {"lease", "leave"}:
                with anyio.move_on_after(1 if name == "lease" else 0):
                    lease = await inference.exports.ask(ask_for(2, version=version, max_staleness=1))
        fates.setdefault(19, (await deliver(inference, make_group(19, version=version)))[0])
        trained += await train_the_rest(inference, version=version)
        consumed = await inference.exports.ask(AcknowledgeLease(lease=0))
    accepted = {where for where, is_accepted in fates.items() if is_accepted}

    assert len(trained) == len(set(trained))
    assert set(trained) <= accepted
    assert version > 1 or set(trained) == accepted
    assert [where for where in range(30) if where not in fates] == list(
        islice(positions_from(SourcePosition(next=consumed.next, pending=consumed.pending)), 30 - len(fates))
    )


async def train_the_rest(inference: InferenceStack, *, version: int) -> list[int]:
    """Lease and acknowledge group by group, until nothing is lent any more; returns their positions."""
    found: list[int] = []
    with anyio.move_on_after(1):
        while True:
            lease = await inference.exports.ask(ask_for(1, version=version, max_staleness=1))
            await inference.exports.ask(AcknowledgeLease(lease=lease.id))
            found += positions_of(lease)
    return found
