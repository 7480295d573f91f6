"""HTTP requests from their path to the end of their answer: routed, admitted, counted, answered, cut short.

``Operations`` finds the handler of a path, ``Exchange`` is one request with its response over ASGI, ``Traffic`` knows
the requests in flight, and ``Meter`` counts. Starlette only routes requests to ``Operations``: its request object has
no body limit whose error is in the client's dialect, and notices a disconnect only when asked.
"""

from __future__ import annotations

import codecs
import math
import secrets
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, MutableMapping
from contextlib import asynccontextmanager
from functools import partial
from time import perf_counter
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import anyio
from attrs import frozen
from prometheus_client import CollectorRegistry, Counter, Histogram
from starlette.routing import BaseRoute, Match

from areal_actors.errors import InvalidRequest, PayloadTooLarge, RequestTimeout, Unavailable
from areal_actors.kernel import root_cause
from areal_actors.lib import tracing
from areal_actors.lib.exact_json import dump_json, parse_object
from areal_actors.lib.task_groups import open_tasks
from areal_actors.lib.telemetry import get_logger
from areal_actors.proxy.failures import Failure, describe_failure, format_openai_failure
from areal_actors.proxy.sse import KEEP_ALIVE, SSE_HEADERS

_log = get_logger(__name__)

Header = tuple[bytes, bytes]
ROLE_SEPARATOR = "@"
"""Separates session and role in a path; no session's id contains it."""
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Formatter = Callable[[Failure], Any]

REQUEST_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
FIRST_TOKEN_SECONDS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
_DISCARDED = 4
"""Multiple of the limit that is read of a body that is too large: most clients read a response only after sending."""
_CUT_SECONDS = 1.0
"""How long a cancelled request may take to send its client an error."""
_INFLATED = {b"gzip": 31, b"x-gzip": 31, b"deflate": 15}
"""Encodings of bodies that are accepted, with the window that tells ``zlib`` their format."""
_SERVER_ERROR = 500
READ = ("GET", "HEAD")
"""The methods of operations that change nothing."""
_STOPPING = "The proxy is stopping; ask again when it is back."


# ---------------------------------------------------------------------------------------------------------- routing


@frozen(kw_only=True)
class Operation:
    """The handler at a path, and how failures are formatted there."""

    handle: Callable[[Exchange], Awaitable[None]]
    methods: tuple[str, ...] = ("POST",)
    has_session: bool = False
    """Whether a session may precede the operation in the path."""
    is_always_open: bool = False
    """Whether the operation is served while the proxy is stopping."""
    format_failure: Formatter = format_openai_failure


