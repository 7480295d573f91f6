"""Inference engines: prompt ids in, sampled ids out. ``import areal_actors.generation`` does not load torch."""

from __future__ import annotations

from areal_actors.domain import Chunk, EngineInfo, EngineRequest, EngineStatistics, PauseMode, Snapshot
from areal_actors.generation.base import Engine

__all__ = ["Chunk", "Engine", "EngineInfo", "EngineRequest", "EngineStatistics", "PauseMode", "Snapshot"]
