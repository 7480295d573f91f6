"""The owner of the published weights: sends them to servers by broadcast, or writes them as a directory.

It runs in the trainer's process. Each server has a separate group, so that losing one does not affect the others.
Waiting for a server happens on a thread that ends when its group is closed; files are written on one further thread.
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
    """A group, its server, and whether the server's ranks have joined."""

    server: str
    group: BroadcastGroup
    joined: anyio.Event = field(factory=anyio.Event)
    failure: EngineError | None = None

    async def wait_joined(self) -> None:
        """Wait until all ranks have joined. Raises ``EngineError`` if they will not."""
        await self.joined.wait()
        if self.failure is not None:
            raise self.failure


class WeightKeeper(Actor[Weights]):
    """Sends the weights on ``shelf``, where a publisher puts them on the trainer's thread."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._open: dict[str, _Open] = {}
        self._left: list[BroadcastGroup] = []  # closed here; leaving them may take long
        self._has_left = anyio.Event()
        self._threads = CapacityLimiter(_MANY)  # these threads wait for peers and must not exhaust the default pool
        self._tasks: BackgroundTasks
        self._disk: OwnThread

    @asynccontextmanager
    async def lifespan(self, context: Context) -> AsyncIterator[None]:
        """Close all groups at the end, without waiting for lost ones."""
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
        """Return names, dtypes and shapes."""
        return self._shelf.take(message.version).buckets

    @WriteWeights.handler(concurrency=_MANY)
    async def write(self, message: WriteWeights) -> Path:
        """Write a version to disk, one request after another, so that many requests share one directory."""
        return await self._disk.run(lambda: self._shelf.write(message.version))

    @OpenGroup.handler(concurrency=_MANY)
    async def open_group(self, message: OpenGroup) -> GroupPlace:
        """Listen for the ranks of a server; they join on a thread."""
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
        """Broadcast a bucket on a thread."""
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
        """Close a group, which ends its threads."""
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
        """Cancel the group's work, which ends shortly afterwards, and queue the group for leaving."""
        entry.group.cancel()
        if self._open.pop(entry.group.name, None) is not None:
            self._left.append(entry.group)
            self._has_left.set()

    async def _leave(self) -> None:
        """Leave closed groups, each on a thread, because their other ranks may not be done."""
        async with anyio.create_task_group() as tasks:
            while True:
                self._has_left = anyio.Event()
                while self._left:
                    tasks.start_soon(self._on_thread, self._left.pop().close)
                await self._has_left.wait()

    async def _on_thread(self, action: Callable[[], None]) -> None:
        await to_thread.run_sync(action, abandon_on_cancel=True, limiter=self._threads)
