"""One HTTP request and its response, over ASGI: headers, a bounded body, JSON or events out, and hanging up.

Starlette routes requests here and no more: its request and response objects know neither a body limit that answers in
the client's dialect nor how to notice that the client has gone while an answer is being sampled.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from functools import partial
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import anyio
import orjson

from areal_actors.errors import InvalidRequest, PayloadTooLarge, RequestTimeout
from areal_actors.proxy.beside import start_beside
from areal_actors.proxy.fields import parse_json
from areal_actors.proxy.sse import KEEP_ALIVE, SSE_HEADERS
from areal_actors.telemetry import get_logger

__all__ = ["Exchange", "HungUp", "parse_object"]

_log = get_logger(__name__)

T = TypeVar("T")
Header = tuple[bytes, bytes]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_DISCARDED = 4
"""How many times the limit is read from a client whose body is too large: it answers only after it has sent."""


class HungUp(Exception):
    """The client has closed the connection: nobody reads an answer any more."""


class Exchange:
    """A request and its response. ``session`` is the one that its path names."""

    def __init__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        self.scope = scope
        self.session: str | None = scope.get("areal.session")
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.request_id = f"req_{secrets.token_hex(8)}"
        self.is_started = False
        """Whether a status has been sent, after which nothing but the body can say that something failed."""
        self.status = 0
        """The status, once it has been sent."""
        self.started_at = time.perf_counter()
        self.lifetime = anyio.CancelScope()
        """Surrounds the handling of the request. One scope serves all who may end it, because each would cost."""
        self.reason: Exception | None = None
        """Why the lifetime was ended before the handling was."""
        self.fail_stream: Callable[[Any], bytes] | None = None
        """How an open stream words a failure."""
        self.keep_alive = KEEP_ALIVE
        """What breaks the silence of an open stream."""
        self._has_unread_body = b"content-length" in self.headers or b"transfer-encoding" in self.headers
        name = self.request_id.encode()
        self._names: tuple[Header, ...] = ((b"x-request-id", name), (b"request-id", name))  # OpenAI's, Anthropic's
        self._receive = receive
        self._send = send
        self._sending: anyio.Lock | None = None
        self._num_sent = 0

    @property
    def method(self) -> str:
        """The HTTP method."""
        return str(self.scope["method"])

    @property
    def operation(self) -> str:
        """The name of what is asked for, whatever path led there."""
        return str(self.scope.get("areal.operation", ""))

    @property
    def item(self) -> str:
        """The last segment of the path: what an operation on one of many things is about."""
        return str(self.scope["path"]).rstrip("/").rpartition("/")[2]

    @property
    def query(self) -> dict[str, str]:
        """The query's parameters; of repeated ones, the last."""
        raw: bytes = self.scope["query_string"]
        return dict(parse_qsl(raw.decode("latin-1"), keep_blank_values=True)) if raw else {}

    # --------------------------------------------------------------------------------------------- the request

    async def read_json(self, *, max_bytes: int, timeout_seconds: float) -> dict[str, Any]:
        """The JSON object of the body; an empty one for an empty body. The content type is not looked at.

        Raises:
            InvalidRequest: the body is compressed, no JSON, or no object.
            PayloadTooLarge: it has more than ``max_bytes``.
            RequestTimeout: it did not arrive within ``timeout_seconds``.
            HungUp: the client left before its end.
        """
        return parse_object(await self.read_body(max_bytes=max_bytes, timeout_seconds=timeout_seconds))

    async def read_body(self, *, max_bytes: int, timeout_seconds: float) -> bytes:
        """The body as it was sent. Raises as ``read_json`` does."""
        if self.headers.get(b"content-encoding", b"identity") != b"identity":
            raise InvalidRequest("The body is compressed; send it as it is, without a content-encoding.")
        self.reason = RequestTimeout(f"The body did not arrive within {timeout_seconds:g} s.")
        self.lifetime.deadline = anyio.current_time() + timeout_seconds
        body = await self._collect_body(max_bytes)
        self.lifetime.deadline, self.reason = math.inf, None
        return body

    async def _collect_body(self, max_bytes: int) -> bytes:
        parts: list[bytes] = []
        size = 0
        while size <= _DISCARDED * max_bytes:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise HungUp
            part: bytes = message.get("body", b"")
            size += len(part)
            if size <= max_bytes:
                parts.append(part)
            else:
                parts.clear()
            if not message.get("more_body", False):
                self._has_unread_body = False
                break
        if size > max_bytes:
            raise PayloadTooLarge(f"The body has more than {max_bytes} bytes; shorten the conversation.")
        return b"".join(parts)

    async def until_hang_up(self, work: Callable[[], Awaitable[T]], *, quiet_seconds: float | None = None) -> T:
        """Do ``work``, and end the request as ``HungUp`` when the client leaves. The body must have been read.

        With ``quiet_seconds``, ``self.keep_alive`` is sent whenever nothing else was for so long.

        Raises:
            Exception: what ``work`` raises.
        """
        stop = start_beside(partial(self._watch, quiet_seconds))
        try:
            return await work()
        finally:
            stop()

    def cut(self, reason: Exception) -> None:
        """End the handling of the request, wherever it stands, for this ``reason``."""
        self.reason = reason
        self.lifetime.cancel()

    async def _watch(self, quiet_seconds: float | None) -> None:
        """Cut the request when the client has gone, or cannot be written to."""
        try:
            if quiet_seconds is None:
                await self._await_hang_up()
            else:
                await self._keep_alive(quiet_seconds)
        except Exception as error:  # noqa: BLE001 - whatever it is, the client can no longer be reached
            _log.warning("connection_lost", request=self.request_id, error=repr(error))
        self.cut(HungUp())

    async def _await_hang_up(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _keep_alive(self, quiet_seconds: float) -> None:
        """Return when the client has gone; until then, break every silence."""
        while True:
            seen = self._num_sent
            with anyio.move_on_after(quiet_seconds):
                return await self._await_hang_up()
            if self._num_sent == seen:
                await self.send_events(self.keep_alive)

    # -------------------------------------------------------------------------------------------- the response

    async def send_json(self, status: int, payload: Any, headers: Iterable[Header] = ()) -> None:
        """Answer with one JSON document; numpy arrays become lists."""
        await self.send_document(status, orjson.dumps(payload, option=orjson.OPT_SERIALIZE_NUMPY), headers)

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
        if self._has_unread_body:
            await self._send_while_discarding(status, raw, body)
        else:
            await self._send_whole(status, raw, body)

    async def _send_whole(self, status: int, headers: list[Header], body: bytes) -> None:
        self.is_started, self.status = True, status
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def _send_while_discarding(self, status: int, headers: list[Header], body: bytes) -> None:
        """Answer a client that is still sending. The server would wait for room in a queue that nobody reads."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._await_hang_up)
            await self._send_whole(status, headers, body)
            tasks.cancel_scope.cancel()

    async def start(self, status: int, headers: Iterable[Header]) -> None:
        """Begin an answer whose body comes in parts; ``headers`` are sent as they are."""
        self.is_started, self.status = True, status
        await self._send({"type": "http.response.start", "status": status, "headers": list(headers)})

    async def send_part(self, part: bytes, *, is_last: bool = False) -> None:
        """Send a part of the body that ``start`` announced."""
        await self._send({"type": "http.response.body", "body": part, "more_body": not is_last})

    async def send_events(self, events: bytes, *, is_last: bool = False) -> None:
        """Send server-sent events; the first ones start the response."""
        self._sending = self._sending or anyio.Lock(fast_acquire=True)
        async with self._sending:  # a comment may come at the same moment
            if not self.is_started:
                self.is_started, self.status = True, 200
                raw = [*SSE_HEADERS, *self._names]
                await self._send({"type": "http.response.start", "status": 200, "headers": raw})
            self._num_sent += 1
            await self._send({"type": "http.response.body", "body": events, "more_body": not is_last})


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object that ``body`` is; an empty one for an empty body. Raises ``InvalidRequest``."""
    if not body:
        return {}
    value = parse_json(body, "The body")
    if not isinstance(value, dict):
        raise InvalidRequest("The body must be a JSON object.")
    return value
