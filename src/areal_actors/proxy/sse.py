"""Encoding of server-sent events, and the headers of a response that carries them."""

from __future__ import annotations

from typing import Any

from areal_actors.lib.exact_json import dump_json

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: clients skip it, and intermediate proxies see that the connection is alive."""

SSE_HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would buffer events
)


_SEPARATORS = {text.encode(): f"\\u{ord(text):04x}".encode() for text in "\u0085\u2028\u2029"}
"""Characters at which clients that read lines as httpx does would split an event, and their JSON escapes."""


def format_event(payload: Any) -> bytes:
    """Return one event without a name. Its payload is a single line under every client's definition of a line."""
    return b"data: " + _format_line(payload) + b"\n\n"


def format_named_event(name: str, payload: Any) -> bytes:
    """Return one event with a name, which the SDKs of some vendors read before the payload."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _format_line(payload))


def _format_line(payload: Any) -> bytes:
    line = dump_json(payload)
    if not line.isascii():
        for separator, escaped in _SEPARATORS.items():
            line = line.replace(separator, escaped)
    return line
