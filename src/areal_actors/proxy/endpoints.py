"""The endpoints that answer prompts in any dialect: parse the request, ask the sessions, format the answer."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from hashlib import blake2b
from time import perf_counter
from typing import Any

from attrs import evolve, frozen

from areal_actors.cache.roles import ROLE_PATTERN
from areal_actors.domain import AnswerStarted, Attempt, Credential
from areal_actors.errors import InvalidRequest
from areal_actors.kernel import Ref
from areal_actors.messages import Complete, CountTokens, Sessions, StreamComplete
from areal_actors.proxy.access import Gatekeeper, ModelSelection, RequestUsage, UserAccess, read_key
from areal_actors.proxy.config import ProxyConfig
from areal_actors.proxy.dialects.base import Dialect, Parsed
from areal_actors.proxy.dialects.blocks import replace_blocks
from areal_actors.proxy.dialects.messages.answer import MessagesDialect
from areal_actors.proxy.exchange import Exchange, Meter, parse_object
from areal_actors.proxy.sse import KEEP_ALIVE

__all__ = ["AGENT_HEADER", "CompletionEndpoint", "TokenCountEndpoint", "read_attempt"]

AGENT_HEADER = b"x-areal-agent"
"""A header that names the requesting agent of a multi-agent episode."""
Resolve = Callable[[Mapping[str, Any], Credential], Awaitable[Mapping[str, Any]]]
_RETRY_COUNT = b"x-stainless-retry-count"
_IDEMPOTENCY_KEY = b"idempotency-key"
_MAX_KEY = 255
_MAX_DIGITS = 4


@frozen(kw_only=True)
class CompletionEndpoint:
    """The completion route of one dialect."""

    dialect: Dialect[Parsed]
    sessions: Ref[Sessions]
    gatekeeper: Gatekeeper
    selection: ModelSelection
    config: ProxyConfig
    meter: Meter
    access: UserAccess
    keep_alive: bytes = KEEP_ALIVE
    resolve: Resolve | None = None
    """Replaces references to stored items in a body, for a dialect that has them."""

    async def __call__(self, exchange: Exchange) -> None:
        """Answer one request. If the client disconnects, the work on its behalf is cancelled, down to the engine."""
        raw, body, credential = await _read(exchange, self.config, self.gatekeeper)
        attempt = read_attempt(exchange.headers, exchange.operation, raw)
        if self.resolve is not None:
            body = await self.resolve(body, credential)
        parsed = self.dialect.parse(body, tag=_read_role(exchange))
        model = body.get("model")
        chosen = model if self.selection.may_select(model) else None
        if self.access.has_no_user(credential) or self.gatekeeper.is_admin(credential.key):
            await self._respond(exchange, credential, attempt, parsed, model=chosen)
        else:
            async with self.access.admit(credential) as usage:
                await self._respond(exchange, usage.credential, attempt, parsed, usage, model=chosen)

    async def _respond(
        self,
        exchange: Exchange,
        credential: Credential,
        attempt: Attempt | None,
        parsed: Parsed,
        usage: RequestUsage | None = None,
        *,
        model: str | None = None,
    ) -> None:
        """Answer with the session's policy, or with the trained model named ``model``."""
        if model is None:
            await self.serve(exchange, credential, attempt, parsed, usage)
            return
        async with AsyncExitStack() as stack:
            selected = self.selection.select(model, credential)
            chosen = await exchange.until_hang_up(lambda: stack.enter_async_context(selected))
            if chosen is None:
                await self.serve(exchange, credential, attempt, parsed, usage)
                return
            there = evolve(self, dialect=self.dialect.decoding_with(chosen.decode), sessions=chosen.sessions)
            # No retry evidence: the borrowed session is opened for this request only, so it has no earlier attempt.
            await there.serve(exchange, chosen.credential, None, parsed, usage)

    async def serve(
        self,
        exchange: Exchange,
        credential: Credential,
        attempt: Attempt | None,
        parsed: Parsed,
        usage: RequestUsage | None,
    ) -> None:
        """Have the sessions answer the parsed request, as a stream or in one document."""
        if parsed.is_stream:
            message = StreamComplete(credential=credential, request=parsed.request, attempt=attempt)
            await self._stream(exchange, message, parsed, usage)
        else:
            asked = Complete(credential=credential, request=parsed.request, attempt=attempt)
            answers = await exchange.until_hang_up(lambda: self.sessions.ask(asked))
            if usage is not None:
                usage.count_all(answers)
            await exchange.send_json(200, self.dialect.format_answers(parsed, answers))

    async def _stream(
        self, exchange: Exchange, message: StreamComplete, parsed: Parsed, usage: RequestUsage | None
    ) -> None:
        """Send events as items arrive.

        The status is sent with the first event, so that a failure before that has its own status code.
        """
        formatter = self.dialect.open_stream(parsed)
        # The events that announce an answer wait for its first token. Until then the engine can still refuse it, and
        # the JavaScript SDKs of OpenAI and Anthropic retry a status of 429 or 503, but not an error within a stream.
        announced = b""
        exchange.fail_stream = lambda failure: announced + formatter.fail(failure)
        exchange.keep_alive = self.keep_alive

        async def pump() -> None:
            nonlocal announced
            is_waiting = True
            async with self.sessions.stream(message) as items:
                async for item in items:
                    if usage is not None:
                        usage.count(item)
                    events = formatter.feed(item)
                    if isinstance(item, AnswerStarted):
                        announced += events
                        continue
                    if is_waiting:
                        is_waiting = False
                        seconds = perf_counter() - exchange.started_at
                        self.meter.first_token_seconds[exchange.operation].observe(seconds)
                    if announced or events:
                        events, announced = announced + events, b""
                        await exchange.send_events(events)

        await exchange.until_hang_up(pump, quiet_seconds=self.config.keep_alive_seconds)
        await exchange.send_events(announced + formatter.finish(), is_last=True)


