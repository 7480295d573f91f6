"""The Starlette application: the endpoints that answer prompts in any dialect, and the table of all operations.

An endpoint parses the request, asks the sessions and formats the answer. The application holds no state of the run; it
asks actors for everything. ``actor`` serves it on a socket, and any other ASGI server can serve it as well.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from attrs import frozen
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from areal_actors.domain import AnswerStarted, Credential
from areal_actors.kernel import Ref
from areal_actors.lib.exact_json import parse_object
from areal_actors.messages import (
    Accounts,
    Capacity,
    Complete,
    CountTokens,
    Exports,
    Generation,
    Intake,
    ModelInUse,
    Models,
    Sessions,
    StreamComplete,
)
from areal_actors.proxy.access import (
    Authenticator,
    ModelSelection,
    RequestUsage,
    UserAccess,
    create_admin_key,
    read_attempt,
    read_role,
)
from areal_actors.proxy.config import ProxyConfig
from areal_actors.proxy.control import ControlEndpoints
from areal_actors.proxy.dialects import ROUTES
from areal_actors.proxy.dialects.base import AnswerStream, Dialect, TokenBytes
from areal_actors.proxy.dialects.blocks import replace_blocks
from areal_actors.proxy.dialects.client_tools import with_additional_tools, without_server_tools
from areal_actors.proxy.dialects.fields import JsonObject
from areal_actors.proxy.exchange import (
    READ,
    Exchange,
    Meter,
    Operation,
    Operations,
    Traffic,
)
from areal_actors.proxy.failures import Failure, format_anthropic_failure, format_openai_failure
from areal_actors.proxy.keys import KeysEndpoint
from areal_actors.proxy.metrics import MetricsEndpoint, ReadRun
from areal_actors.proxy.openapi import OpenAPIEndpoint, RoutesPage, create_document, describe_routes
from areal_actors.proxy.stored_responses import StoredResponses

LEFT_OUT_HEADER = b"x-areal-left-out"
"""A header of answers that lists the types of tools that were left out of the request."""
Resolve = Callable[[JsonObject, Credential], Awaitable[JsonObject]]


@frozen(kw_only=True)
class CompletionEndpoint:
    """The completion route of one dialect, and the route that counts the tokens of the same body."""

    dialect: Dialect
    sessions: Ref[Sessions]
    authenticator: Authenticator
    selection: ModelSelection
    config: ProxyConfig
    meter: Meter
    access: UserAccess
    resolve: Resolve | None = None
    """Replaces references to stored items in a body, for a dialect that has them."""

    async def __call__(self, exchange: Exchange) -> None:
        """Answer one request. If the client disconnects, the work on its behalf is cancelled, down to the engine."""
        exchange.keep_alive = self.dialect.keep_alive
        async with self._admit(exchange) as (raw, body, usage, model):
            attempt = read_attempt(exchange.headers, exchange.operation, raw)
            parsed = self.dialect.parse(body, tag=read_role(exchange))
            dialect, sessions, opened = self.dialect, self.sessions, usage.credential
            if model is not None:
                # No retry evidence: the borrowed session is opened for this request only and has no earlier attempt.
                attempt, sessions, opened = None, model.sessions, model.credential
                dialect = dialect.decoding_with(model.token_bytes)
            kind = StreamComplete if parsed.is_stream else Complete
            message = kind(credential=opened, request=parsed.request, attempt=attempt, traceparent=exchange.traceparent)
            if isinstance(message, StreamComplete):
                await self._stream(exchange, dialect.open_stream(parsed), sessions, message, usage)
                return
            answers = await sessions.ask(message)
            for answer in answers:
                usage.count(answer)
            await exchange.send_json(200, dialect.format_answers(parsed, answers))

    async def _stream(
        self,
        exchange: Exchange,
        formatter: AnswerStream,
        sessions: Ref[Sessions],
        message: StreamComplete,
        usage: RequestUsage,
    ) -> None:
        """Send events as items arrive.

        The status is sent with the first event, so that a failure before that has its own status code.
        """
        # The events that announce an answer wait for its first token. Until then the engine can still refuse it, and
        # the JavaScript SDKs of OpenAI and Anthropic retry a status of 429 or 503, but not an error within a stream.
        announced, is_waiting = b"", True
        exchange.fail_stream = lambda failure: announced + formatter.fail(failure)
        async with sessions.stream(message) as items:
            async for item in items:
                usage.count(item)
                if isinstance(item, AnswerStarted):
                    announced += formatter.feed(item)
                elif events := formatter.feed(item):
                    if is_waiting:
                        is_waiting = False
                        self.meter.note_first_token(exchange)
                    events, announced = announced + events, b""
                    await exchange.send_events(events)
        await exchange.send_events(announced + formatter.finish(), is_last=True)

    async def count(self, exchange: Exchange, *, envelope: Mapping[str, str]) -> None:
        """Answer with the ``usage.input_tokens`` of an answer to the same body, in ``envelope``; record nothing."""
        async with self._admit(exchange, is_counted=False) as (_, body, usage, model):
            request = self.dialect.parse(body).request
            sessions = self.sessions if model is None else model.sessions
            opened = usage.credential if model is None else model.credential
            num_tokens = await sessions.ask(CountTokens(credential=opened, request=request))
            await exchange.send_json(200, {**envelope, "input_tokens": num_tokens})

    @asynccontextmanager
    async def _admit(
        self, exchange: Exchange, *, is_counted: bool = True
    ) -> AsyncIterator[tuple[bytes, JsonObject, RequestUsage, ModelInUse | None]]:
        """Serve a request in the block, which its client's leaving cuts.

        Yields the body as it was sent, its object without content and tools that the model cannot use, the usage to be
        counted, and the trained model that it names.
        """
        limits = self.config
        raw = await exchange.read_body(max_bytes=limits.max_body_bytes, timeout_seconds=limits.body_timeout_seconds)
        body: JsonObject = parse_object(raw)
        # The dialect refuses what is no flag. A count of tokens is no stream, although its body may ask for one.
        quiet_seconds = limits.keep_alive_seconds if is_counted and body.get("stream") is True else None
        async with exchange.cut_on_disconnect(quiet_seconds=quiet_seconds):
            body = with_additional_tools(replace_blocks(body, limits.unsupported_blocks))
            body, left_out = without_server_tools(body)
            if left_out:
                exchange.add_header(LEFT_OUT_HEADER, ", ".join(left_out).encode())
            credential = self.authenticator.identify(exchange, body.get("session_id"))
            if self.resolve is not None:
                body = await self.resolve(body, credential)
            async with (
                self.access.admit(credential, is_counted=is_counted) as usage,
                self.selection.select(body.get("model"), usage.credential) as model,
            ):
                yield raw, body, usage, model


# ------------------------------------------------------------------------------------ the application

_ANTHROPIC_HEADER = "anthropic-version"
"""A header that all of Anthropic's clients send."""


