"""Conversion between messages and tokens: ``loading`` creates a ``Renderer``."""

from __future__ import annotations

from areal_actors.domain import Delta, ReasoningDelta, TextDelta, ToolArgumentsDelta, ToolCallStarted
from areal_actors.rendering.loading import RendererConfig, create_renderer, load_renderer
from areal_actors.rendering.parsers import AnswerStream, join_deltas
from areal_actors.rendering.renderer import Renderer
from areal_actors.rendering.tokens import LongText, deferring_long_texts

__all__ = [
    "AnswerStream",
    "Delta",
    "LongText",
    "ReasoningDelta",
    "Renderer",
    "RendererConfig",
    "TextDelta",
    "ToolArgumentsDelta",
    "ToolCallStarted",
    "create_renderer",
    "deferring_long_texts",
    "join_deltas",
    "load_renderer",
]
