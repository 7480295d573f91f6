"""The ``/openapi.json`` route: the proxy's routes as an OpenAPI 3.1 document, and ``/docs``: as a page for people.

Requests follow the field tables of the dialects and the argument tables of the control routes. Answers have no schemas:
those of completions are the vendors' own, and ``docs/reference/http.md`` describes the others. A test compares the rows
with the table that serves requests. Routes are served under more paths than the document lists: ``/v1`` may be missing,
doubled or elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from html import escape
from typing import Any

from attrs import frozen

from areal_actors.interchange.episodes import ARRAYS_TYPE
from areal_actors.proxy.control import ARGUMENTS
from areal_actors.proxy.dialects import ROUTES
from areal_actors.proxy.dialects.fields import Schema
from areal_actors.proxy.exchange import Exchange
from areal_actors.proxy.keys import KEY_ARGUMENTS

_JSON, _HTML, _EVENTS = "application/json", "text/html", "text/event-stream"
_CONTROL_KEYS = ("sessionKey", "anthropicKey")
_SESSION_KEYS = ("completionKey", *_CONTROL_KEYS)
_ADMIN_KEY = ("adminKey",)
_USER_KEYS = ("userKey", *_ADMIN_KEY)
_DESCRIPTION = (
    "Answers as the vendors' endpoints do and remembers the exact tokens of every session. A session is named by its "
    "keys or by its URL; its own key alone rewards and ends it. `/v1` may be missing, doubled or elsewhere in a path."
)


@frozen
class Route:
    """One route as it is documented. ``keys`` names the keys of which any is enough; without them it is open.

    ``answers`` are the media types of an answer, ``request`` the schema of the body (of ``GET``: of the query). A route
    with ``has_session`` is also served below the id of a session, which replaces the key if ``is_open_by_url``.
    """

    path: str
    summary: str
    keys: tuple[str, ...] = ()
    methods: tuple[str, ...] = ("post",)
    request: Schema | None = None
    answers: tuple[str, ...] = (_JSON,)
    has_session: bool = False
    is_open_by_url: bool = True


def _arguments(operation: str, *required: str) -> Schema:
    properties = {**ARGUMENTS, "keys": KEY_ARGUMENTS}[operation]
    return {"type": "object", "properties": properties, "required": list(required)}


def _control(operation: str, summary: str, *required: str) -> Route:
    request = _arguments(operation, *required)
    return Route(f"/{operation}", summary, _CONTROL_KEYS, request=request, has_session=True, is_open_by_url=False)


_GET = ("get",)
_OTHERS = (
    Route("/v1/responses/{id}", "An answer of the session", _SESSION_KEYS, _GET, has_session=True),
    _control("rl/set_reward", "Reward one interaction, or the last completed one", "reward"),
    _control("rl/log_metrics", "Log named numbers of the session", "metrics"),
    _control("rl/end_session", "End a session, with or without a final reward"),
    _control("rl/finalize", "Reward the last completed interaction and end the session", "final_reward"),
    Route("/rl/start_session", "Open a session", _USER_KEYS, ("post", "get"), _arguments("rl/start_session")),
    Route(
        "/export_trajectories",
        "The training rows of a session",
        _USER_KEYS,
        request=_arguments("export_trajectories", "session_id"),
        answers=(_JSON, ARRAYS_TYPE),
    ),
    Route("/grant_capacity", "Keep a place for a session that starts soon", _ADMIN_KEY),
    Route(
        "/keys",
        "Issue a key to a user; its secret is in this answer alone",
        _ADMIN_KEY,
        request=_arguments("keys", "user"),
    ),
    Route("/keys", "The keys of all users, without their secrets", _ADMIN_KEY, _GET),
    Route("/keys/{id}", "Revoke a key", _ADMIN_KEY, ("delete",)),
    Route("/v1/models", "The model that answers", methods=_GET),
    Route("/v1/models/{id}", "One model; any name that is not listed is the policy's", methods=_GET, has_session=True),
    Route("/health", "Whether requests can be answered", methods=_GET),
    Route("/livez", "Whether the process answers at all", methods=_GET),
    Route("/", "The page of /docs", methods=_GET, answers=(_HTML,)),
    Route("/docs", "These routes as a page", methods=_GET, answers=(_HTML,)),
    Route("/metrics", "Numbers for Prometheus", methods=_GET, answers=("text/plain",)),
    Route("/openapi.json", "This document", methods=_GET),
)
_COUNTS = {
    "responses": ("responses/input_tokens", "How many tokens the prompt of a response has"),
    "messages": ("messages/count_tokens", "How many tokens the prompt of a message has"),
}


def describe_routes(inert: Collection[str] = ()) -> tuple[Route, ...]:
    """Return every route. ``inert`` are further parameters of completions to accept and ignore, from the settings."""
    described: list[Route] = []
    for route in ROUTES:
        request = route.fields.ignoring(inert).schema
        shown: list[tuple[str, str, tuple[str, ...]]] = [(route.operation, route.summary, (_JSON, _EVENTS))]
        if route.operation in _COUNTS:
            shown.append((*_COUNTS[route.operation], (_JSON,)))
        described += (
            Route(f"/v1/{name}", summary, _SESSION_KEYS, request=request, answers=answers, has_session=True)
            for name, summary, answers in shown
        )
    return (*described, *_OTHERS)


def create_document(routes: tuple[Route, ...]) -> dict[str, Any]:
    """Return the OpenAPI document of ``routes``."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        for below in ("", "/{session_id}") if route.has_session else ("",):
            item = paths.setdefault(f"{below}{route.path}", {})
            if names := re.findall(r"{(\w+)}", f"{below}{route.path}"):
                schema = {"type": "string", "minLength": 1}
                item["parameters"] = [
                    {"name": name, "in": "path", "required": True, "schema": schema} for name in names
                ]
            for method in route.methods:
                item[method] = _operation(route, method, below)
    bearer = {"type": "http", "scheme": "bearer"}
    error = {"type": "object", "properties": {"message": {"type": "string"}}, "required": ["message"]}
    return {
        "openapi": "3.1.0",
        "info": {"title": "areal_actors", "version": "1", "description": _DESCRIPTION},
        "paths": paths,
        "components": {
            "schemas": {"Error": {"type": "object", "properties": {"error": error}, "required": ["error"]}},
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


def _operation(route: Route, method: str, below: str) -> dict[str, Any]:
    security: list[Mapping[str, Any]] = [{name: []} for name in route.keys]
    if below and route.is_open_by_url:
        # An empty alternative means that no key is needed: the session's URL is a capability.
        security.append({})
    # What needs no key says in other words that it does not work, such as ``/health``.
    refused = {_JSON: {"schema": {"$ref": "#/components/schemas/Error"}} if route.keys else {}}
    described: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{method}{below}{route.path.removeprefix('/v1')}").strip("_"),
        "summary": route.summary,
        "security": security,
        "responses": {
            "200": {"description": "The answer", "content": {media: {} for media in route.answers}},
            "default": {"description": "Why there is no answer, in the vendor's form", "content": refused},
        },
    }
    if route.request is not None and method == "get":
        described["parameters"] = [
            {"name": name, "in": "query", "schema": {**schema, "type": "string"}}
            for name, schema in route.request["properties"].items()
        ]
    elif route.request is not None:
        content = {_JSON: {"schema": route.request}}
        described["requestBody"] = {"required": bool(route.request["required"]), "content": content}
    return described


@frozen(kw_only=True)
class OpenAPIEndpoint:
    """The handler of ``/openapi.json``."""

    document: Mapping[str, Any]

    async def __call__(self, exchange: Exchange) -> None:
        """Answer with the document."""
        await exchange.send_json(200, self.document)


_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>areal_actors</title>
<h1>areal_actors</h1><p>{description}</p>
<p>An agent uses the base URL of its session, or this server's with <code>/v1</code> and the session's key, in the SDK
of OpenAI or, without <code>/v1</code>, of Anthropic.</p>
<table><tr><th>Route<th>Use<th>Keys</tr>
{rows}</table>
<p><a href="openapi.json">openapi.json</a> has the fields of requests.</p></html>
"""


@frozen(kw_only=True)
class RoutesPage:
    """The handler of ``/`` and ``/docs``: the routes of ``document`` as a page. It shows no key and needs none."""

    document: Mapping[str, Any]

    async def __call__(self, exchange: Exchange) -> None:
        """Answer with the page; links are relative, because a proxy in front may have put it below a path."""
        rows = []
        for path, item in self.document["paths"].items():
            # The others are listed once.
            if path.startswith("/{session_id}"):
                continue
            for method, operation in item.items():
                if method != "parameters":
                    keys = ", ".join(name for choice in operation["security"] for name in choice) or "none"
                    route, use = f"{method.upper()} {escape(path)}", escape(operation["summary"])
                    rows.append(f"<tr><td><code>{route}</code><td>{use}<td>{keys}</tr>\n")
        page = _PAGE.format(description=escape(self.document["info"]["description"]), rows="".join(rows))
        await exchange.send_document(200, page.encode(), content_type=b"text/html; charset=utf-8")
