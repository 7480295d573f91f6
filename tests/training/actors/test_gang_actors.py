"""The first rank of a gang leads the others: requests, errors, and waits that end.

The arithmetic of a gang is tested with real ranks in ``tests/training``, their processes in ``tests/run``.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

import anyio
import pytest

from areal_actors.errors import CheckpointError, GangError, TrainingDiverged
from areal_actors.kernel import Actor, ActorSystem, OwnThread
from areal_actors.messages import GangMembers, GatherWeights, JoinGang, Ranks, SaveShards, TrainAlong
from areal_actors.training import gang_actors
from areal_actors.training.config import TrainerConfig
from areal_actors.training.gang import Gang
from areal_actors.training.gang_actors import GangPolicy

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Real time: a virtual clock would run past the thread."""
    return str(request.param)


class Member(Actor[Ranks]):
    """A rank that remembers what it is asked, and does what it was made for."""

    def __init__(self, *, error: Exception | None = None, hangs: bool = False) -> None:
        self.asked: list[object] = []
        self._error, self._hangs = error, hangs

    @JoinGang.handler
    async def join_gang(self, message: JoinGang) -> None:
        """Remember."""
        self.asked.append(message)

    @TrainAlong.handler
    async def train_along(self, message: TrainAlong) -> None:
        """Take a step, fail, or never come back."""
        self.asked.append(message)
        if self._hangs:
            await anyio.sleep_forever()
        if self._error is not None:
            raise self._error

    @GatherWeights.handler
    async def gather_weights(self, message: GatherWeights) -> None:
        """Remember."""
        self.asked.append(message)

    @SaveShards.handler
    async def save_shards(self, message: SaveShards) -> None:
        """Remember."""
        self.asked.append(message)


@asynccontextmanager
async def led(*members: Member, step: object = "statistics", limit: float | None = None) -> AsyncIterator[GangPolicy]:
    """A policy whose step returns, raises, or calls ``step``, and its ranks."""

    def train_step(groups, *, max_staleness, recorder=None):
        if callable(step):
            step()
        if isinstance(step, Exception):
            raise step
        return step, groups, max_staleness

    policy = SimpleNamespace(
        gang=Gang.alone(),
        train_step=train_step,
        save=lambda *_, **__: None,
        state_dict=lambda: {"w": 1},
        version=7,
        config=TrainerConfig(step_timeout_seconds=limit),
        progress=Counter(),
    )
    async with ActorSystem.open() as system, OwnThread.open() as thread:
        ranks = [await system.spawn(member, name=f"rank-{number}") for number, member in enumerate(members, start=1)]
        where = tuple(f"process {number}" for number in range(len(ranks)))
        yield GangPolicy(policy, thread, GangMembers(ranks=tuple(ranks), whereabouts=where))


async def test_a_lost_rank_is_named():
    """Which one, where it ran, why, and what to do; also where the step itself only says that it lost the others."""
    for step in ("statistics", GangError("Rank 0 has lost the others.")):
        async with led(Member(), Member(error=MemoryError("no room")), step=step) as policy:
            with pytest.raises(GangError, match=r"Rank 2 of the 3 .* \(process 1\): .*MemoryError: no room\. Resume"):
                await policy.train_step([], max_staleness=None)


async def test_an_error_that_all_ranks_raise_is_raised_once():
    """A verdict on the groups is not a failure of a rank."""
    async with led(Member(), step=TrainingDiverged("nan")) as policy:
        with pytest.raises(TrainingDiverged):
            await policy.train_step([], max_staleness=None)


@pytest.mark.parametrize("error", [RuntimeError("a fault"), GangError("lost")])
async def test_a_failure_of_the_first_rank_does_not_wait_for_the_others(error, monkeypatch):
    """After a failure of the first rank alone, the others are in the middle of a step that never ends."""
    monkeypatch.setattr(gang_actors, "_LAST_WORDS_SECONDS", 0.05)
    async with led(Member(hangs=True), step=error) as policy:
        with anyio.fail_after(10), pytest.raises(type(error), match=str(error)):
            await policy.train_step([], max_staleness=None)


async def test_a_disk_that_is_full_is_no_loss_of_a_rank(tmp_path):
    """The others have written their parts when the first one fails to write."""
    async with led(Member()) as policy:

        def save(*_, **__):
            raise CheckpointError("no room")

        policy._policy.save = save
        with pytest.raises(CheckpointError):
            await policy.save(tmp_path, counters={}, num_kept=1)


async def test_a_step_that_never_returns_is_given_up():
    """With the line at which it hangs; the thread does not hold up the end of the actor."""
    is_over = threading.Event()
    try:
        with anyio.fail_after(30):
            async with led(Member(hangs=True), step=is_over.wait, limit=0.1) as policy:
                with pytest.raises(GangError, match=r"hangs in wait .* no pass for 0.1 s .*step_timeout_seconds"):
                    await policy.train_step([], max_staleness=None)
    finally:
        is_over.set()
