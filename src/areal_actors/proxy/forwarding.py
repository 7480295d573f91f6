"""Forwarding of HTTP requests to the process that answers them: the choice of that process, and the passing on.

One way serves all: the controller of proxies on other machines (``run.forwarding``), the entry point of several
services, and models behind a URL (``areal-actors-evals``).

A request is read completely before it is sent on, as the proxy itself would do: a client that is slow or disconnects
then costs the proxy nothing, and a request that reached no proxy can be sent to another one. The answer is passed on as
it arrives, so that streams are preserved. When the client disconnects, the connection to the proxy is closed, and the
proxy aborts.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

import anyio
import httpx
from attrs import frozen
from starlette.routing import BaseRoute, Match

from areal_actors.errors import Unavailable
from areal_actors.lib.telemetry import get_logger
from areal_actors.proxy.exchange import ClientDisconnected, Exchange, Receive, Send, Traffic
from areal_actors.proxy.failures import (
    format_anthropic_failure,
    format_openai_failure,
)

_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
"""Headers that concern a single connection (RFC 9110, section 7.6.1)."""
_KEYS = frozenset({b"authorization", b"x-api-key"})
_OWN = _HOP_BY_HOP | {b"host", b"content-length", b"expect"}
_RETRY_SECONDS = 0.25


async def forward(
    exchange: Exchange,
    *,
    body: bytes,
    backends: Callable[[], Iterable[Backend]],
    client: httpx.AsyncClient,
    on_unreachable: Callable[[Backend], object] = lambda _: None,
    patience_seconds: float = 0.0,
    key: str | None = None,
) -> None:
    """Send the request to the first of ``backends()`` that accepts a connection, and pass its answer on.

    They are tried again for ``patience_seconds``. ``key``, if given, is sent instead of the client's own key.

    Raises:
        Unavailable: none of them accepts a connection, or the answer was interrupted.
    """
    query: bytes = exchange.scope["query_string"]
    path: bytes = exchange.scope["raw_path"]
    target = path + (b"?" + query if query else b"")
    headers = [(name, value) for name, value in exchange.scope["headers"] if name not in _OWN]
    if key is not None:
        headers = [(name, value) for name, value in headers if name not in _KEYS]
        headers.append((b"authorization", f"Bearer {key}".encode()))
    deadline = anyio.current_time() + patience_seconds
    while True:
        for backend in backends():
            # The raw path unchanged: httpx would decode and encode it again.
            url = httpx.URL(backend.url).copy_with(raw_path=target)
            request = client.build_request(exchange.method, url, headers=headers, content=body)
            try:
                response = await client.send(request, stream=True)
            # Only without a connection is it certain that the request was not executed, so that another proxy may be
            # tried.
            except (httpx.ConnectError, httpx.ConnectTimeout):
                on_unreachable(backend)
            except httpx.HTTPError as error:
                raise Unavailable(f"Proxy {backend.name} gave no answer ({error!r}); ask again.") from error
            else:
                await _pass_on(exchange, response, backend)
                return
        if anyio.current_time() >= deadline:
            raise Unavailable("The proxy where this request belongs cannot be reached; ask again when it is back.")
        await anyio.sleep(_RETRY_SECONDS)


async def _pass_on(exchange: Exchange, response: httpx.Response, backend: Backend) -> None:
    try:
        headers = [(name.lower(), value) for name, value in response.headers.raw if name.lower() not in _HOP_BY_HOP]
        await exchange.start(response.status_code, headers)
        async for part in response.aiter_raw():
            await exchange.send_part(part)
        await exchange.send_part(b"", is_last=True)
    except httpx.HTTPError as error:
        raise Unavailable(f"The answer of proxy {backend.name} broke off; ask again.") from error
    finally:
        # Shielded, which is safe: it only closes a socket, and does not block.
        with anyio.CancelScope(shield=True):
            await response.aclose()


@frozen
class Backend:
    """One proxy."""

    name: str
    url: str


_log = get_logger(__name__)


class EveryPath(BaseRoute):
    """A route that admits each request, serves it, and formats failures."""

    def __init__(self, traffic: Traffic | None) -> None:
        self._traffic = Traffic() if traffic is None else traffic

    @abstractmethod
    async def serve(self, exchange: Exchange) -> None:
        """Answer one request."""

    def matches(self, scope: MutableMapping[str, Any]) -> tuple[Match, dict[str, Any]]:
        """Match every HTTP request."""
        return (Match.FULL if scope["type"] == "http" else Match.NONE), {}

    async def handle(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Admit and serve one request; see ``serve``."""
        exchange = Exchange(scope, receive, send)
        try:
            await self._traffic.serve(exchange, self.serve)
        except ClientDisconnected:
            return
        except Exception as error:  # noqa: BLE001 - the outermost handler: the client gets an answer, the log the traceback
            # In the dialect of the client that asked.
            is_anthropic = b"anthropic-version" in exchange.headers or "messages" in segments_of(exchange)
            await exchange.fail(error, format_anthropic_failure if is_anthropic else format_openai_failure)


def segments_of(exchange: Exchange) -> list[str]:
    """Return the non-empty segments of the path."""
    path: str = exchange.scope["path"]
    return [segment for segment in path.split("/") if segment]
