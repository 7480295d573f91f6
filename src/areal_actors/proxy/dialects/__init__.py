"""The API formats of vendors. ``ROUTES`` is all that the application and the OpenAPI document know of them.

A dialect converts JSON objects to domain values and back (``base.Dialect``).
"""

from __future__ import annotations

from areal_actors.proxy.dialects.base import Dialect
from areal_actors.proxy.dialects.chat.answer import ChatDialect
from areal_actors.proxy.dialects.completions import CompletionsDialect
from areal_actors.proxy.dialects.messages.answer import MessagesDialect
from areal_actors.proxy.dialects.responses.answer import ResponsesDialect

__all__ = ["ROUTES", "Dialect"]

ROUTES: tuple[type[Dialect], ...] = (ChatDialect, CompletionsDialect, ResponsesDialect, MessagesDialect)
"""The dialects that are served, each under its ``operation``."""
