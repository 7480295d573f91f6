"""The Starlette application: its operations and their handlers.

The application holds no state of the run; it asks actors for everything. ``actor`` serves it on a socket, and any other
ASGI server can serve it as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from areal_actors.kernel import Ref
from areal_actors.messages import Accounts, Capacity, Exports, Generation, Intake, Models, Sessions
from areal_actors.proxy.access import Gatekeeper, ModelSelection, UserAccess, create_admin_key
from areal_actors.proxy.config import ProxyConfig
from areal_actors.proxy.control import ControlEndpoints
from areal_actors.proxy.dialects.chat.answer import ChatDialect
from areal_actors.proxy.dialects.completions import CompletionsDialect
from areal_actors.proxy.dialects.messages.answer import PING, MessagesDialect
from areal_actors.proxy.dialects.responses.answer import ResponsesDialect
from areal_actors.proxy.endpoints import CompletionEndpoint, TokenCountEndpoint
from areal_actors.proxy.exchange import Meter, Operation, Operations, Traffic
from areal_actors.proxy.failures import Failure, format_anthropic_failure, format_openai_failure
from areal_actors.proxy.keys import KeysEndpoint
from areal_actors.proxy.metrics import MetricsEndpoint
from areal_actors.proxy.openapi import OpenAPIEndpoint, create_document, describe_routes
from areal_actors.proxy.stored_responses import StoredResponses

__all__ = ["create_app"]

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
    decode: Callable[[Sequence[int]], str] | None = None,
    model: str = "policy",
    traffic: Traffic | None = None,
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
        decode: converts token ids to text for ``logprobs``, e.g. a renderer's ``decode``.
        model: the model name in answers to clients that name no model.
        traffic: tracks the requests in flight, so that the caller can drain them.
    """
    config = config or ProxyConfig()
    traffic = Traffic() if traffic is None else traffic
    gatekeeper = Gatekeeper(admin_key=config.admin_key or create_admin_key(), session_urls=config.session_urls)
    access = UserAccess(sessions=sessions, accounts=accounts)
    selection = ModelSelection(sessions=sessions, gatekeeper=gatekeeper, models=models)
    meter = Meter()
    limit, inert, honour_store = config.default_max_tokens, config.inert_parameters, config.honour_store
    chat = ChatDialect(
        model=model,
        decode=decode,
        default_max_tokens=limit,
        inert=inert,
        honours_store=honour_store.chat,
    )
    responses = ResponsesDialect(
        model=model,
        decode=decode,
        default_max_tokens=limit,
        inert=inert,
        honours_store=honour_store.responses,
    )
    messages = MessagesDialect(model=model, default_max_tokens=limit, inert=inert)
    shared: dict[str, Any] = {
        "sessions": sessions,
        "gatekeeper": gatekeeper,
        "config": config,
        "access": access,
        "selection": selection,
    }
    count = TokenCountEndpoint(dialect=messages, **shared)

    def complete(dialect: Any, **more: Any) -> Operation:
        endpoint = CompletionEndpoint(dialect=dialect, meter=meter, **shared, **more)
        return Operation(handle=endpoint, has_session=True, format_failure=dialect.format_failure)

    control = ControlEndpoints(
        **shared,
        exports=exports,
        capacity=capacity,
        generation=generation,
        intake=intake,
        traffic=traffic,
        started_at=int(time.time()),
    )
    stored = StoredResponses(sessions=sessions, gatekeeper=gatekeeper, access=access, model=model)
    keys = KeysEndpoint(accounts=accounts, gatekeeper=gatekeeper, config=config)
    metrics = MetricsEndpoint(
        sessions=sessions, capacity=capacity, exports=exports, generation=generation, meter=meter, traffic=traffic
    )
    document = OpenAPIEndpoint(document=create_document(describe_routes(inert)))
    operations = {
        "chat/completions": complete(chat),
        "completions": complete(CompletionsDialect(model=model, decode=decode, inert=inert)),
        "responses": complete(responses, resolve=stored.resolve),
        "responses/{id}": Operation(handle=stored.retrieve_or_delete, methods=("GET", "DELETE"), has_session=True),
        "responses/{id}/input_items": Operation(handle=stored.list_input_items, methods=("GET",), has_session=True),
        "messages": complete(messages, keep_alive=PING),
        "messages/count_tokens": Operation(handle=count, has_session=True, format_failure=messages.format_failure),
        "grant_capacity": Operation(handle=control.grant_capacity),
        "export_trajectories": Operation(handle=control.export_trajectories, has_session=True),
        "rl/start_session": Operation(handle=control.start_session, methods=("POST", "GET")),
        "rl/set_reward": Operation(handle=control.set_reward, has_session=True),
        "rl/log_metrics": Operation(handle=control.log_metrics, has_session=True),
        "rl/end_session": Operation(handle=control.end_session, has_session=True),
        "rl/finalize": Operation(handle=control.finalize, has_session=True),
        "models/{id}": Operation(handle=control.retrieve_model, methods=("GET",), has_session=True),
        "models": Operation(handle=control.list_models, methods=("GET",), has_session=True),
        "health": Operation(handle=control.report_health, methods=("GET",), is_always_open=True),
        "keys": Operation(handle=keys.create_or_list, methods=("POST", "GET")),
        "keys/{id}": Operation(handle=keys.revoke, methods=("DELETE",)),
        "metrics": Operation(handle=metrics, methods=("GET",), is_always_open=True),
        "openapi.json": Operation(handle=document, methods=("GET",), is_always_open=True),
    }
    return Starlette(
        routes=[Operations(operations, traffic, meter)], exception_handlers={HTTPException: _answer_unrouted}
    )


def _answer_unrouted(request: Request, error: Exception) -> Response:
    """Return the error body for an unknown path, in the dialect of the client that asked."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    failure = Failure(
        status=status,
        type="not_found_error",
        message=f"There is no {request.method} route of this form; see docs/http.md for those that there are.",
        code="not_found",
    )
    # No dialect has been routed to, so the header or the path has to tell which vendor's client this is.
    is_anthropics = _ANTHROPIC_HEADER in request.headers or "/messages" in request.url.path
    format_failure = format_anthropic_failure if is_anthropics else format_openai_failure
    return JSONResponse(format_failure(failure), status_code=status)
