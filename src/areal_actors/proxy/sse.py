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


def format_event(payload: Any) -> bytes:
    """One event without a name. JSON has no raw line break, so that the payload is one line."""
    return b"data: " + orjson.dumps(payload) + b"\n\n"


def format_named_event(name: str, payload: Any) -> bytes:
    """One event with a name, which the SDKs of some vendors look at before the payload."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps(payload))
