"""HTTP clients for agents and for internal use: their limits, retries, and errors from error responses.

``httpx2``, the successor that newer SDKs use, has the same classes as ``httpx``; this module supports both.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import cache
from importlib import import_module, metadata
from random import Random
from typing import Any

import anyio
import httpx
import orjson
from attrs import field, frozen
from attrs.validators import ge, gt

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
from areal_actors.lib.backoff import backoff_seconds

_READ_SECONDS = 3600.0
_MAX_IDLE = 64
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


def create_http_client() -> httpx.AsyncClient:
    """Return an httpx client for requests to a proxy.

    It waits up to an hour for an answer, because requests are held, not refused, while weights are updated; it keeps
    many connections; and it ignores the environment's proxy settings, with which a server on this machine would not be
    found.
    """
    client: httpx.AsyncClient = _create_client(httpx)
    return client


@asynccontextmanager
async def lent_client(client: httpx.AsyncClient | None) -> AsyncIterator[httpx.AsyncClient]:
    """Provide ``client``, which stays open, or a temporary one if it is ``None``."""
    if client is not None:
        yield client
        return
    async with create_http_client() as temporary:
        yield temporary


def create_agent_http_client() -> httpx.AsyncClient:
    """Return a client to pass to agents as ``http_client``, from the library that the installed SDKs accept.

    ``openai`` 3 accepts clients of ``httpx2`` and of ``httpx``, ``openai`` 2 and ``anthropic`` 0 only those of
    ``httpx``, ``anthropic`` 2 only those of ``httpx2``. The client is of ``httpx2``, which has the same methods, if
    every installed SDK requires ``httpx2``, and of ``httpx`` otherwise.
    """
    wanted = set()
    for sdk in ("openai", "anthropic"):
        # Read from package metadata: importing the SDKs would take a second.
        with suppress(metadata.PackageNotFoundError):
            is_new = any(line.startswith("httpx2") for line in metadata.requires(sdk) or [])
            wanted.add("httpx2" if is_new else "httpx")
    library = import_module("httpx2") if wanted == {"httpx2"} else httpx
    client: httpx.AsyncClient = _create_client(library)
    return client


def _create_client(library: Any) -> Any:
    return library.AsyncClient(
        # httpx looks at every idle connection whenever a request begins or ends, so few are kept.
        limits=library.Limits(max_connections=1000, max_keepalive_connections=_MAX_IDLE, keepalive_expiry=30.0),
        verify=_ssl_context(library),
        timeout=library.Timeout(_READ_SECONDS, connect=10.0),
        follow_redirects=True,
        trust_env=False,
    )


@cache
def _ssl_context(library: Any) -> Any:
    # Created once per process: reading the system's certificates takes longer than a thousand requests.
    return library.create_ssl_context(trust_env=False)


def error_of(response: httpx.Response) -> RequestError:
    """Return the exception for an error response, of the class that the server raised, if it is known."""
    try:
        document = orjson.loads(response.content)
    except orjson.JSONDecodeError:
        document = None
    found = document.get("error") if isinstance(document, dict) else None
    body = found if isinstance(found, dict) else {}
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


_WORTH_RETRYING = frozenset({408, 429, 503})
# After these errors the request has certainly not reached the server.
_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


@frozen(kw_only=True)
class RetryPolicy:
    """Exponential back-off with jitter, bounded in attempts and in time."""

    max_attempts: int = field(default=6, validator=ge(1))
    first_wait_seconds: float = field(default=0.25, validator=gt(0))
    max_wait_seconds: float = field(default=8.0, validator=gt(0))

    def wait_seconds(self, attempt: int, asked: float | None, random: Random) -> float:
        """Return the wait in seconds after failure number ``attempt`` (from 0).

        A wait that the server asks for (``asked``) takes precedence.
        """
        if asked is not None:
            # Jitter only adds here: a retry before the time that the server named would be refused again.
            return min(asked, self.max_wait_seconds) * random.uniform(1.0, 1.1)
        wait = backoff_seconds(attempt + 1, first=self.first_wait_seconds, longest=self.max_wait_seconds)
        return wait * random.uniform(0.5, 1.0)


async def send_with_retries(
    send: Callable[[], Awaitable[httpx.Response]],
    *,
    policy: RetryPolicy,
    random: Random,
    is_repeatable: bool,
    is_patient: bool = False,
) -> httpx.Response:
    """Send until there is an answer that another attempt would not change.

    A request that may have arrived is sent again only if it ``is_repeatable``, i.e. idempotent. A request that
    ``is_patient`` waits for capacity without a limit of attempts, each time as long as the server asks.

    Raises:
        RequestError: the answer was an error; after all attempts, if the error was worth retrying.
        Unavailable: the proxy did not answer.
    """
    attempt = 0
    while True:
        is_last = attempt + 1 >= policy.max_attempts
        asked: float | None = None
        try:
            response = await send()
        except httpx.TransportError as error:
            if is_last or not (is_repeatable or isinstance(error, _NOT_SENT)):
                raise Unavailable(f"The proxy did not answer: {type(error).__name__}: {error}") from error
        else:
            if response.is_success:
                return response
            if is_patient and response.status_code == CapacityExhausted.status:
                asked = max(retry_after(response) or 0.0, policy.first_wait_seconds)
                await anyio.sleep(asked * random.uniform(1.0, 1.1))
                continue
            should_retry = response.headers.get("x-should-retry") != "false"
            if is_last or not should_retry or response.status_code not in _WORTH_RETRYING:
                raise error_of(response)
            asked = retry_after(response)
        await anyio.sleep(policy.wait_seconds(attempt, asked, random))
        attempt += 1
