"""A training gang as actors: the actor of every other rank, and the object through which rank 0 leads them.

The trainer owns rank 0 and leads. Every operation is sent to the other ranks before it begins on rank 0, and has
finished when it has finished on all ranks. ``run.ranks`` decides where the processes run and starts them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import anyio
from anyio import to_thread

from areal_actors.domain import Group, Snapshot
from areal_actors.errors import ArealError, CheckpointError, GangError
from areal_actors.kernel import Actor, Context, OwnThread, Ref
from areal_actors.lib.openmp import settle_team
from areal_actors.lib.telemetry import get_logger
from areal_actors.lib.threads import ThreadHangs
from areal_actors.messages import GangMembers, GatherWeights, JoinGang, Ranks, SaveShards, TrainAlong
from areal_actors.training.gang import Gang, connect_store, open_store
from areal_actors.training.publication import Publisher
from areal_actors.training.statistics import RowRecorder, StepStatistics
from areal_actors.training.stored_checkpoints import Checkpoint
from areal_actors.training.trainer import PolicyTrainer

_log = get_logger(__name__)

R = TypeVar("R")
Asked = JoinGang | TrainAlong | GatherWeights | SaveShards

_LAST_WORDS_SECONDS = 2.0
"""How long to wait for the other ranks' errors after a step has failed on rank 0."""


class RankActor(Actor[Ranks]):
    """A rank other than rank 0: it owns a trainer and executes requests on one thread."""

    def __init__(self, policy: PolicyTrainer) -> None:
        self._policy = policy
        self._thread: OwnThread
        self.failed = anyio.Event()
        """Set when this rank can no longer be used; its process must exit so that the other ranks notice."""

    @asynccontextmanager
    async def lifespan(self, context: Context) -> AsyncIterator[None]:  # noqa: ARG002
        """Leave the gang at the end."""
        async with OwnThread.open() as self._thread:
            yield
            # The gang may be waiting for a lost rank.
            await to_thread.run_sync(self._policy.gang.abort)
            self._thread.post(self._policy.gang.close)

    @JoinGang.handler
    async def join_gang(self, message: JoinGang) -> None:
        """Join the other ranks."""

        def join() -> None:
            config = self._policy.config.gang
            store = connect_store(message.host, message.port, config)
            self._policy.expect_engine(dtype=message.engine_dtype)
            self._policy.join(Gang.form(store, rank=message.rank, config=config))

        await self._do(join)

    @TrainAlong.handler
    async def train_along(self, message: TrainAlong) -> None:
        """Compute this rank's share of a step."""
        await self._do(lambda: self._policy.train_step(message.groups, max_staleness=message.max_staleness))

    @GatherWeights.handler
    async def gather_weights(self, message: GatherWeights) -> None:
        """Contribute this rank's part of the weights or of the adapter."""
        await self._do(self._policy.adapter_tensors if message.only_adapter else self._policy.state_dict)

    @SaveShards.handler
    async def save_shards(self, message: SaveShards) -> None:
        """Write this rank's part of a checkpoint, or begin to."""
        save = self._policy.begin_save if message.is_async else self._policy.save
        await self._do(lambda: save(message.directory))

    async def _do(self, action: Callable[[], object]) -> None:
        try:
            await self._thread.run(action)
        except BaseException as error:
            if isinstance(error, CheckpointError):
                _log.error("checkpoint_failed", error=str(error))
            elif not _is_verdict(error):
                _log.error("rank_failed", error=f"{type(error).__name__}: {error}")
                self.failed.set()
                raise


