"""The ``/openapi.json`` route: the proxy's routes as an OpenAPI 3.1 document, and ``/docs``: as a page for people.

Each route has one entry in ``describe_routes``; a test compares the entries with the table that serves requests, and
real answers with the schemas. The schemas of completions come from the dialects, those of other answers are at the end.
Routes are served under more paths than the document lists: ``/v1`` may be missing, doubled or elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from html import escape
from http import HTTPStatus
from typing import Any

from attrs import field, frozen

from areal_actors.interchange.episodes import ARRAYS_TYPE
from areal_actors.proxy.control import ARGUMENTS, CONTEXT_NAMES
from areal_actors.proxy.dialects import ROUTES, CompletionRoute
from areal_actors.proxy.dialects.base import COUNT_SCHEMA, MAYBE_TEXT_SCHEMA, TEXT_SCHEMA
from areal_actors.proxy.dialects.fields import Schema, list_of, one_object
from areal_actors.proxy.dialects.responses.stored import STORED_ANSWERS
from areal_actors.proxy.exchange import Exchange
from areal_actors.proxy.keys import KEY_ARGUMENTS

_SESSION_FAILURES = (400, 401, 404, 408, 410, 413, 500, 503)
_CONTROL_FAILURES = tuple(sorted({*_SESSION_FAILURES, 403}))
_COMPLETION_FAILURES = tuple(sorted({*_SESSION_FAILURES, 422, 429}))
_CONTROL_KEYS: tuple[Mapping[str, Any], ...] = ({"sessionKey": []}, {"anthropicKey": []})
_SESSION_KEYS: tuple[Mapping[str, Any], ...] = ({"completionKey": []}, *_CONTROL_KEYS)
_ADMIN_KEY: tuple[Mapping[str, Any], ...] = ({"adminKey": []},)
_USER_KEYS: tuple[Mapping[str, Any], ...] = ({"userKey": []}, *_ADMIN_KEY)
_DESCRIPTION = (
    "Answers as the vendors' endpoints do and remembers the exact tokens of every session. A session is named by its "
    "keys or by its URL; its own key alone rewards and ends it. `/v1` may be missing, doubled or elsewhere in a path."
)


@frozen(kw_only=True)
class Route:
    """One route as it is documented.

    ``operation`` is its name in the routing table, ``path`` its main form. ``answers`` are the bodies of status 200
    (and of other statuses that are not errors), by media type; ``failures`` are the statuses of errors, whose body is
    ``error``. ``security`` lists alternatives, none of which is needed if the path names the session and
    ``is_open_by_url``.
    """

    operation: str
    path: str
    summary: str
    methods: tuple[str, ...] = ("post",)
    has_session: bool = False
    is_open_by_url: bool = True
    item: str | None = None
    """The name of the path's last segment, if that segment names one item of a collection."""
    security: tuple[Mapping[str, Any], ...] = ()
    request: Schema | None = None
    answers: Mapping[int, Mapping[str, Schema]] = field(factory=dict)
    failures: tuple[int, ...] = (500, 503)
    error: str = "Error"


def describe_routes(inert: Collection[str] = ()) -> tuple[Route, ...]:
    """Return every route. ``inert`` are further parameters of completions to accept and ignore, from the settings."""
    described: list[Route] = []
    for route in ROUTES:
        # Version 3.1 has no schema for single events.
        answers: dict[str, Schema] = {**_json(route.answer), "text/event-stream": {}}
        described.append(_completion(route, route.operation, route.summary, answers, inert))
        if route.operation in _COUNTS:
            operation, summary, answer = _COUNTS[route.operation]
            described.append(_completion(route, operation, summary, _json(answer), inert))
    return (*described, *_STORED_ROUTES, *_CONTROL_ROUTES, *_ADMIN_ROUTES, *_OPEN_ROUTES)


_COUNTS = {
    "responses": ("responses/input_tokens", "How many tokens the prompt of a response has", "InputTokens"),
    "messages": ("messages/count_tokens", "How many tokens the prompt of a message has", "TokenCount"),
}


def _completion(
    route: CompletionRoute, operation: str, summary: str, answers: Mapping[str, Schema], inert: Collection[str]
) -> Route:
    return Route(
        operation=operation,
        path=f"/v1/{operation}",
        summary=summary,
        has_session=True,
        security=_SESSION_KEYS,
        request=route.fields.ignoring(inert).schema,
        answers={200: answers},
        failures=_COMPLETION_FAILURES,
        error=route.error,
    )


def _json(name: str) -> dict[str, Schema]:
    return {"application/json": {"$ref": f"#/components/schemas/{name}"}}


def _arguments(operation: str, *required: str) -> Schema:
    return {"type": "object", "properties": _ARGUMENTS[operation], "required": list(required)}


