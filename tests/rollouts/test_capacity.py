"""The capacity granter: permits are leases, granted in order, never beyond the bounds, never leaked."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.errors import CapacityExhausted
from areal_actors.kernel import ActorSystem, Ref
from areal_actors.messages import (
    AcquirePermit,
    Capacity,
    ClaimPermit,
    DescribeCapacity,
    LiftStalenessLimit,
    Permit,
    ReservePermit,
    SettlePermit,
    VersionAdvanced,
)
from areal_actors.rollouts.capacity import CapacityConfig, CapacityGranter
from areal_actors.rollouts.staleness import CapacityLimits, CapacityState

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def granter(
    *, max_concurrent: int = 8, batch_size: int = 2, max_staleness: int = 0, lease_seconds: float = 1e6
) -> AsyncIterator[Ref[Capacity]]:
    limits = CapacityLimits(max_concurrent=max_concurrent, batch_size=batch_size, max_staleness=max_staleness)
    actor = CapacityGranter(CapacityState(limits=limits), config=CapacityConfig(lease_seconds=lease_seconds))
    async with ActorSystem.open() as system:
        yield await system.spawn(actor, name="capacity")


async def test_batch_is_granted_and_the_next_waits_for_new_weights() -> None:
    """With η = 0, exactly B groups start per version."""
    granted: list[Permit] = []

    async def acquire(ref: Ref[Capacity]) -> None:
        granted.append(await ref.ask(AcquirePermit(holder="test")))

    async with granter() as ref, anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(acquire, ref)
        await anyio.wait_all_tasks_blocked()
        assert [0, 0] == [permit.version for permit in granted]

        for permit in granted:
            await ref.tell(SettlePermit(permit=permit.id, is_accepted=True))
        await anyio.wait_all_tasks_blocked()
        assert 2 == len(granted)

        await ref.tell(VersionAdvanced(version=1))
        await anyio.wait_all_tasks_blocked()
        assert 1 == granted[-1].version


async def test_settling_twice_counts_once() -> None:
    """A message that is sent twice changes nothing the second time."""
    async with granter(batch_size=4) as ref:
        permit = await ref.ask(AcquirePermit(holder="test"))
        for _ in range(2):
            await ref.ask(SettlePermit(permit=permit.id, is_accepted=True))
        view = await ref.ask(DescribeCapacity())

        assert (0, 1) == (view.running, view.accepted)


async def test_unsettled_permit_is_taken_back() -> None:
    """A holder that was killed leaks no capacity: its lease expires."""
    async with granter(batch_size=1, lease_seconds=60) as ref:
        await ref.ask(AcquirePermit(holder="killed"))
        with anyio.fail_after(600):
            await ref.ask(AcquirePermit(holder="next"))


async def test_cancelled_permit_request_does_not_block_the_next() -> None:
    """Cancelling a waiting ask neither takes a permit nor holds up those behind it."""
    granted: list[str] = []

    async def acquire(ref: Ref[Capacity], name: str) -> None:
        await ref.ask(AcquirePermit(holder=name))
        granted.append(name)

    async with granter(batch_size=1) as ref, anyio.create_task_group() as tasks:
        first = await ref.ask(AcquirePermit(holder="first"))
        impatient = anyio.CancelScope()

        async def give_up() -> None:
            with impatient:
                await acquire(ref, "impatient")

        tasks.start_soon(give_up)
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(acquire, ref, "patient")
        await anyio.wait_all_tasks_blocked()
        impatient.cancel()
        await ref.tell(SettlePermit(permit=first.id, is_accepted=False))
        await anyio.wait_all_tasks_blocked()

        assert ["patient"] == granted


async def test_external_agents_reserve_and_claim_or_are_refused_at_once() -> None:
    """A reservation counts against capacity, is used by the next claim, and no request waits."""
    async with granter(batch_size=2) as ref:
        assert 1 == (await ref.ask(ReservePermit())).reserved
        await ref.ask(ClaimPermit(holder="session"))
        view = await ref.ask(DescribeCapacity())
        assert (1, 0, 1) == (view.running, view.reserved, view.available)

        await ref.ask(ClaimPermit(holder="session"))
        with pytest.raises(CapacityExhausted) as refusal:
            await ref.ask(ClaimPermit(holder="session"))

        assert refusal.value.retry_after_seconds


operations = st.lists(
    st.sampled_from(["acquire", "cancel", "accept", "reject", "advance", "claim", "yield"]), max_size=60
)


@given(program=operations, limits=st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(0, 2)))
async def test_no_interleaving_exceeds_the_bounds(program: list[str], limits: tuple[int, int, int]) -> None:
    """Random programs of askers that come, wait, give up and settle never see more permits than there is room."""
    max_concurrent, batch_size, max_staleness = limits
    held: list[Permit] = []
    scopes: list[anyio.CancelScope] = []
    version = 0

    async def acquire(ref: Ref[Capacity]) -> None:
        with anyio.CancelScope() as scope:
            scopes.append(scope)
            held.append(await ref.ask(AcquirePermit(holder="program")))

    async with (
        granter(max_concurrent=max_concurrent, batch_size=batch_size, max_staleness=max_staleness) as ref,
        anyio.create_task_group() as tasks,
    ):
        for operation in program:
            if operation == "acquire":
                tasks.start_soon(acquire, ref)
            elif operation == "cancel" and scopes:
                scopes.pop().cancel()
            elif operation in {"accept", "reject"} and held:
                await ref.tell(SettlePermit(permit=held.pop().id, is_accepted=operation == "accept"))
            elif operation == "advance":
                version += 1
                await ref.tell(VersionAdvanced(version=version))
            elif operation == "claim":
                try:
                    held.append(await ref.ask(ClaimPermit(holder="program")))
                except CapacityExhausted:
                    await checkpoint()
            else:
                await anyio.wait_all_tasks_blocked()
            num_held = len(held)  # before the view is taken: more may be granted until its reply is read
            view = await ref.ask(DescribeCapacity())

            assert view.running <= max_concurrent
            assert view.accepted + view.running <= (max_staleness + version + 1) * batch_size
            assert num_held <= view.running
        tasks.cancel_scope.cancel()


async def test_after_the_last_step_only_live_groups_are_limited() -> None:
    """Groups that no step consumes do not use up the budget of the last version."""
    async with granter(max_concurrent=3, batch_size=1) as ref:
        first = await ref.ask(ClaimPermit(holder="trained"))
        with pytest.raises(CapacityExhausted):
            await ref.ask(ClaimPermit(holder="refused"))
        await ref.ask(SettlePermit(permit=first.id, is_accepted=True))

        await ref.ask(LiftStalenessLimit())
        for _ in range(3):
            await ref.ask(ClaimPermit(holder="served"))
        with pytest.raises(CapacityExhausted):
            await ref.ask(ClaimPermit(holder="too many at once"))
