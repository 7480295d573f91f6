"""The page of a host: its trials with their state, for the operator, and for each user the user's own trial alone.

Visitors send their key once, in a form, and get a cookie that stands for it while the host runs. The key is checked
again with each request, so that a revoked one shows nothing any more. Several users may share a trial, whose rows do
not say whose they are: they see its curves, and only the operator sees its conversations.
"""

from __future__ import annotations

import html
import secrets
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from anyio import to_thread
from attrs import define, evolve, field, frozen
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from areal_actors.dashboard import RunDirectory
from areal_actors.errors import RequestError, Unauthorized
from areal_actors.lib.bearer_keys import read_bearer
from areal_actors.viewer.app import (
    DEFAULT_INTERVALS,
    PAGE_HEADERS,
    STATIC,
    PollIntervals,
    create_app,
    read_cookie,
    set_cookie,
    with_headers,
)
from areal_actors.viewer.runs import Access, ViewedRun, is_run, view_run
from areal_actors_service.messages import ServiceView

_MAX_VISITORS = 1000
_MAX_FORM_BYTES = 4096
_LOGIN_HEADERS = PAGE_HEADERS | {
    "content-security-policy": PAGE_HEADERS["content-security-policy"].replace(
        "form-action 'none'", "form-action 'self'"
    )
}


@frozen(kw_only=True)
class Visitor:
    """The owner of a key: the trial that may be seen, as ``experiment/trial``, or all of them for ``None``."""

    trial: str | None
    is_shared: bool = False
    """Whether other users have the same trial."""


@define(eq=False)
class HostPage:
    """The application of the page, for paths of ``serves``.

    ``identify`` returns the visitor of a key, or raises ``RequestError``; ``list_services`` the services of the host.
    ``operator`` is a visitor without a key, who opens the page by ``token`` in its URL.
    """

    fileroot: Path
    identify: Callable[[str], Awaitable[Visitor]]
    list_services: Callable[[], Awaitable[tuple[ServiceView, ...]]]
    intervals: PollIntervals = DEFAULT_INTERVALS
    token: str = field(factory=lambda: secrets.token_urlsafe(16), repr=False)
    _keys: dict[str, str | None] = field(factory=dict, init=False, repr=False)
    """The key behind each cookie; ``None`` for that of the operator's URL."""
    _runs: dict[str, ViewedRun] = field(factory=dict, init=False)
    """Every run that was seen, since a run remembers how far its files have been read."""
    _app: ASGIApp = field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        login = Route("/login", self._log_in, methods=["POST"])
        self._app = create_app(self._find, describe=self._describe, intervals=self.intervals, more=(login,))

    @staticmethod
    def serves(method: str, path: str) -> bool:
        """Return whether a request is for the page and not for a service."""
        if method == "POST":
            return path == "/login"
        return method in ("GET", "HEAD") and (path == "/" or path.startswith(("/static/", "/api/")))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request of a browser."""
        request = Request(scope)
        given = request.query_params.get("token", "")
        response: ASGIApp = self._app
        if request.url.path == "/" and given and secrets.compare_digest(given.encode(), self.token.encode()):
            response = self._admit(request, None)
        elif request.url.path == "/" and read_cookie(request) not in self._keys:
            response = _show_form()
        await response(scope, receive, with_headers(send))

    async def _log_in(self, request: Request) -> Response:
        if int(request.headers.get("content-length") or _MAX_FORM_BYTES + 1) > _MAX_FORM_BYTES:
            return _show_form("This is not a key.")
        form = parse_qs((await request.body()).decode("latin-1"))
        key = (form.get("key") or [""])[0].strip()
        try:
            await self.identify(key)
        except RequestError as error:
            return _show_form(str(error))
        return self._admit(request, key)

    def _admit(self, request: Request, key: str | None) -> Response:
        cookie = secrets.token_urlsafe(24)
        # The oldest visitor has to send the key again, so that logging in over and over takes no more memory.
        while len(self._keys) >= _MAX_VISITORS:
            del self._keys[next(iter(self._keys))]
        self._keys[cookie] = key
        response = RedirectResponse("/", status_code=303)
        set_cookie(response, request, cookie)
        return response

    async def _find(self, request: Request) -> Mapping[str, ViewedRun]:
        """Return the runs that the visitor may see. Raises ``Unauthorized``."""
        cookie = read_cookie(request)
        if cookie in self._keys:
            key = self._keys[cookie]
        elif bearer := read_bearer(request.headers.get("authorization", "")):
            key = bearer
        else:
            raise Unauthorized("This page needs the key of a user; open / in a browser.")
        visitor = Visitor(trial=None) if key is None else await self.identify(key)
        if visitor.trial is not None:
            access = Access.CURVES if visitor.is_shared else Access.NO_SETTINGS
            return {visitor.trial: evolve(self._view(visitor.trial), access=access)}
        services = {service.trial.name for service in await self.list_services()}
        names = sorted(services | set(await to_thread.run_sync(self._list_runs)))
        return {name: self._view(name) for name in names}

    def _view(self, name: str) -> ViewedRun:
        if name not in self._runs:
            self._runs[name] = view_run(RunDirectory(path=self.fileroot.absolute() / name))
        return self._runs[name]

    def _list_runs(self) -> list[str]:
        paths = (path for path in self.fileroot.glob("*/*/") if is_run(RunDirectory(path=path)))
        return [f"{path.parent.name}/{path.name}" for path in paths]

    async def _describe(self, runs: Mapping[str, ViewedRun]) -> list[dict[str, Any]]:
        """Return the runs with the states of their services."""
        services = {service.trial.name: service for service in await self.list_services()}
        found = []
        for name, run in runs.items():
            service = services.get(name)
            facts: dict[str, Any] = {"state": "stopped" if run.directory.config.exists() else "not started"}
            if service is not None:
                numbers = {"requests": service.num_requests, "starts": service.num_starts, "failure": service.failure}
                facts = {"state": service.state.value} | numbers
            found.append({"name": name} | facts)
        return found


def _show_form(problem: str | None = None) -> Response:
    text = (STATIC / "login.html").read_text(encoding="utf-8").replace("<!-- problem -->", html.escape(problem or ""))
    return HTMLResponse(text, 200 if problem is None else 401, headers=_LOGIN_HEADERS)
