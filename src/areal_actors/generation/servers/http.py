"""HTTP functions shared by all dialects: requests, event streams, and errors that repeat the server's answer."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any

import anyio
import httpx
from attrs import define, field, frozen

from areal_actors.errors import EngineError, InvalidRequest

_CONNECT_SECONDS = 10.0
_MAX_SAID = 400
"""Maximum number of characters of an answer that an error repeats."""


@frozen
class Answer:
    """The answer of a server. ``document`` is ``None`` if the body is not JSON."""

    status: int
    text: str
    document: Any

    @property
    def is_error(self) -> bool:
        """Return whether the status is 400 or above."""
        return self.status >= httpx.codes.BAD_REQUEST

    @property
    def is_refusal(self) -> bool:
        """Return whether the request is at fault, so that every server would reject it."""
        return self.status in (httpx.codes.BAD_REQUEST, httpx.codes.UNPROCESSABLE_ENTITY)

    @property
    def said(self) -> str:
        """Return the error message in the answer, if there is one, shortened to ``_MAX_SAID`` characters."""
        found = self.document
        for name in ("error", "message", "detail"):
            if isinstance(found, Mapping) and found.get(name):
                found = found[name]
        return (found if isinstance(found, str) and found else self.text)[:_MAX_SAID]


def create_client(url: str, *, api_key: str | None, read_timeout_seconds: float) -> httpx.AsyncClient:
    """Create a client for one server."""
    return httpx.AsyncClient(
        base_url=url.rstrip("/"),
        headers={"authorization": f"Bearer {api_key}"} if api_key else {},
        timeout=httpx.Timeout(read_timeout_seconds, connect=_CONNECT_SECONDS),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        # A proxy from the environment would not find a server on this machine.
        trust_env=False,
    )


async def ask(client: httpx.AsyncClient, method: str, path: str, body: Mapping[str, Any] | None = None) -> Answer:
    """Send a request and return the complete answer, whatever its status. Raises ``EngineError`` if there is none."""
    request = client.build_request(method, path, json=body)
    request.stream = _Body(request.content)
    try:
        response = await client.send(request)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise EngineError(_unreachable(client, path, error)) from error
    return _answer(response)


def address_of(client: httpx.AsyncClient, path: str) -> str:
    """Return the URL of ``path`` for error messages."""
    return f"{str(client.base_url).rstrip('/')}/{path.lstrip('/')}"


def describe_failure(client: httpx.AsyncClient, path: str, answer: Answer) -> str:
    """Return a sentence about an unexpected answer."""
    return f"{address_of(client, path)} answered {answer.status}: {answer.said}"


async def get_document(client: httpx.AsyncClient, path: str, *, software: str) -> Mapping[str, Any]:
    """Return a JSON document. Raises ``EngineError`` if the server does not have it, so that it is not of this kind."""
    answer = await ask(client, "GET", path)
    if answer.is_error or not isinstance(answer.document, Mapping):
        raise EngineError(f"{describe_failure(client, path, answer)}; it is no {software} server of a version we know.")
    return answer.document


async def post_command(client: httpx.AsyncClient, path: str, body: Mapping[str, Any] | None = None) -> None:
    """Send a command. Raises ``EngineError`` if the server fails, or reports that the command did not succeed."""
    answer = await ask(client, "POST", path, body)
    if answer.is_error or (isinstance(answer.document, Mapping) and answer.document.get("success") is False):
        raise EngineError(describe_failure(client, path, answer))


def parse_version(text: str) -> tuple[int, ...]:
    """Return the first three numbers of a version string."""
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def as_answer(event: Mapping[str, Any]) -> Answer:
    """Return the answer that an event with an ``error`` would have been before the stream began."""
    error = event["error"]
    status = error.get("code") if isinstance(error, Mapping) else None
    return Answer(status if isinstance(status, int) else 500, json.dumps(event), event)


def failure_of(client: httpx.AsyncClient, path: str, answer: Answer) -> EngineError | InvalidRequest:
    """Return the exception for an error answer: ``InvalidRequest`` if the request is at fault, else ``EngineError``."""
    if answer.is_refusal:
        return InvalidRequest(f"The inference server refuses the request: {answer.said}")
    return EngineError(describe_failure(client, path, answer))


@asynccontextmanager
async def open_events(
    client: httpx.AsyncClient, path: str, body: Mapping[str, Any], *, headers: Mapping[str, str] | None = None
) -> AsyncIterator[AsyncIterator[Any] | Answer]:
    """Open a stream of server-sent events, and yield its JSON documents up to ``[DONE]``.

    Yields the answer instead if it is an error. Leaving the block closes the connection. Reading raises ``EngineError``
    if the stream breaks, ends without ``[DONE]``, or contains anything but JSON.
    """
    try:
        async with client.stream("POST", path, json=body, headers=headers) as response:
            if response.is_error:
                await response.aread()
                yield _answer(response)
            else:
                async with aclosing(_read_events(client, path, response)) as events:
                    yield events
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise EngineError(_unreachable(client, path, error)) from error


async def _read_events(client: httpx.AsyncClient, path: str, response: httpx.Response) -> AsyncGenerator[Any]:
    chunks, lines = response.aiter_bytes(), Lines()
    try:
        async for chunk in chunks:
            for line in lines.feed(chunk):
                kind, _, data = line.partition(b":")
                # Comments and other fields of server-sent events carry nothing that we need.
                if kind != b"data":
                    continue
                if data.strip() == b"[DONE]":
                    return
                yield json.loads(data)
    except (httpx.HTTPError, httpx.StreamError) as error:
        raise EngineError(_unreachable(client, path, error)) from error
    except ValueError as error:
        raise EngineError(f"{address_of(client, path)} streams what is not JSON: {error}") from error
    finally:
        # Reading once in a cancelled scope ends every nested generator of httpx. Closing only the outermost would leave
        # the inner ones to the garbage collector, about which trio warns.
        with anyio.CancelScope() as scope, suppress(httpx.HTTPError, httpx.StreamError):
            scope.cancel()
            async for _ in chunks:
                pass
    raise EngineError(f"{address_of(client, path)} cut its stream off.")


class _Body(httpx.AsyncByteStream):
    """A request body that is not a generator.

    httpx would leave a generator to the garbage collector if the server died while the body was being sent.
    """

    def __init__(self, content: bytes) -> None:
        self._left = [content] if content else []

    def __aiter__(self) -> AsyncIterator[bytes]:
        """Return this stream; it can be read once."""
        return self

    async def __anext__(self) -> bytes:
        """Return the whole body."""
        if not self._left:
            raise StopAsyncIteration
        return self._left.pop()


def _unreachable(client: httpx.AsyncClient, path: str, error: Exception) -> str:
    what = str(error) or type(error).__name__
    return f"{address_of(client, path)} cannot be reached: {what}"


def _answer(response: httpx.Response) -> Answer:
    try:
        document = response.json()
    except ValueError:
        document = None
    return Answer(response.status_code, response.text, document)


@define
class Lines:
    """Collects bytes and returns complete lines without their ends. An incomplete line at the end is discarded."""

    _parts: list[bytes] = field(factory=list, init=False)

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Yield the lines that ``chunk`` completes. A CR and an LF in separate chunks yield an extra empty line."""
        # Unlike str.splitlines, bytes.splitlines only splits at CR and LF.
        for part in chunk.splitlines(keepends=True):
            self._parts.append(part)
            if part.endswith((b"\n", b"\r")):
                line = b"".join(self._parts)
                self._parts.clear()
                yield line.rstrip(b"\r\n")