class GangPolicy:
    """The policy as the trainer uses it: every operation runs on a thread, and on all ranks if there is a gang."""

    def __init__(self, policy: PolicyTrainer, thread: OwnThread, members: GangMembers) -> None:
        self._policy = policy
        self._thread = thread
        self._members = members

    async def join(self) -> None:
        """Form the gang. Raises ``GangError`` if a rank does not come, or holds another policy."""
        if not self._members.ranks:
            return
        config, host = self._policy.config.gang, self._members.host
        store = await self._thread.run(lambda: open_store(host, config))
        wanted = [
            JoinGang(host=host, port=store.port, rank=rank, engine_dtype=self._policy.engine_dtype)
            for rank in range(1, config.num_processes)
        ]
        await self._together(wanted, lambda: self._policy.join(Gang.form(store, rank=0, config=config)))
        _log.info("gang_formed", num_processes=config.num_processes, device=str(self._policy.gang.device))

    async def train_step(
        self, groups: Sequence[Group], *, max_staleness: int | None, recorder: RowRecorder | None = None
    ) -> StepStatistics:
        """Run a step on all ranks, as ``PolicyTrainer.train_step``.

        Raises ``GangError`` if a rank was lost meanwhile.
        """
        wanted = TrainAlong(groups=tuple(groups), max_staleness=max_staleness)
        return await self._all(
            wanted, lambda: self._policy.train_step(groups, max_staleness=max_staleness, recorder=recorder)
        )

    async def publish(self, publisher: Publisher) -> Snapshot:
        """Publish the weights of all ranks, as ``Publisher.publish``."""
        wanted = GatherWeights(only_adapter=publisher.only_adapter)

        def publish() -> Snapshot:
            snapshot = publisher.publish(self._policy)
            # The thread has nothing to compute until the next batch is there, and an engine may share its cores.
            settle_team()
            return snapshot

        return await self._all(wanted, publish)

    async def save(self, directory: Path, *, counters: Mapping[str, Any], num_kept: int) -> None:
        """Save a checkpoint, of which each rank writes its part, as ``PolicyTrainer.save``."""
        await self._all(
            SaveShards(directory=directory),
            lambda: self._policy.save(directory, counters=counters, num_kept=num_kept),
        )

    async def begin_save(self, directory: Path, *, counters: Mapping[str, Any], num_kept: int) -> Future[Checkpoint]:
        """Begin to save a checkpoint, as ``PolicyTrainer.begin_save``."""
        return await self._all(
            SaveShards(directory=directory, is_async=True),
            lambda: self._policy.begin_save(directory, counters=counters, num_kept=num_kept),
        )

    async def _all(self, wanted: Asked, action: Callable[[], R]) -> R:
        try:
            return await self._together([wanted] * len(self._members.ranks), action)
        except ThreadHangs as error:
            raise GangError(
                f"The trainer {error}, and has begun no pass for {self._policy.config.step_timeout_seconds:g} s "
                "(trainer.step_timeout_seconds). Resume from the last checkpoint."
            ) from error

    async def _together(self, wanted: Sequence[Asked], action: Callable[[], R]) -> R:
        """Send each rank its request and run ``action`` on rank 0 meanwhile.

        An error that rank 0 reaches from the groups themselves is raised as it is, because the other ranks reach it as
        well.
        """
        limit = self._policy.config.step_timeout_seconds
        problems: dict[int, ArealError] = {}
        result: list[R] = []

        async def ask(ref: Ref[Ranks], message: Asked, number: int) -> None:
            try:
                await ref.ask(message)
            except ArealError as error:
                # Aborting the collectives wakes rank 0, which may be waiting for the failed rank.
                problems[number] = error
                await to_thread.run_sync(self._policy.gang.abort)

        own: Exception | None = None
        async with anyio.create_task_group() as tasks:
            for number, (ref, message) in enumerate(zip(self._members.ranks, wanted, strict=True)):
                tasks.start_soon(ask, ref, message, number)
            try:
                result.append(
                    await self._thread.run(
                        action, timeout_seconds=limit, read_progress=lambda: self._policy.progress["passes"]
                    )
                )
            except Exception as error:  # noqa: BLE001 - raised below, after the other ranks have answered
                own = error
                if not _is_verdict(error):
                    # The other ranks' errors may name the cause, but a rank that hangs must not hold this one up.
                    tasks.cancel_scope.deadline = anyio.current_time() + _LAST_WORDS_SECONDS
        if own is not None and not isinstance(own, GangError):
            raise own
        for number, problem in problems.items():
            if not isinstance(problem, GangError):
                places = self._members.whereabouts
                where = f" ({places[number]})" if number < len(places) else ""
                raise GangError(
                    f"Rank {number + 1} of the {len(self._members.ranks) + 1} processes that train together failed"
                    f"{where}: {str(problem).rstrip('.')}. Resume from the last checkpoint, with as many processes as "
                    "you like."
                ) from own
        if own is not None:
            raise own
        return result[0]


def _is_verdict(error: BaseException) -> bool:
    """Return whether every rank reaches this error by itself, from the same groups and the same sums."""
    return isinstance(error, ArealError) and not isinstance(error, GangError)
