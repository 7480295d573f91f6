"""Who keeps the published weights and gives them to servers: broadcast to the group of each, or as a directory.

It lives in the trainer's process. Each server has a group of its own: one that is lost takes nobody along. What waits
for a server waits on a thread, which ends when its group is closed; the file is written on one other.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from uuid import uuid4

import anyio
from anyio import CapacityLimiter, to_thread
from attrs import define, field

from areal_actors.core import Actor, BackgroundTasks, Context, OwnThread
from areal_actors.errors import EngineError
from areal_actors.messages import (
    CloseGroup,
    DescribeWeights,
    GroupPlace,
    OpenGroup,
    SendBucket,
    TensorBucket,
    Weights,
    WriteWeights,
)
from areal_actors.telemetry import get_logger
from areal_actors.training.broadcast import BroadcastGroup
from areal_actors.training.shelf import Shelf

__all__ = ["WeightKeeper"]

_log = get_logger(__name__)

_MANY = 1024
_PARTING_SECONDS = 2.0


@define(eq=False)
class _Open:
    """A group, whom it is for, and whether they have come."""

    server: str
    group: BroadcastGroup
    joined: anyio.Event = field(factory=anyio.Event)
    failure: EngineError | None = None

    async def wait_joined(self) -> None:
        """Until all are there. Raises ``EngineError`` if they will not come."""
        await self.joined.wait()
        if self.failure is not None:
            raise self.failure


class WeightKeeper(Actor[Weights]):
    """Gives what lies on ``shelf``, where a publisher puts it on the trainer's thread."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._open: dict[str, _Open] = {}
        self._left: list[BroadcastGroup] = []  # closed for us, and to be left, which may take its time
        self._has_left = anyio.Event()
        self._threads = CapacityLimiter(_MANY)  # these wait for others, and must not keep the pool from those
        self._tasks: BackgroundTasks
        self._disk: OwnThread

    @asynccontextmanager
    async def lifespan(self, context: Context) -> AsyncIterator[None]:
        """Close all groups at the end, without waiting for those that are lost."""
        self._tasks = context.tasks
        context.tasks.start_soon(self._leave)
        async with OwnThread.open() as self._disk:
            try:
                yield
            finally:
                with anyio.move_on_after(_PARTING_SECONDS, shield=True):
                    async with anyio.create_task_group() as tasks:
                        for group in [*self._left, *(entry.group for entry in self._open.values())]:
                            tasks.start_soon(self._on_thread, group.close)

    @DescribeWeights.handler(concurrency=_MANY)
    async def describe(self, message: DescribeWeights) -> tuple[TensorBucket, ...]:
        """Names, dtypes and shapes."""
        return self._shelf.take(message.version).buckets

    @WriteWeights.handler(concurrency=_MANY)
    async def write(self, message: WriteWeights) -> Path:
        """One after another, so that many that ask get one directory."""
        return await self._disk.run(lambda: self._shelf.write(message.version))

    @OpenGroup.handler(concurrency=_MANY)
    async def open_group(self, message: OpenGroup) -> GroupPlace:
        """Listen; whoever comes is met on a thread."""
        for entry in [each for each in self._open.values() if each.server == message.server]:
            self._close(entry)
        opening = partial(
            BroadcastGroup.open,
            f"areal-{uuid4().hex}",
            machine=message.machine,
            device=message.device,
            source=self._shelf.device,
            num_ranks=message.num_ranks,
            timeout_seconds=message.timeout_seconds,
        )
        group = await to_thread.run_sync(opening)
        entry = self._open[group.name] = _Open(message.server, group)
        self._tasks.start_soon(self._join, entry)
        return GroupPlace(name=group.name, host=group.host, port=group.port, backend=group.backend)

    @SendBucket.handler(concurrency=_MANY)
    async def send(self, message: SendBucket) -> None:
        """Broadcast on a thread of its own."""
        entry = self._open.get(message.group)
        if entry is None:
            raise EngineError(f"There is no group {message.group}; it was closed. Open another one.")
        try:
            await entry.wait_joined()
            tensors = self._shelf.take(message.version).tensors_of(message.number)
            await self._on_thread(partial(entry.group.send, tensors))
        except BaseException:
            self._close(entry)
            raise

    @CloseGroup.handler(concurrency=_MANY)
    async def close_group(self, message: CloseGroup) -> None:
        """Have its threads end."""
        entry = self._open.get(message.group)
        if entry is not None:
            self._close(entry)

    async def _join(self, entry: _Open) -> None:
        try:
            await self._on_thread(entry.group.join)
        except EngineError as error:
            entry.failure = error
            _log.info("group_not_formed", server=entry.server, reason=str(error))
            self._close(entry)
        finally:
            entry.joined.set()

    def _close(self, entry: _Open) -> None:
        """What waits there ends in a moment."""
        entry.group.cancel()
        if self._open.pop(entry.group.name, None) is not None:
            self._left.append(entry.group)
            self._has_left.set()

    async def _leave(self) -> None:
        """Leave groups, each on a thread, because the others in it may not be done."""
        async with anyio.create_task_group() as tasks:
            while True:
                self._has_left = anyio.Event()
                while self._left:
                    tasks.start_soon(self._on_thread, self._left.pop().close)
                await self._has_left.wait()

    async def _on_thread(self, action: Callable[[], None]) -> None:
        await to_thread.run_sync(action, abandon_on_cancel=True, limiter=self._threads)
