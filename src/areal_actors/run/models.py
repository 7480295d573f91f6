"""Opening a model by itself: an engine, and the actors that answer for it, without training, capacity or a socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from anyio import to_thread
from attrs import field, frozen

from areal_actors.actors.generation import GenerationActor
from areal_actors.actors.models import ModelStack
from areal_actors.actors.sessions import SessionManager, SessionsConfig
from areal_actors.core import ActorSystem
from areal_actors.domain import TrainedModel
from areal_actors.engines import Engine
from areal_actors.engines.torch.config import TorchEngineConfig
from areal_actors.models import resolve_model
from areal_actors.rendering import HasTokenizer, Renderer, RendererConfig, load_renderer

__all__ = ["ModelOpener", "open_engine"]


@asynccontextmanager
async def open_engine(
    config: TorchEngineConfig, *, model: Any, renderer: Renderer, version: int = 0
) -> AsyncIterator[Engine]:
    """The embedded engine for ``model``: a transformers model (shared with nobody) or its directory."""
    from areal_actors.engines.torch import TorchEngine

    tokenizer = renderer.tokenizer if isinstance(renderer, HasTokenizer) else None
    async with TorchEngine.open(
        config, model=model, decode=renderer.decode, tokenizer=tokenizer, version=version
    ) as engine:
        yield engine


@frozen(kw_only=True)
class ModelOpener:
    """Opens trained models, each in a system of its own, all with the same settings."""

    engine: TorchEngineConfig = field(factory=TorchEngineConfig)
    renderer: RendererConfig = field(factory=RendererConfig)
    sessions: SessionsConfig = field(factory=SessionsConfig)
    seed: int = 0

    @asynccontextmanager
    async def __call__(self, model: TrainedModel) -> AsyncIterator[ModelStack]:
        """Open ``model`` for the length of a block. Files are read in threads.

        Raises ``ModelError`` for a model that cannot be read.
        """
        renderer = await to_thread.run_sync(self._load, model.path)
        version = model.step or 0
        async with (
            open_engine(self.engine, model=model.path, renderer=renderer, version=version) as engine,
            ActorSystem.open(name=model.name) as system,
        ):
            generation = await system.spawn(GenerationActor(engine), name="generation")
            manager = SessionManager(renderer=renderer, generation=generation, config=self.sessions, seed=self.seed)
            yield ModelStack(sessions=await system.spawn(manager, name="sessions"), decode=renderer.decode)

    def _load(self, path: Path) -> Renderer:
        return load_renderer(resolve_model(str(path)).path, config=self.renderer)
