"""HTTP clients for agents and for ourselves, and the way back from an error response to an exception."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx
import orjson

from areal_actors.client.connections import StackTransport
from areal_actors.errors import (
    CapacityExhausted,
    Conflict,
    InvalidRequest,
    NotFound,
    PayloadTooLarge,
    RequestError,
    RequestTimeout,
    SessionEnded,
    Unauthorized,
    Unavailable,
    Unprocessable,
)

__all__ = ["create_http_client", "error_of", "retry_after"]

_READ_SECONDS = 3600.0
_BY_STATUS: Mapping[int, type[RequestError]] = {
    error.status: error
    for error in (
        InvalidRequest,
        Unauthorized,
        NotFound,
        RequestTimeout,
        Conflict,
        SessionEnded,
        PayloadTooLarge,
        Unprocessable,
        CapacityExhausted,
        Unavailable,
    )
}


def create_http_client(
    *, max_connections: int = 1000, read_timeout_seconds: float = _READ_SECONDS
) -> httpx.AsyncClient:
    """A client to inject into agents as ``http_client``: it suits ``openai`` 2 and 3.

    It waits an hour for an answer, because a request is held, not refused, while weights are updated; it keeps many
    connections; and it ignores proxies of the environment, which would not find a server on this machine.
    """
    return httpx.AsyncClient(
        transport=StackTransport(max_connections=max_connections, keep_seconds=30.0),
        timeout=httpx.Timeout(read_timeout_seconds, connect=10.0),
        follow_redirects=True,
        trust_env=False,
    )


def error_of(response: httpx.Response) -> RequestError:
    """The exception that an error response stands for, of the class that was raised behind it where we know it."""
    body = _body_of(response)
    message = body.get("message")
    text = message if isinstance(message, str) else f"HTTP {response.status_code}: {response.text[:200]}"
    kind = _BY_STATUS.get(response.status_code, RequestError)
    if kind is CapacityExhausted:
        return CapacityExhausted(text, retry_after_seconds=retry_after(response) or 1.0)
    param = body.get("param")
    return kind(text, param=param if isinstance(param, str) else None)


def retry_after(response: httpx.Response) -> float | None:
    """The seconds that the server asks to wait; ``None`` if it names none."""
    try:
        return max(0.0, float(response.headers["retry-after"]))
    except (KeyError, ValueError):
        return None


def _body_of(response: httpx.Response) -> Mapping[str, Any]:
    try:
        body = orjson.loads(response.content)
    except orjson.JSONDecodeError:
        return {}
    error = body.get("error") if isinstance(body, dict) else None
    return error if isinstance(error, dict) else {}
