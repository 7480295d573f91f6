"""Server-sent events: their bytes, and the response that carries them."""

from __future__ import annotations

from typing import Any

import orjson

__all__ = ["DONE", "KEEP_ALIVE", "SSE_HEADERS", "format_event", "format_named_event"]

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: clients skip it, and proxies between see that the connection lives."""

SSE_HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
)


_SEPARATORS = {text.encode(): f"\\u{ord(text):04x}".encode() for text in "\u0085\u2028\u2029"}
"""Where clients that read lines of text, as httpx gives them, would cut an event in two. JSON may have them escaped."""


def format_event(payload: Any) -> bytes:
    """One event without a name. Its payload is one line, for everybody's notion of lines."""
    return b"data: " + _format_line(payload) + b"\n\n"


def format_named_event(name: str, payload: Any) -> bytes:
    """One event with a name, which the SDKs of some vendors look at before the payload."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _format_line(payload))


def _format_line(payload: Any) -> bytes:
    line = orjson.dumps(payload)
    if not line.isascii():
        for separator, escaped in _SEPARATORS.items():
            line = line.replace(separator, escaped)
    return line
