"""Engines: what turns prompt ids into sampled ids. ``import areal_actors.engines`` loads no torch."""

from __future__ import annotations

from areal_actors.engines.base import (
    Chunk,
    Engine,
    EngineInfo,
    EngineRequest,
    EngineStatistics,
    PauseMode,
    Snapshot,
)

__all__ = ["Chunk", "Engine", "EngineInfo", "EngineRequest", "EngineStatistics", "PauseMode", "Snapshot"]