_ARGUMENTS = {**ARGUMENTS, "keys": KEY_ARGUMENTS}
_CONTROL_ROUTES = tuple(
    Route(
        operation=operation,
        path=f"/{operation}",
        summary=summary,
        has_session=True,
        is_open_by_url=False,
        security=_CONTROL_KEYS,
        request=_arguments(operation, *required),
        answers={200: _json(answer)},
        failures=_CONTROL_FAILURES,
    )
    for operation, summary, required, answer in (
        ("rl/set_reward", "Reward one interaction, or the last completed one", ("reward",), "Rewarded"),
        ("rl/log_metrics", "Log named numbers of the session", ("metrics",), "Logged"),
        ("rl/end_session", "End a session, with or without a final reward", (), "SessionEnded"),
        ("rl/finalize", "Reward the last completed interaction and end the session", ("final_reward",), "SessionEnded"),
    )
)
_STORED_FAILURES = tuple(status for status in _SESSION_FAILURES if status not in {408, 413})
_STORED_ROUTES = tuple(
    Route(
        operation=operation,
        path=f"/v1/{operation}",
        summary=summary,
        methods=(method,),
        has_session=True,
        item="id",
        security=_SESSION_KEYS,
        answers={200: _json(answer)},
        failures=_STORED_FAILURES,
    )
    for operation, method, summary, answer in (
        ("responses/{id}", "get", "An answer of the session", "Response"),
        ("responses/{id}", "delete", "Hide an answer from requests that name it", "ResponseDeleted"),
        ("responses/{id}/input_items", "get", "The items that were answered, the last ones first", "ResponseItems"),
    )
)
_ADMIN_ROUTES = (
    Route(
        operation="rl/start_session",
        path="/rl/start_session",
        summary="Open a session",
        methods=("post", "get"),
        security=_USER_KEYS,
        request=_arguments("rl/start_session"),
        answers={200: _json("SessionStarted")},
        failures=(400, 401, 408, 409, 413, 429, 500, 503),
    ),
    Route(
        operation="export_trajectories",
        path="/export_trajectories",
        summary="The training rows of a session",
        security=_USER_KEYS,
        request=_arguments("export_trajectories", "session_id"),
        answers={200: {**_json("Trajectories"), ARRAYS_TYPE: {"type": "string", "format": "binary"}}},
        failures=(400, 401, 404, 408, 413, 422, 500, 503),
    ),
    Route(
        operation="grant_capacity",
        path="/grant_capacity",
        summary="Keep a place for a session that starts soon",
        security=_ADMIN_KEY,
        answers={200: _json("Capacity")},
        failures=(401, 429, 500, 503),
    ),
    Route(
        operation="keys",
        path="/keys",
        summary="Issue a key to a user; its secret is in this answer alone",
        security=_ADMIN_KEY,
        request=_arguments("keys", "user"),
        answers={200: _json("IssuedKey")},
        failures=(400, 401, 404, 408, 413, 500, 503),
    ),
    Route(
        operation="keys",
        path="/keys",
        summary="The keys of all users, without their secrets",
        methods=("get",),
        security=_ADMIN_KEY,
        answers={200: _json("Keys")},
        failures=(401, 404, 500, 503),
    ),
    Route(
        operation="keys/{id}",
        path="/keys/{id}",
        summary="Revoke a key",
        methods=("delete",),
        item="id",
        security=_ADMIN_KEY,
        answers={200: _json("Key")},
        failures=(401, 404, 500, 503),
    ),
)
_OPEN_ROUTES = (
    Route(
        operation="models",
        path="/v1/models",
        summary="The model that answers",
        methods=("get",),
        answers={200: _json("Models")},
    ),
    Route(
        operation="models/{id}",
        path="/v1/models/{id}",
        summary="One model; any name that is not listed is the policy's",
        methods=("get",),
        has_session=True,
        item="id",
        answers={200: _json("Model")},
    ),
    Route(
        operation="health",
        path="/health",
        summary="Whether requests can be answered",
        methods=("get",),
        answers={200: _json("Health"), 503: _json("Health")},
        failures=(500,),
    ),
    Route(
        operation="livez",
        path="/livez",
        summary="Whether the process answers at all",
        methods=("get",),
        answers={200: _json("Health")},
        failures=(500,),
    ),
    Route(
        operation="",
        path="/",
        summary="The page of /docs",
        methods=("get",),
        answers={200: {"text/html": {"type": "string"}}},
        failures=(500,),
    ),
    Route(
        operation="docs",
        path="/docs",
        summary="These routes as a page",
        methods=("get",),
        answers={200: {"text/html": {"type": "string"}}},
        failures=(500,),
    ),
    Route(
        operation="metrics",
        path="/metrics",
        summary="Numbers for Prometheus",
        methods=("get",),
        answers={200: {"text/plain": {"type": "string"}}},
        failures=(500,),
    ),
    Route(
        operation="openapi.json",
        path="/openapi.json",
        summary="This document",
        methods=("get",),
        answers={200: {"application/json": {"type": "object"}}},
        failures=(500,),
    ),
)


