"""HTTP clients for agents and for internal use, and the conversion of error responses to exceptions."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module, metadata
from types import ModuleType
from typing import Any

import httpx
import orjson

from areal_actors.client.connections import create_stack_transport
from areal_actors.errors import (
    CapacityExhausted,
    Conflict,
    InvalidRequest,
    NotFound,
    PayloadTooLarge,
    QuotaExceeded,
    RequestError,
    RequestTimeout,
    SessionEnded,
    Unauthorized,
    Unavailable,
    Unprocessable,
)

__all__ = ["create_agent_http_client", "create_http_client", "error_of", "retry_after"]

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
    """Return an httpx client for requests to a proxy.

    It waits up to an hour for an answer, because requests are held, not refused, while weights are updated; it keeps
    many connections; and it ignores the environment's proxy settings, with which a server on this machine would not be
    found.
    """
    client: httpx.AsyncClient = _create_client(httpx, max_connections, read_timeout_seconds)
    return client


def create_agent_http_client(
    *, max_connections: int = 1000, read_timeout_seconds: float = _READ_SECONDS
) -> httpx.AsyncClient:
    """Return a client to pass to agents as ``http_client``, from the library that the installed SDKs accept.

    ``openai`` 3 accepts clients of ``httpx2`` and of ``httpx``, ``openai`` 2 and ``anthropic`` 0 only those of
    ``httpx``, ``anthropic`` 2 only those of ``httpx2``. The client is of ``httpx2``, which has the same methods, if
    every installed SDK requires ``httpx2``, and of ``httpx`` otherwise.
    """
    client: httpx.AsyncClient = _create_client(_agents_library(), max_connections, read_timeout_seconds)
    return client


def _create_client(library: Any, max_connections: int, read_timeout_seconds: float) -> Any:
    return library.AsyncClient(
        transport=create_stack_transport(library, max_connections=max_connections, keep_seconds=30.0),
        timeout=library.Timeout(read_timeout_seconds, connect=10.0),
        follow_redirects=True,
        trust_env=False,
    )


def _agents_library() -> ModuleType:
    """Return the HTTP library that the installed SDKs require."""
    # Read from package metadata: importing the SDKs would take a second.
    wanted = {_library_of(sdk) for sdk in ("openai", "anthropic")} - {None}
    return import_module("httpx2") if wanted == {"httpx2"} else httpx


def _library_of(sdk: str) -> str | None:
    try:
        required = metadata.requires(sdk) or []
    except metadata.PackageNotFoundError:
        return None
    return "httpx2" if any(line.startswith("httpx2") for line in required) else "httpx"


def error_of(response: httpx.Response) -> RequestError:
    """Return the exception for an error response, of the class that the server raised, if it is known."""
    body = _body_of(response)
    message = body.get("message")
    text = message if isinstance(message, str) else f"HTTP {response.status_code}: {response.text[:200]}"
    kind = _BY_STATUS.get(response.status_code, RequestError)
    if kind is CapacityExhausted:
        limited = QuotaExceeded if body.get("code") == QuotaExceeded.code else CapacityExhausted
        return limited(text, retry_after_seconds=retry_after(response) or 1.0)
    param = body.get("param")
    return kind(text, param=param if isinstance(param, str) else None)


def retry_after(response: httpx.Response) -> float | None:
    """Return the seconds that the server asks to wait, or ``None`` if it names none."""
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
