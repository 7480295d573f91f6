"""The generation actor: sole owner of an engine, and of its pauses and weights."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from areal_actors.domain import Chunk
from areal_actors.errors import EngineError
from areal_actors.generation import Engine
from areal_actors.generation.base import HasFailure
from areal_actors.kernel import Actor, Context
from areal_actors.lib.telemetry import get_logger
from areal_actors.messages import (
    DescribeEngine,
    EngineView,
    Generate,
    Generation,
    PauseGeneration,
    PublishWeights,
    ResumeGeneration,
)

_log = get_logger(__name__)


class GenerationActor(Actor[Generation]):
    """Streams from its engine.

    The engine is opened before the actor starts and closed after it ends, by its creator.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @asynccontextmanager
    async def lifespan(self, context: Context) -> AsyncIterator[None]:
        """Crash when the engine fails for good: the run ends or its worker is replaced, instead of refusing all."""
        if isinstance(self._engine, HasFailure):
            context.tasks.start_soon(self._engine.wait_failed)
        yield

    @Generate.handler(concurrency=4096)
    async def generate(self, message: Generate) -> AsyncIterator[Chunk]:
        """Forward the engine's chunks. Leaving the stream early aborts the generation in the engine."""
        async with self._engine.generate(message.request) as chunks:
            async for chunk in chunks:
                yield chunk

    @PublishWeights.handler
    async def publish(self, message: PublishWeights) -> int:
        """Load weights between two tokens. Requests that are running wait; none is refused.

        Raises:
            EngineError: the engine serves another version after loading.
        """
        await self._engine.load(message.snapshot)
        if self._engine.version != message.snapshot.version:
            raise EngineError(
                f"Engine {self._engine.info.name} serves version {self._engine.version} after loading version "
                f"{message.snapshot.version}; its tokens could not be attributed. Check the engine's weight update."
            )
        _log.debug("weights_published", version=message.snapshot.version)
        return self._engine.version

    @PauseGeneration.handler
    async def pause(self, message: PauseGeneration) -> None:
        """Stop sampling."""
        await self._engine.pause(message.mode)

    @ResumeGeneration.handler
    async def resume(self, message: ResumeGeneration) -> None:  # noqa: ARG002
        """Continue sampling."""
        await self._engine.resume()

    @DescribeEngine.handler
    async def describe(self, message: DescribeEngine) -> EngineView:  # noqa: ARG002
        """Return the engine's info, counters and version."""
        return EngineView(info=self._engine.info, statistics=self._engine.statistics(), version=self._engine.version)