def create_document(routes: tuple[Route, ...]) -> dict[str, Any]:
    """Return the OpenAPI document of ``routes``."""
    bearer = {"type": "http", "scheme": "bearer"}
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        named = [] if route.item is None else [_in_path(route.item)]
        own = {method: _operation(route, method, "") for method in route.methods}
        paths.setdefault(route.path, {}).update({"parameters": named, **own} if named else own)
        if route.has_session:
            item = {method: _operation(route, method, "_of_session") for method in route.methods}
            parameters = [_in_path("session_id"), *named]
            paths.setdefault(f"/{{session_id}}{route.path}", {}).update({"parameters": parameters, **item})
    return {
        "openapi": "3.1.0",
        "info": {"title": "areal_actors", "version": "1", "description": _DESCRIPTION},
        "paths": paths,
        "components": {
            "schemas": _ANSWERS,
            "securitySchemes": {
                "sessionKey": {**bearer, "description": "The key that a session was started with"},
                "completionKey": {**bearer, "description": "A session's key for its agent: completions and no rewards"},
                "anthropicKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
                "userKey": {
                    **bearer,
                    "description": "The key of a user; with a session's name, it opens the user's own",
                },
                "adminKey": {**bearer, "description": "The administrator's key"},
            },
        },
    }


def _in_path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _operation(route: Route, method: str, form: str) -> dict[str, Any]:
    name = re.sub(r"\W+", "_", route.operation).strip("_")
    # An empty alternative means that no key is needed: the session's URL is a capability.
    security = [*route.security, {}] if form and route.is_open_by_url else list(route.security)
    answers = {**route.answers, **{status: _json(route.error) for status in route.failures}}
    described: dict[str, Any] = {
        "operationId": f"{method}_{name}{form}",
        "summary": route.summary,
        "security": security,
        "responses": {
            str(status): {
                "description": HTTPStatus(status).phrase,
                "content": {media: {"schema": schema} for media, schema in content.items()},
            }
            for status, content in sorted(answers.items())
        },
    }
    if route.request is not None and method == "get":
        described["parameters"] = [
            {"name": name, "in": "query", "schema": {**schema, "type": "string"}}
            for name, schema in route.request["properties"].items()
        ]
    elif route.request is not None:
        content = {"application/json": {"schema": route.request}}
        described["requestBody"] = {"required": bool(route.request["required"]), "content": content}
    return described


@frozen(kw_only=True)
class OpenAPIEndpoint:
    """The handler of the route."""

    document: Mapping[str, Any]

    async def __call__(self, exchange: Exchange) -> None:
        """Answer with the document."""
        await exchange.send_json(200, self.document)


