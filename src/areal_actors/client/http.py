"""HTTP clients for agents and for internal use: their connections, retries, and errors from error responses.

*Connections.* httpx keeps its connections in one list and, for every request that begins or ends, checks with two
system calls each whether they are still alive. With the hundred connections of a batch of episodes, most of the time of
a rollout was spent there. In ``Stack``, every connection is an httpx transport limited to one connection, and a request
takes the most recently used one from a stack; httpx still implements HTTP. ``httpx2``, the successor that newer SDKs
use, has the same classes and the same list; this module supports both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import cache, cached_property, partial
from importlib import import_module, metadata
from random import Random
from types import ModuleType
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

__all__ = [
    "RetryPolicy",
    "Stack",
    "create_agent_http_client",
    "create_http_client",
    "create_stack_transport",
    "error_of",
    "lent_client",
    "retry_after",
    "send_with_retries",
]

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


@asynccontextmanager
async def lent_client(client: httpx.AsyncClient | None) -> AsyncIterator[httpx.AsyncClient]:
    """Provide ``client``, which stays open, or a temporary one if it is ``None``."""
    if client is not None:
        yield client
        return
    async with create_http_client() as temporary:
        yield temporary


def create_agent_http_client(
    *, max_connections: int = 1000, read_timeout_seconds: float = _READ_SECONDS
) -> httpx.AsyncClient:
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
    client: httpx.AsyncClient = _create_client(library, max_connections, read_timeout_seconds)
    return client


def _create_client(library: Any, max_connections: int, read_timeout_seconds: float) -> Any:
    return library.AsyncClient(
        transport=create_stack_transport(library, max_connections=max_connections, keep_seconds=30.0),
        timeout=library.Timeout(read_timeout_seconds, connect=10.0),
        follow_redirects=True,
        trust_env=False,
    )


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


@frozen
class _Idle:
    since: float
    connection: Any


def create_stack_transport(library: ModuleType, *, max_connections: int, keep_seconds: float) -> Stack:
    """Return a transport for the clients of ``library``, which is ``httpx`` or ``httpx2``; see ``Stack``."""
    kind = _derive_class("StackTransport", Stack, library.AsyncBaseTransport)
    transport: Stack = kind(library, max_connections=max_connections, keep_seconds=keep_seconds)
    return transport


@cache
def _derive_class(name: str, own: type, base: type) -> Any:
    # Clients assert the type of a stream, and the base classes of ``httpx2`` are not those of ``httpx``.
    return type(name, (own, base), {})


class Stack:
    """A transport that sends each request over the most recently freed connection, or over a new one.

    At most ``max_connections`` are open at once; further requests wait for as long as the ``pool`` timeout of the
    request allows (``httpx.PoolTimeout``). A connection that was not used for ``keep_seconds`` is closed when another
    one becomes free; one whose request failed, was cancelled or was not read to its end is closed at once.
    """

    def __init__(self, library: Any, *, max_connections: int, keep_seconds: float) -> None:
        self._library = library
        self._places = anyio.Semaphore(max_connections)
        self._keep_seconds = keep_seconds
        self._idle: deque[_Idle] = deque()

    @cached_property
    def _verify(self) -> Any:
        """The SSL context, created once, at the first connection."""
        # Reading the system's certificates takes longer than a thousand requests on this machine. Not created earlier,
        # because the HTTP client that an agent's process gets may never be used.
        return self._library.create_ssl_context(trust_env=False)

    async def handle_async_request(self, request: Any) -> Any:
        """Send ``request``; closing the response frees the connection. Raises the library's exceptions."""
        try:
            with anyio.fail_after(request.extensions.get("timeout", {}).get("pool")):
                await self._places.acquire()
        except TimeoutError as error:
            text = "Every connection of this client is in use."
            raise self._library.PoolTimeout(text, request=request) from error
        try:
            if self._idle:
                connection = self._idle.pop().connection
            else:
                library = self._library
                limits = library.Limits(
                    max_connections=1, max_keepalive_connections=1, keepalive_expiry=self._keep_seconds
                )
                connection = library.AsyncHTTPTransport(verify=self._verify, trust_env=False, limits=limits)
        except BaseException:
            self._places.release()
            raise
        try:
            response = await connection.handle_async_request(request)
            release = partial(self._release, connection)
            body = _derive_class("Borrowed", _Borrowed, self._library.AsyncByteStream)
            response.stream = body(response.stream, release)
        except BaseException:
            await self._release(connection, is_usable=False)
            raise
        return response

    async def aclose(self) -> None:
        """Close idle connections; connections in use are closed when their responses are."""
        self._keep_seconds = -1.0
        await self._close_expired()

    async def _release(self, connection: Any, *, is_usable: bool) -> None:
        self._places.release()
        # A shield is safe here: closing a socket does not wait for its peer.
        with anyio.CancelScope(shield=True):
            if is_usable:
                self._idle.append(_Idle(anyio.current_time(), connection))
                await self._close_expired()
            else:
                await connection.aclose()

    async def _close_expired(self) -> None:
        """Close connections that have been idle for too long."""
        oldest = anyio.current_time() - self._keep_seconds
        # The least recently used connections are at the bottom of the stack.
        while self._idle and self._idle[0].since < oldest:
            await self._idle.popleft().connection.aclose()


class _Borrowed:
    """The body of a response; closing it returns its connection."""

    def __init__(self, stream: Any, give_back: Callable[..., Awaitable[None]]) -> None:
        self._stream = stream
        # An iterator instead of a generator: a reader that stops early would leave a generator to the garbage
        # collector.
        self._parts = aiter(stream)
        self._give_back = give_back
        self._is_read = False
        self._is_closed = False

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        try:
            part: bytes = await anext(self._parts)
        except StopAsyncIteration:
            self._is_read = True
            raise
        return part

    async def aclose(self) -> None:
        """Return the connection. Closing twice has no effect."""
        if self._is_closed:
            return
        self._is_closed = True
        is_closed_well = False
        try:
            await self._stream.aclose()
            is_closed_well = True
        finally:
            await self._give_back(is_usable=self._is_read and is_closed_well)