async def _read(
    exchange: Exchange, config: ProxyConfig, gatekeeper: Gatekeeper
) -> tuple[bytes, Mapping[str, Any], Credential]:
    """Return the body as it was sent, its object without content that the model cannot use, and the credential."""
    raw = await exchange.read_body(max_bytes=config.max_body_bytes, timeout_seconds=config.body_timeout_seconds)
    client = exchange.headers.get(b"user-agent", b"").decode("latin-1")
    body = replace_blocks(parse_object(raw), config.unsupported_blocks.for_client(client))
    named = body.get("session_id") or exchange.query.get("session_id")
    credential = gatekeeper.credential(
        key=read_key(exchange.headers),
        in_path=exchange.session,
        in_request=named if isinstance(named, str) else None,
    )
    return raw, body, credential


def read_attempt(headers: Mapping[bytes, bytes], operation: str, body: bytes) -> Attempt | None:
    """Return the retry evidence in ``headers`` with a digest of the request, or ``None`` if there is no evidence.

    The evidence is an idempotency key and the number of earlier attempts, which the SDKs of OpenAI and Anthropic send.
    A request of a client that sends neither header is always a new request.

    The first attempt has a digest as well (about 1 µs per KiB), because its retry must be matched to it.

    Raises:
        InvalidRequest: the idempotency key is too long to be stored.
    """
    number, key = headers.get(_RETRY_COUNT, b""), headers.get(_IDEMPOTENCY_KEY, b"").strip()
    if not number and not key:
        return None
    if len(key) > _MAX_KEY:
        raise InvalidRequest(f"The Idempotency-Key has more than {_MAX_KEY} characters; shorten it.")
    digest = blake2b(operation.encode() + b"\0", digest_size=16)
    digest.update(body)
    return Attempt(
        fingerprint=digest.hexdigest(),
        number=int(number) if number.isdigit() and len(number) <= _MAX_DIGITS else 0,
        idempotency_key=key.decode("latin-1") or None,
    )


@frozen(kw_only=True)
class TokenCountEndpoint:
    """The handler of the route. The count equals the ``usage.input_tokens`` of an answer to the same body."""

    dialect: MessagesDialect
    sessions: Ref[Sessions]
    gatekeeper: Gatekeeper
    selection: ModelSelection
    config: ProxyConfig
    access: UserAccess

    async def __call__(self, exchange: Exchange) -> None:
        """Answer one request; nothing of it is recorded."""
        _, body, credential = await _read(exchange, self.config, self.gatekeeper)
        request, model = self.dialect.parse(body).request, body.get("model")
        if self.access.has_no_user(credential) or self.gatekeeper.is_admin(credential.key):
            await self._count(exchange, CountTokens(credential=credential, request=request), model)
        else:
            async with self.access.admit(credential, is_counted=False) as usage:
                await self._count(exchange, CountTokens(credential=usage.credential, request=request), model)

    async def _count(self, exchange: Exchange, message: CountTokens, model: str | None) -> None:
        num_tokens = await exchange.until_hang_up(lambda: self._ask(message, model))
        await exchange.send_json(200, {"input_tokens": num_tokens})

    async def _ask(self, message: CountTokens, model: str | None) -> int:
        if model is None or not self.selection.may_select(model):
            return await self.sessions.ask(message)
        async with self.selection.select(model, message.credential) as chosen:
            if chosen is None:
                return await self.sessions.ask(message)
            return await chosen.sessions.ask(evolve(message, credential=chosen.credential))


def _read_role(exchange: Exchange) -> str | None:
    """Return the role that the URL or the header names. Raises ``InvalidRequest`` for a URL with no valid name."""
    if exchange.role is None:
        return exchange.headers.get(AGENT_HEADER, b"").decode("latin-1") or None
    if not re.fullmatch(ROLE_PATTERN, exchange.role):
        raise InvalidRequest(f"The URL has the role {exchange.role!r}; use letters, digits, '.', '_' and '-'.")
    return exchange.role