_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>areal_actors</title>
<style>:root {{color-scheme: light dark; font: 15px/1.5 system-ui}}
body {{max-width: 60em; margin: 2em auto; padding: 0 1em}}
td, th {{padding: .3em 1em .3em 0; text-align: left; vertical-align: top}} code {{white-space: nowrap}}</style>
<h1>areal_actors</h1><p>{description}</p>
<p>An agent uses the base URL of its session, or this server's with <code>/v1</code> and the session's key, in the SDK
of OpenAI or, without <code>/v1</code>, of Anthropic.</p>
<table><tr><th>Route<th>Use<th>Keys</tr>
{rows}</table>
<p><a href="openapi.json">openapi.json</a> has the fields of requests and answers.</p></html>
"""


@frozen(kw_only=True)
class RoutesPage:
    """The handler of ``/`` and ``/docs``: the routes of ``document`` as a page. It shows no key and needs none."""

    document: Mapping[str, Any]

    async def __call__(self, exchange: Exchange) -> None:
        """Answer with the page."""
        await exchange.send_document(200, self.format().encode(), content_type=b"text/html; charset=utf-8")

    def format(self) -> str:
        """Return the page; links are relative, because a proxy in front may have put it below a path."""
        rows = []
        for path, item in self.document["paths"].items():
            # Each of the others is listed once.
            if path.startswith("/{session_id}"):
                continue
            for method, operation in item.items():
                if method == "parameters":
                    continue
                keys = ", ".join(name for choice in operation["security"] for name in choice) or "none"
                route, use = f"{method.upper()} {escape(path)}", escape(operation["summary"])
                rows.append(f"<tr><td><code>{route}</code><td>{use}<td>{keys}</tr>\n")
        return _PAGE.format(description=escape(self.document["info"]["description"]), rows="".join(rows))


# ------------------------------------------------------------------------------------------------------- answers

_TOKENS: Schema = list_of({"type": "integer"})
_TRAJECTORY = one_object(
    {
        "interaction_ids": list_of(TEXT_SCHEMA),
        "reward": {"type": ["number", "null"]},
        "tag": MAYBE_TEXT_SCHEMA,
        "input_ids": _TOKENS,
        "loss_mask": _TOKENS,
        "logprobs": list_of({"type": "number"}),
        "versions": _TOKENS,
        "returns": list_of({"type": "number"}),
        "turns": _TOKENS,
        "predecessors": _TOKENS,
        "raw_logprobs": list_of({"type": ["number", "null"]}),
    },
    "predecessors",
    "raw_logprobs",
)
_MAYBE_COUNT: Schema = {"type": ["integer", "null"], "minimum": 0}
_KEY: dict[str, Schema] = {
    "id": TEXT_SCHEMA,
    "object": {"const": "key"},
    "user": TEXT_SCHEMA,
    "experiment": MAYBE_TEXT_SCHEMA,
    "trial": MAYBE_TEXT_SCHEMA,
    "max_sessions": _MAYBE_COUNT,
    "max_requests_per_minute": _MAYBE_COUNT,
    "max_tokens_per_day": _MAYBE_COUNT,
    "tokens_today": COUNT_SCHEMA,
    "created_at": COUNT_SCHEMA,
    "expires_at": _MAYBE_COUNT,
    "revoked_at": _MAYBE_COUNT,
}
_ANSWERS: Mapping[str, Schema] = {
    **{name: schema for route in ROUTES for name, schema in route.schemas.items()},
    **STORED_ANSWERS,
    "Error": one_object(
        {
            "error": one_object(
                {"message": TEXT_SCHEMA, "type": TEXT_SCHEMA, "param": MAYBE_TEXT_SCHEMA, "code": MAYBE_TEXT_SCHEMA}
            )
        },
        additionalProperties=False,
    ),
    "SessionStarted": one_object(
        {
            "session_id": TEXT_SCHEMA,
            "api_key": TEXT_SCHEMA,
            "completion_key": TEXT_SCHEMA,
            "role_keys": {"type": "object", "additionalProperties": TEXT_SCHEMA},
        },
        additionalProperties=False,
    ),
    "Rewarded": one_object({"status": {"const": "success"}, "interaction_id": TEXT_SCHEMA}, additionalProperties=False),
    "Logged": one_object({"status": {"const": "success"}}, additionalProperties=False),
    "SessionEnded": one_object(
        {"status": {"const": "success"}, "message": TEXT_SCHEMA, "interaction_count": COUNT_SCHEMA},
        additionalProperties=False,
    ),
    "Capacity": one_object({"capacity": {"type": "integer"}, "reserved": COUNT_SCHEMA}, additionalProperties=False),
    "Trajectories": one_object(
        {
            "version": {"enum": [1, 2]},
            "session_id": TEXT_SCHEMA,
            "member": COUNT_SCHEMA,
            "reward": {"type": ["number", "null"]},
            "num_turns": COUNT_SCHEMA,
            "seconds": {"type": "number"},
            "failure": MAYBE_TEXT_SCHEMA,
            "trajectories": list_of(_TRAJECTORY),
            "untrained": list_of(
                one_object({"interaction_id": TEXT_SCHEMA, "num_tokens": COUNT_SCHEMA, "reason": TEXT_SCHEMA})
            ),
        },
        additionalProperties=False,
    ),
    "Key": one_object(_KEY, additionalProperties=False),
    "IssuedKey": one_object({**_KEY, "key": TEXT_SCHEMA}, additionalProperties=False),
    "Keys": one_object(
        {"object": {"const": "list"}, "data": list_of({"$ref": "#/components/schemas/Key"})},
        additionalProperties=False,
    ),
    "Models": one_object(
        {
            "object": {"const": "list"},
            "data": list_of({"$ref": "#/components/schemas/Model"}),
            "first_id": TEXT_SCHEMA,
            "last_id": TEXT_SCHEMA,
            "has_more": {"const": False},
        }
    ),
    "Model": one_object(
        {
            "id": TEXT_SCHEMA,
            "object": {"const": "model"},
            "created": COUNT_SCHEMA,
            "owned_by": TEXT_SCHEMA,
            "type": {"const": "model"},
            "display_name": TEXT_SCHEMA,
            "created_at": {"type": "string", "format": "date-time"},
            **dict.fromkeys(CONTEXT_NAMES, COUNT_SCHEMA),
        },
        *CONTEXT_NAMES,
    ),
    "Health": one_object(
        {
            "status": {"enum": ["ok", "stopping", "unavailable"]},
            "requests": COUNT_SCHEMA,
            "reason": {"enum": ["sessions_unreachable", "journal_failed"]},
        },
        "reason",
    ),
}
