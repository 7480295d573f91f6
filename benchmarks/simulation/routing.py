"""A router of the model's own: sessions stay with the engine that they began on, the one that had the least to do."""

from __future__ import annotations

import heapq
from collections.abc import AsyncIterator, Sequence

import anyio

from areal_actors.core import Actor, Ref
from areal_actors.domain import Chunk
from areal_actors.messages import (
    DescribeEngine,
    EngineView,
    Generate,
    Generation,
    PauseGeneration,
    PublishWeights,
    ResumeGeneration,
)

__all__ = ["PinnedRouter"]


class PinnedRouter(Actor[Generation]):
    """Passes requests on to ``engines``, and weights to all of them at once."""

    def __init__(self, engines: Sequence[Ref[Generation]]) -> None:
        self._engines = engines
        self._pins: dict[tuple[int | str, ...], int] = {}
        self._loads = [(0, index) for index in range(len(engines))]

    @Generate.handler(concurrency=1_000_000)
    async def generate(self, message: Generate) -> AsyncIterator[Chunk]:
        """By the engine of its conversation."""
        engine = self._engines[self._pin(message.request.key.path[:-3])]
        async with engine.stream(message, buffer_size=0) as chunks:
            async for chunk in chunks:
                yield chunk

    def _pin(self, conversation: tuple[int | str, ...]) -> int:
        if conversation not in self._pins:
            num, index = self._loads[0]
            heapq.heapreplace(self._loads, (num + 1, index))
            self._pins[conversation] = index
        return self._pins[conversation]

    # Requests must not wait for the slowest of a thousand loads: what takes long is not handled in turn.

    @PublishWeights.handler(concurrency=2)
    async def publish(self, message: PublishWeights) -> int:
        """To all at once."""
        await self._ask_each(message)
        return message.snapshot.version

    @PauseGeneration.handler(concurrency=2)
    async def pause(self, message: PauseGeneration) -> None:
        """All of them."""
        await self._ask_each(message)

    @ResumeGeneration.handler(concurrency=2)
    async def resume(self, message: ResumeGeneration) -> None:
        """All of them."""
        await self._ask_each(message)

    @DescribeEngine.handler
    async def describe(self, message: DescribeEngine) -> EngineView:
        """They are all alike."""
        return await self._engines[0].ask(message)

    async def _ask_each(self, message: PublishWeights | PauseGeneration | ResumeGeneration) -> None:
        async with anyio.create_task_group() as tasks:
            for engine in self._engines:
                tasks.start_soon(engine.ask, message)
