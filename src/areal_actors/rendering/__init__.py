"""Conversion between messages and tokens: ``base`` has the protocol, ``loading`` creates a renderer."""

from __future__ import annotations

from areal_actors.domain import Delta, ReasoningDelta, TextDelta, ToolArgumentsDelta, ToolCallStarted
from areal_actors.rendering.base import HasTokenizer, Renderer, StreamParser
from areal_actors.rendering.loading import RendererConfig, create_renderer, load_renderer
from areal_actors.rendering.parsers import join_deltas
from areal_actors.rendering.renderer import TemplateRenderer
from areal_actors.rendering.tokens import LongText, deferring_long_texts

__all__ = [
    "Delta",
    "HasTokenizer",
    "LongText",
    "ReasoningDelta",
    "Renderer",
    "RendererConfig",
    "StreamParser",
    "TemplateRenderer",
    "TextDelta",
    "ToolArgumentsDelta",
    "ToolCallStarted",
    "create_renderer",
    "deferring_long_texts",
    "join_deltas",
    "load_renderer",
]
