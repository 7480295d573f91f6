"""The API formats of vendors, one row each: where a dialect is served, and how it is documented.

A dialect converts JSON objects to domain values and back (``base.Dialect``). Its row is all that the application and
the OpenAPI document know of it.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from areal_actors.proxy.dialects import completions
from areal_actors.proxy.dialects.base import BaseDialect
from areal_actors.proxy.dialects.chat import answer as chat
from areal_actors.proxy.dialects.chat.request import CHAT_FIELDS
from areal_actors.proxy.dialects.fields import FieldTable, Schema
from areal_actors.proxy.dialects.messages import answer as messages
from areal_actors.proxy.dialects.messages.request import MESSAGES_FIELDS
from areal_actors.proxy.dialects.responses import answer as responses
from areal_actors.proxy.dialects.responses.request import RESPONSES_FIELDS

__all__ = ["ROUTES", "CompletionRoute"]


@frozen(kw_only=True)
class CompletionRoute:
    """The route of a dialect. ``answer`` names the schema of its document among ``schemas``."""

    dialect: type[BaseDialect]
    operation: str
    """The end of its path, behind ``/v1``."""
    summary: str
    fields: FieldTable
    answer: str
    schemas: Mapping[str, Schema]
    error: str = "Error"


ROUTES = (
    CompletionRoute(
        dialect=chat.ChatDialect,
        operation="chat/completions",
        summary="OpenAI's chat completions; streamed as ChatCompletionChunk events",
        fields=CHAT_FIELDS,
        answer="ChatCompletion",
        schemas=chat.ANSWERS,
    ),
    CompletionRoute(
        dialect=completions.CompletionsDialect,
        operation="completions",
        summary="OpenAI's plain completions",
        fields=completions.COMPLETIONS_FIELDS,
        answer="TextCompletion",
        schemas=completions.ANSWERS,
    ),
    CompletionRoute(
        dialect=responses.ResponsesDialect,
        operation="responses",
        summary="OpenAI's Responses; streamed as its events",
        fields=RESPONSES_FIELDS,
        answer="Response",
        schemas=responses.ANSWERS,
    ),
    CompletionRoute(
        dialect=messages.MessagesDialect,
        operation="messages",
        summary="Anthropic's messages",
        fields=MESSAGES_FIELDS,
        answer="Message",
        schemas=messages.ANSWERS,
        error="AnthropicError",
    ),
)
