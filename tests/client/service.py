"""Everything but a model: a proxy on a socket, real sessions and capacity, an engine that always says the same."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from areal_actors.journal import Journal
from areal_actors.models.built_in import create_tiny_tokenizer
from areal_actors.rendering import create_renderer
from areal_actors.run.inference import Inference, InferenceConfig, open_actors
from areal_actors.testing.engines import EchoEngine


@asynccontextmanager
async def open_service(
    config: InferenceConfig | None = None, *, journal: Journal | None = None
) -> AsyncIterator[Inference]:
    """Serve until the block is left."""
    renderer = create_renderer(create_tiny_tokenizer())
    answer = [*renderer.encode("fine", is_start=False).tolist(), renderer.stop_token_ids[0]]
    engine = EchoEngine(lambda _: answer, vocab_size=renderer.vocab_size)
    opening = open_actors(config or InferenceConfig(), engine=engine, renderer=renderer, journal=journal)
    async with opening as inference:
        yield inference
