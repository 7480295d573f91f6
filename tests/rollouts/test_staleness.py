"""Staleness from end to end: at any pace, nothing older than η versions is trained, and nothing stands still.

Rollouts, capacity and exporter are the real ones; the trainer is played by the test, which leases, publishes and
acknowledges at moments of its choice. Time is virtual.
"""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.stacks.rollout_stack import Episode, RolloutStack, open_rollout_stack

from areal_actors.domain import Snapshot
from areal_actors.messages import (
    AcknowledgeLease,
    DescribeCapacity,
    Lease,
    LeaseGroups,
    PublishWeights,
    VersionAdvanced,
)
from areal_actors.rollouts.exporter import QueueConfig
from areal_actors.rollouts.runner import RolloutsConfig
from areal_actors.rollouts.staleness import CapacityLimits, StaleGroups

pytestmark = pytest.mark.anyio


async def train(rollout_stack: RolloutStack, version: int, limits: CapacityLimits) -> Lease:
    """What the trainer does in a step from ``version``, without the arithmetic."""
    wanted = LeaseGroups(num_groups=limits.batch_size, version=version, max_staleness=limits.max_staleness)
    lease = await rollout_stack.inference.exports.ask(wanted)
    await rollout_stack.inference.generation.ask(PublishWeights(snapshot=Snapshot(version=version + 1, state={})))
    await rollout_stack.inference.exports.ask(AcknowledgeLease(lease=lease.id))
    await rollout_stack.inference.capacity.tell(VersionAdvanced(version=version + 1))
    return lease


def exporting(stale_groups: StaleGroups) -> dict[str, Any]:
    return {"queue": QueueConfig(stale_groups=stale_groups)}


def open_paced(paces: list[float], limits: CapacityLimits, stale_groups: StaleGroups = StaleGroups.WAIT):
    """Agents whose episodes take, in virtual seconds, what ``paces`` says of their problem."""

    async def act(episode: Episode) -> float:
        await episode.ask("first")
        await anyio.sleep(paces[int(episode.context.task_id) % len(paces)])
        await episode.ask("second")
        return 1.0

    config = RolloutsConfig(group_size=1, is_archiving=False)
    return open_rollout_stack(act, is_producing=True, limits=limits, config=config, exporter=exporting(stale_groups))


@settings(max_examples=settings().max_examples // 4)  # each is a whole run
@given(
    paces=st.lists(st.sampled_from([0.0, 1.0, 5.0, 30.0]), min_size=1, max_size=5),
    pauses=st.lists(st.sampled_from([0.0, 2.0, 10.0]), min_size=1, max_size=5),
    limits=st.tuples(st.integers(1, 6), st.integers(1, 3), st.integers(0, 2)),
    stale_groups=st.sampled_from([StaleGroups.WAIT, StaleGroups.REQUEUE, StaleGroups.DROP]),
)
async def test_nothing_older_than_eta_is_trained(
    paces: list[float], pauses: list[float], limits: tuple, stale_groups: StaleGroups
):
    """For any pace of agents and trainer: each batch is full and fresh, and no problem is trained twice."""
    max_concurrent, batch_size, max_staleness = limits
    bounds = CapacityLimits(max_concurrent=max_concurrent, batch_size=batch_size, max_staleness=max_staleness)
    trained: list[int] = []
    async with open_paced(paces, bounds, stale_groups) as rollout_stack:
        for version in range(5):
            await anyio.sleep(pauses[version % len(pauses)])
            lease = await train(rollout_stack, version, bounds)
            trained += [group.problem.position for group in lease.groups]

            assert batch_size == len(lease.groups)
            assert all(0 <= version - group.head_version <= max_staleness for group in lease.groups)

    assert len(trained) == len(set(trained))


async def test_without_staleness_each_version_samples_exactly_its_batch():
    """η = 0 is synchronous: B groups start per version, all of its tokens are of that version, none is dropped."""
    limits = CapacityLimits(max_concurrent=8, batch_size=3, max_staleness=0)
    async with open_paced([0.0, 3.0, 20.0, 1.0], limits) as rollout_stack:
        for version in range(4):
            lease = await train(rollout_stack, version, limits)
            versions = {int(v) for group in lease.groups for v in group.episodes[0].trajectories[0].versions if v >= 0}

            assert [3 * version, 3 * version + 1, 3 * version + 2] == [g.problem.position for g in lease.groups]
            assert ({version}, 0) == (versions, lease.drawn.dropped)


async def test_slow_episode_that_got_too_old_is_dropped_and_another_takes_its_place():
    """With η = 1 a straggler of version 0 comes back at version 3: it is not trained, and capacity is whole again."""
    limits = CapacityLimits(max_concurrent=8, batch_size=1, max_staleness=1)
    async with open_paced([100.0, *[1.0] * 99], limits, StaleGroups.DROP) as rollout_stack:
        leases = [await train(rollout_stack, version, limits) for version in range(3)]
        await anyio.sleep(200)
        leases += [await train(rollout_stack, version, limits) for version in range(3, 5)]
        await anyio.sleep(200)
        view = await rollout_stack.inference.capacity.ask(DescribeCapacity())
    trained = [group.problem.position for lease in leases for group in lease.groups]

    assert 0 not in trained
    assert 1 == sum(lease.drawn.dropped for lease in leases)
    assert 5 == len(set(trained))
    assert (0, 0, 7) == (view.available, view.running, view.accepted)


async def test_problem_that_always_takes_too_long_stops_nothing():
    """Where stale groups are run again, one of them comes back for ever, and the others are trained all the same."""
    limits = CapacityLimits(max_concurrent=8, batch_size=1, max_staleness=1)
    requeued, trained = 0, []
    async with open_paced([100.0, *[30.0] * 99], limits, StaleGroups.REQUEUE) as rollout_stack:
        for version in range(12):
            lease = await train(rollout_stack, version, limits)
            requeued += lease.drawn.requeued
            trained += [group.problem.position for group in lease.groups]
    assert requeued > 1
    assert [position for position in range(1, 13) if position % 100] == sorted(trained)


async def test_step_waits_for_the_group_whose_time_has_come():
    """Under η = 1 the slow first problem is trained at version 1, and the step says how long it held others back."""
    limits = CapacityLimits(max_concurrent=8, batch_size=1, max_staleness=1)
    async with open_paced([100.0, *[1.0] * 99], limits) as rollout_stack:
        leases = [await train(rollout_stack, version, limits) for version in range(4)]

    assert [[1], [0], [2], [3]] == [[group.problem.position for group in lease.groups] for lease in leases]
    assert 0.0 == leases[0].drawn.held_seconds
    assert 90 < leases[1].drawn.held_seconds < 100


async def test_stale_groups_are_trained_where_that_is_wanted():
    """The slow first problem comes when it is done, older than η; the lease says that nothing bounds its age."""
    limits = CapacityLimits(max_concurrent=8, batch_size=1, max_staleness=1)
    async with open_paced([100.0, *[1.0] * 99], limits, StaleGroups.TRAIN) as rollout_stack:
        leases = [await train(rollout_stack, version, limits) for version in range(3)]
        await anyio.sleep(200)
        leases.append(await train(rollout_stack, 3, limits))

    assert [0, 1, 2, 3] == sorted(group.problem.position for lease in leases for group in lease.groups)
    assert ([0], None) == ([leases[3].groups[0].problem.position], leases[3].max_staleness)
    assert leases[3].groups[0].head_version == 0