def create_app(
    *,
    sessions: Ref[Sessions],
    exports: Ref[Exports],
    capacity: Ref[Capacity],
    generation: Ref[Generation] | None = None,
    intake: Ref[Intake] | None = None,
    accounts: Ref[Accounts] | None = None,
    models: Ref[Models] | None = None,
    config: ProxyConfig | None = None,
    token_bytes: TokenBytes | None = None,
    model: str = "policy",
    traffic: Traffic | None = None,
    read_run: ReadRun | None = None,
) -> Starlette:
    """Create the Starlette application.

    Args:
        sessions: answers completions and takes rewards.
        exports: builds training rows.
        capacity: admits sessions.
        generation: describes the engine for ``/v1/models``.
        intake: starts sessions that are trained; without it, sessions are recorded but not trained.
        accounts: knows users and their keys; without it there are no users.
        models: lends trained models to requests that name one.
        config: settings; without an ``admin_key``, a random key is generated and not shown anywhere.
        token_bytes: converts token ids for ``logprobs`` and counts, e.g. a renderer's ``token_bytes``.
        model: the model name in answers to clients that name no model.
        traffic: tracks the requests in flight, so that the caller can drain them.
        read_run: reads numbers of the run for ``/metrics``; without it, they are left out.
    """
    config = config or ProxyConfig()
    traffic = Traffic() if traffic is None else traffic
    authenticator = Authenticator(
        admin_key=config.admin_key or create_admin_key(),
        session_urls=config.session_urls,
        open_sessions=config.open_sessions,
    )
    access = UserAccess(sessions=sessions, authenticator=authenticator, accounts=accounts)
    selection = ModelSelection(sessions=sessions, authenticator=authenticator, models=models)
    meter = Meter()
    honours_store = {"chat/completions": config.honour_store.chat, "responses": config.honour_store.responses}
    dialects = {
        route.operation: route(
            model=model,
            token_bytes=token_bytes,
            default_max_tokens=config.default_max_tokens,
            inert=config.inert_parameters,
            honours_store=honours_store.get(route.operation, True),
        )
        for route in ROUTES
    }
    shared: dict[str, Any] = {
        "sessions": sessions,
        "authenticator": authenticator,
        "config": config,
        "access": access,
        "selection": selection,
    }
    stored = StoredResponses(
        sessions=sessions, authenticator=authenticator, access=access, model=model, token_bytes=token_bytes
    )

    completions = {
        operation: CompletionEndpoint(
            dialect=dialect, meter=meter, resolve=stored.resolve if operation == "responses" else None, **shared
        )
        for operation, dialect in dialects.items()
    }

    def count(name: str, **envelope: str) -> Operation:
        return Operation(
            handle=partial(completions[name].count, envelope=envelope),
            has_session=True,
            format_failure=dialects[name].format_failure,
        )

    control = ControlEndpoints(
        **shared,
        exports=exports,
        capacity=capacity,
        generation=generation,
        intake=intake,
        traffic=traffic,
        started_at=int(time.time()),
    )
    keys = KeysEndpoint(accounts=accounts, authenticator=authenticator, config=config)
    metrics = MetricsEndpoint(
        sessions=sessions,
        capacity=capacity,
        exports=exports,
        generation=generation,
        meter=meter,
        traffic=traffic,
        authenticator=authenticator,
        accounts=accounts,
        read_run=read_run,
    )
    document = OpenAPIEndpoint(document=create_document(describe_routes(config.inert_parameters)))
    page = RoutesPage(document=document.document)
    operations = {
        **{
            name: Operation(handle=endpoint, has_session=True, format_failure=endpoint.dialect.format_failure)
            for name, endpoint in completions.items()
        },
        "responses/input_tokens": count("responses", object="response.input_tokens"),
        "responses/{id}": Operation(handle=stored.retrieve, methods=READ, has_session=True),
        "messages/count_tokens": count("messages"),
        "grant_capacity": Operation(handle=control.grant_capacity),
        "export_trajectories": Operation(handle=control.export_trajectories, has_session=True),
        "rl/start_session": Operation(handle=control.start_session, methods=("POST", "GET")),
        "rl/set_reward": Operation(handle=control.set_reward, has_session=True),
        "rl/log_metrics": Operation(handle=control.log_metrics, has_session=True),
        "rl/end_session": Operation(handle=control.end_session, has_session=True),
        "rl/finalize": Operation(handle=control.finalize, has_session=True),
        "models/{id}": Operation(handle=control.retrieve_model, methods=READ, has_session=True),
        "models": Operation(handle=control.list_models, methods=READ, has_session=True),
        "health": Operation(handle=control.report_health, methods=READ, is_always_open=True),
        "livez": Operation(handle=control.report_life, methods=READ, is_always_open=True),
        "": Operation(handle=page, methods=READ, is_always_open=True),
        "docs": Operation(handle=page, methods=READ, is_always_open=True),
        "keys": Operation(handle=keys.create_or_list, methods=("POST", "GET")),
        "keys/{id}": Operation(handle=keys.revoke, methods=("DELETE",)),
        "metrics": Operation(handle=metrics, methods=READ, is_always_open=True),
        "openapi.json": Operation(handle=document, methods=READ, is_always_open=True),
    }
    routed = Operations(operations, traffic, meter, name_caller=access.name_caller if config.access_log else None)
    return Starlette(routes=[routed], exception_handlers={HTTPException: _answer_unrouted})


def _answer_unrouted(request: Request, error: Exception) -> Response:
    """Return the error body for an unknown path, in the dialect of the client that asked."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    failure = Failure(
        status=status,
        type="not_found_error",
        message=f"There is no {request.method} route of this form; docs/reference/http.md lists those that there are.",
        code="not_found",
    )
    # No dialect has been routed to, so the header or the path has to tell which vendor's client this is.
    is_anthropics = _ANTHROPIC_HEADER in request.headers or "/messages" in request.url.path
    format_failure = format_anthropic_failure if is_anthropics else format_openai_failure
    return JSONResponse(format_failure(failure), status_code=status)