class Operations(BaseRoute):
    """Every path that the proxy serves, as one Starlette route.

    ``/v1`` may be anywhere, doubled or missing, because agents join base URLs and paths in every way; a segment before
    the operation is a session. ``/chat/completions``, ``/v1/v1/chat/completions`` and ``/task-0-x/v1/chat/completions``
    all name one operation. A session cannot be called ``v1``, because session ids end in a random token.
    """

    def __init__(
        self,
        table: Mapping[str, Operation],
        traffic: Traffic,
        meter: Meter,
        *,
        name_caller: Callable[[Exchange], Awaitable[Caller]] | None = None,
    ) -> None:
        # A table instead of one regular expression per spelling: the spellings multiply, and every request would try
        # them in turn.
        self._table = table
        self._traffic = traffic
        self._meter = meter
        self._name_caller = name_caller

    def find(self, path: str) -> tuple[str, str | None] | None:
        """Return the name of the operation at ``path`` and the session before it, or ``None`` if there is no such path.

        ``{id}`` as the last or the second last part of a name matches any segment. Segments may be percent-encoded, and
        an encoded slash belongs to its segment.
        """
        segments = [segment for segment in split_path(path) if segment != "v1"]
        for session, rest in ((None, segments), (segments[0] if segments else None, segments[1:])):
            for name in (rest, [*rest[:-1], "{id}"], [*rest[:-2], "{id}", *rest[-1:]]):
                operation = self._table.get("/".join(name))
                if operation is not None and (session is None or operation.has_session):
                    return "/".join(name), session
        return None

    def methods(self, name: str) -> tuple[str, ...]:
        """Return the methods of the operation called ``name``."""
        return self._table[name].methods

    def matches(self, scope: MutableMapping[str, Any]) -> tuple[Match, dict[str, Any]]:
        """Tell Starlette whether this route serves a request."""
        if scope["type"] != "http":
            return Match.NONE, {}
        found = self.find(path_of(scope))
        if found is None:
            return Match.NONE, {}
        name, session = found
        return Match.FULL, {"areal.operation": name, "areal.session": session}

    async def handle(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Serve one request, and format any failure."""
        operation = self._table[scope["areal.operation"]]
        exchange = Exchange(scope, receive, send)
        if tracing.tracer is None or operation.is_always_open:
            await self._answer(operation, exchange)
            return
        names = ("traceparent", "tracestate")
        carrier = {name: exchange.headers.get(name.encode(), b"").decode("latin-1") for name in names}
        about = {"http.request.method": exchange.method, "http.route": exchange.operation}
        span = tracing.start_span(
            f"{exchange.method} {exchange.operation}",
            carrier,
            {**about, "areal.request": exchange.request_id},
            is_server=True,
        )
        assert span is not None
        if span.is_recording():
            exchange.traceparent = tracing.traceparent_of(span)
        try:
            await self._answer(operation, exchange)
        finally:
            if exchange.status:
                span.set_attribute("http.response.status_code", exchange.status)
            else:
                span.set_attribute("areal.hung_up", True)
            if exchange.status >= _SERVER_ERROR:
                tracing.set_error(span)
            span.end()

    async def _answer(self, operation: Operation, exchange: Exchange) -> None:
        try:
            allowed = ", ".join(operation.methods)
            if exchange.scope["method"] == "OPTIONS":
                await exchange.start(204, [(b"allow", f"{allowed}, OPTIONS".encode())])
                await exchange.send_part(b"", is_last=True)
            elif exchange.scope["method"] not in operation.methods:
                failure = Failure(
                    status=405,
                    type="invalid_request_error",
                    message=f"{exchange.scope['method']} is not allowed here; use {allowed}.",
                    code="method_not_allowed",
                    request_id=exchange.request_id,
                )
                await exchange.send_json(405, operation.format_failure(failure), [(b"allow", allowed.encode())])
            elif operation.is_always_open:
                await operation.handle(exchange)
            else:
                if self._name_caller is not None:
                    # Before the request, which may end the session.
                    exchange.caller = await self._name_caller(exchange)
                await self._traffic.serve(exchange, operation.handle)
        except ClientDisconnected:
            # Nothing was answered, so there is neither a status nor a latency to record.
            self._meter.hang_ups.labels(exchange.operation).inc()
            self._log_access(exchange, "hung_up")
            return
        except Exception as error:  # noqa: BLE001 - the outermost handler: the client gets an answer, the log the traceback
            if exchange.is_started:
                self._meter.failed_streams.labels(exchange.operation).inc()
            await exchange.fail(error, operation.format_failure)
        self._meter.note_answer(exchange.operation, exchange.status, perf_counter() - exchange.started_at)
        self._log_access(exchange, "answered")

    def _log_access(self, exchange: Exchange, outcome: str) -> None:
        if self._name_caller is not None:
            _log.info(
                "http_request",
                request=exchange.request_id,
                client=exchange.client,
                method=exchange.method,
                operation=exchange.operation,
                session=exchange.caller.session or exchange.session,
                user=exchange.caller.user,
                status=exchange.status or None,
                outcome=outcome,
                seconds=round(perf_counter() - exchange.started_at, 6),
            )


def path_of(scope: Mapping[str, Any]) -> str:
    """Return the percent-encoded path of a request, without the scheme and host of a target in absolute form."""
    path, raw = str(scope["path"]), (scope.get("raw_path") or b"").decode("latin-1")
    # What encloses the application may have changed the decoded path only.
    path = raw if raw and unquote(raw) == path else path.replace("%", "%25")
    return path if path.startswith("/") else urlsplit(path).path


def split_path(path: str) -> list[str]:
    """Return the segments of a path, decoded; doubled and trailing slashes add none."""
    return [unquote(segment) for segment in path.split("/") if segment]


# ------------------------------------------------------------------------------------------------------ one request


class ClientDisconnected(Exception):
    """The client has closed the connection, so an answer can no longer be delivered."""


@frozen(kw_only=True)
class Caller:
    """The session and the user that a request is made for, as far as they are known."""

    session: str | None = None
    user: str | None = None


class Exchange:
    """A request and its response. ``session`` is the session named in the path, or ``None``."""

    def __init__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        self.scope = scope
        named: str | None = scope.get("areal.session")
        session, _, role = (named or "").partition(ROLE_SEPARATOR)
        self.session = session or None
        """The session that the path names."""
        self.role = role or None
        """The role that the path names after the session."""
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.operation = str(scope.get("areal.operation", ""))
        """The name of the operation, independent of the path that led to it."""
        self.query = dict(parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True))
        """The query's parameters; of repeated ones, the last."""
        self.request_id = f"req_{secrets.token_hex(8)}"
        self.caller = Caller()
        """Set for the access log only."""
        self.is_started = False
        """Whether a status has been sent; after that, only the body can report a failure."""
        self.status = 0
        """The status that was sent, or 0."""
        self.started_at = time.perf_counter()
        # One scope serves the body timeout, hang-ups and ``cut``: entering a scope for each would slow every request.
        self.lifetime = anyio.CancelScope()
        """The cancel scope around the handling of the request."""
        self.traceparent: str | None = None
        """The span of the request, if it is traced (W3C)."""
        self.reason: Exception | None = None
        """The reason for which the request was cut short, or ``None``."""
        self.body_seconds = math.inf
        """How long the body may take that is being read."""
        self.fail_stream: Callable[[Any], bytes] | None = None
        """Formats a failure within an open stream."""
        self.keep_alive = KEEP_ALIVE
        """The bytes that are sent to an open stream when it has been silent for too long."""
        name = self.request_id.encode()
        self._names: tuple[Header, ...] = ((b"x-request-id", name), (b"request-id", name))  # OpenAI's, Anthropic's
        self._receive = receive
        self._send = send
        self._sending: anyio.Lock | None = None
        self._num_sent = 0
        self._is_answered = False

    @property
    def method(self) -> str:
        """The HTTP method; a ``HEAD`` is handled as a ``GET`` whose body is not sent."""
        method = str(self.scope["method"])
        return "GET" if method == "HEAD" else method

    @property
    def client(self) -> str | None:
        """The address of the client, if it has one."""
        client: tuple[str, int] | None = self.scope.get("client")
        return client[0] if client else None

    @property
    def item(self) -> str:
        """The segment of the path that names an item of a collection: in the place of ``{id}``, or the last one."""
        segments = split_path(path_of(self.scope))
        # A host serves its own routes without a table of operations, so there the operation has no ``{id}``.
        parts = self.operation.split("/")
        return segments[parts.index("{id}") - len(parts) if "{id}" in parts else -1]

    # --------------------------------------------------------------------------------------------- the request

    async def read_json(self, *, max_bytes: int, timeout_seconds: float) -> dict[str, Any]:
        """Return the JSON object in the body, or an empty one for an empty body.

        Raises:
            InvalidRequest: the body is encoded in an unknown way, not JSON, or not an object.
            PayloadTooLarge: it has more than ``max_bytes``.
            RequestTimeout: it did not arrive within ``timeout_seconds``.
            ClientDisconnected: the client disconnected before the end of the body.
        """
        return parse_object(await self.read_body(max_bytes=max_bytes, timeout_seconds=timeout_seconds))

    async def read_body(self, *, max_bytes: int, timeout_seconds: float) -> bytes:
        """Return the body, decompressed. Raises as ``read_json`` does.

        The content type is ignored: clients send JSON, which is UTF-8, under many types and under none.
        """
        raw = await self._receive_body(max_bytes=max_bytes, timeout_seconds=timeout_seconds)
        encoding = self.headers.get(b"content-encoding", b"").strip().lower()
        if encoding not in (b"", b"identity"):
            raw = _decompress(raw, encoding, max_bytes)
            # The headers describe the body that is returned, which another process may be sent.
            self.scope["headers"] = [each for each in self.scope["headers"] if each[0] != b"content-encoding"]
        return raw.removeprefix(codecs.BOM_UTF8)

    async def _receive_body(self, *, max_bytes: int, timeout_seconds: float) -> bytes:
        self.body_seconds = timeout_seconds
        self.lifetime.deadline = anyio.current_time() + timeout_seconds
        parts: list[bytes] = []
        size = 0
        while size <= _DISCARDED * max_bytes:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnected
            part: bytes = message.get("body", b"")
            size += len(part)
            if size <= max_bytes:
                parts.append(part)
            else:
                # Keep reading without storing: many clients read a response only after they have sent the whole body.
                parts.clear()
            if not message.get("more_body", False):
                break
        if size > max_bytes:
            raise _too_large(max_bytes)
        self.lifetime.deadline = self.body_seconds = math.inf
        return b"".join(parts)

    @asynccontextmanager
    async def cut_on_disconnect(self, *, quiet_seconds: float | None = None) -> AsyncIterator[None]:
        """Cut the request with ``ClientDisconnected`` if its client disconnects within the block.

        The body must have been read. With ``quiet_seconds``, ``self.keep_alive`` is sent whenever nothing else was sent
        for that long.
        """
        async with open_tasks() as tasks:
            tasks.start_soon(self._watch, quiet_seconds)
            yield
            tasks.cancel_scope.cancel()

    def cut(self, reason: Exception) -> None:
        """End the handling of the request at whatever point it has reached, for this ``reason``."""
        self.reason = reason
        self.lifetime.cancel()

    async def _watch(self, quiet_seconds: float | None) -> None:
        """Cut the request when the client has disconnected or cannot be written to. Keep silent streams alive."""
        try:
            # Most answers are not streamed, and wait without a scope of a timeout.
            if quiet_seconds is None:
                await self._await_disconnect()
            while quiet_seconds is not None:
                seen = self._num_sent
                with anyio.move_on_after(quiet_seconds):
                    await self._await_disconnect()
                    break
                if self._num_sent == seen:
                    await self.send_events(self.keep_alive)
        except Exception as error:  # noqa: BLE001 - whatever it is, the client can no longer be reached
            _log.warning("connection_lost", request=self.request_id, error=repr(error))
        # Servers report the end of the response as a disconnect as well.
        if not self._is_answered:
            self.cut(ClientDisconnected())

    async def _await_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    # -------------------------------------------------------------------------------------------- the response

    def add_header(self, name: bytes, value: bytes) -> None:
        """Add a header to the response, which has not been started."""
        self._names = (*self._names, (name, value))

    async def fail(self, error: Exception, format_failure: Formatter) -> None:
        """Report an error to the client, and one that was not foreseen to the log.

        An answer that has begun is ended by the events of a failure if it is a stream. Any other is not completed, so
        that the server closes the connection.
        """
        cause = root_cause(error)
        failure = describe_failure(cause, self.request_id)
        if failure.is_unforeseen:
            # The log truncates the session, because the whole id is a capability.
            about = {"operation": self.operation, "session": self.session}
            _log.error("request_failed", request=self.request_id, exc_info=cause, **about)
        if not self.is_started:
            headers = [(name.encode(), value.encode()) for name, value in failure.headers.items()]
            await self.send_json(failure.status, format_failure(failure), headers)
        elif self.fail_stream is not None:
            await self.send_events(self.fail_stream(failure), is_last=True)

    async def send_json(self, status: int, payload: Any, headers: Iterable[Header] = ()) -> None:
        """Answer with one JSON document; see ``dump_json``."""
        await self.send_document(status, dump_json(payload), headers)

    async def send_document(
        self, status: int, body: bytes, headers: Iterable[Header] = (), *, content_type: bytes = b"application/json"
    ) -> None:
        """Answer with bytes."""
        raw = [
            (b"content-type", content_type),
            (b"content-length", b"%d" % len(body)),
            *self._names,
            *headers,
        ]
        await self.start(status, raw)
        await self.send_part(body, is_last=True)

    async def start(self, status: int, headers: Iterable[Header]) -> None:
        """Start an answer whose body is sent in parts; ``headers`` are sent unchanged."""
        self.is_started, self.status = True, status
        await self._send({"type": "http.response.start", "status": status, "headers": list(headers)})

    async def send_part(self, part: bytes, *, is_last: bool = False) -> None:
        """Send a part of the body that ``start`` announced, unless only its head was asked for."""
        if self.scope["method"] == "HEAD":
            part = b""
        self._is_answered = is_last
        await self._send({"type": "http.response.body", "body": part, "more_body": not is_last})

    async def send_events(self, events: bytes, *, is_last: bool = False) -> None:
        """Send server-sent events; the first call starts the response."""
        # Created here, because most requests are not streamed.
        self._sending = self._sending or anyio.Lock(fast_acquire=True)
        # A keep-alive may be sent concurrently.
        async with self._sending:
            if not self.is_started:
                self.is_started, self.status = True, 200
                raw = [*SSE_HEADERS, *self._names]
                await self._send({"type": "http.response.start", "status": 200, "headers": raw})
            self._num_sent += 1
            self._is_answered = is_last
            await self._send({"type": "http.response.body", "body": events, "more_body": not is_last})


def _too_large(max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"The body has more than {max_bytes} bytes; shorten the conversation.")


def _decompress(body: bytes, encoding: bytes, max_bytes: int) -> bytes:
    if encoding not in _INFLATED:
        name = encoding.decode("latin-1")
        raise InvalidRequest(f"The content-encoding {name!r} is not supported; use gzip or deflate, or send it plain.")
    inflater = zlib.decompressobj(_INFLATED[encoding])
    try:
        # A small body may inflate to gigabytes.
        inflated = inflater.decompress(body, max_bytes + 1)
    except zlib.error as error:
        raise InvalidRequest(f"The body is not valid {encoding.decode()}: {error}.") from None
    if len(inflated) > max_bytes:
        raise _too_large(max_bytes)
    if not inflater.eof or inflater.unused_data:
        raise InvalidRequest(f"The body is not one whole {encoding.decode()} stream.")
    return inflated


# ----------------------------------------------------------------------------------------------------- all requests


class Traffic:
    """The requests that are being answered."""

    def __init__(self) -> None:
        self.is_draining = False
        self._exchanges: set[Exchange] = set()
        self._emptied: anyio.Event | None = None

    def __len__(self) -> int:
        """Return the number of requests in flight."""
        return len(self._exchanges)

    async def serve(self, exchange: Exchange, handle: Callable[[Exchange], Awaitable[None]]) -> None:
        """Handle a request in its ``lifetime`` scope, and count it meanwhile.

        Raises:
            Unavailable: the proxy is stopping, or it stopped meanwhile, which cancelled the request.
            Exception: any other reason for which the request was cut, or what ``handle`` raises.
        """
        if self.is_draining:
            raise Unavailable(_STOPPING)
        with exchange.lifetime:
            self._exchanges.add(exchange)
            try:
                await handle(exchange)
            finally:
                self._exchanges.discard(exchange)
                if self._emptied is not None and not self._exchanges:
                    self._emptied.set()
        # Only the body timeout and ``cut`` cancel this scope.
        if exchange.lifetime.cancelled_caught:
            raise exchange.reason or RequestTimeout(f"The body did not arrive within {exchange.body_seconds:g} s.")

    async def drain(self, *, seconds: float) -> None:
        """Refuse new requests, wait up to ``seconds`` for those in flight, and cancel the rest."""
        self.is_draining = True
        with anyio.move_on_after(seconds):
            await self._wait_empty()
        for exchange in self._exchanges:
            exchange.cut(Unavailable(_STOPPING))
        with anyio.move_on_after(_CUT_SECONDS):
            await self._wait_empty()

    async def _wait_empty(self) -> None:
        if self._exchanges:
            self._emptied = anyio.Event()
            await self._emptied.wait()


class Meter:
    """The counters of one application, in a registry of its own. Numbers that actors know are not counted."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        create = partial(Counter, registry=self.registry)
        observe = partial(Histogram, registry=self.registry, labelnames=("operation",))
        self.requests = create("areal_http_requests", "Requests that were answered.", ("operation", "status"))
        self.seconds = observe(
            "areal_http_request_seconds", "From the request's head to the end of its answer.", buckets=REQUEST_SECONDS
        )
        self.first_token_seconds = observe(
            "areal_http_first_token_seconds",
            "Streams: from the request's head to the first delta.",
            buckets=FIRST_TOKEN_SECONDS,
        )
        self.hang_ups = create("areal_http_hang_ups", "Requests whose client left before the answer.", ("operation",))
        self.failed_streams = create("areal_http_failed_streams", "Streams that ended in an error.", ("operation",))

    def note_first_token(self, exchange: Exchange) -> None:
        """Note that the first text of a stream is about to be sent."""
        self.first_token_seconds.labels(exchange.operation).observe(perf_counter() - exchange.started_at)

    def note_answer(self, operation: str, status: int, seconds: float) -> None:
        """Count a request that was answered, successfully or not."""
        self.requests.labels(operation, status).inc()
        self.seconds.labels(operation).observe(seconds)
