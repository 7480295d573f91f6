"""The server of the page: a Starlette application over the files of runs, on loopback, for the owner of a token.

The first request carries the token in its URL and receives a cookie; every other request needs the cookie or the token
as a bearer. Both are as good as the run directory itself: they show prompts and answers, but no keys. A page of another
origin can neither read answers (no CORS headers) nor use the cookie (``SameSite=Strict``).
"""

from __future__ import annotations

import hmac
import secrets
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import orjson
from anyio import to_thread
from attrs import frozen
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from areal_actors.kernel.failure import open_tasks
from areal_actors.proxy.server import listen, serve, url_of
from areal_actors.viewer.runs import ViewedRun, find_runs

__all__ = ["create_page", "open_page", "run_viewer"]

_STATIC = Path(__file__).parent / "static"
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
_SECONDS_BETWEEN_LOOKS = 1.0
"""How often files are looked at for an open page: some microseconds of stat calls per run."""
_HEADERS = {
    # Texts of models and agents are on the page; they must not become scripts, whatever they contain.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
}

Read = Callable[[ViewedRun, Request], Any]


def create_page(runs: Mapping[str, ViewedRun], *, token: str, stopping: anyio.Event | None = None) -> ASGIApp:
    """Return the application that shows ``runs`` to the owner of ``token``. Streams end when ``stopping`` is set."""

    async def asset(request: Request) -> Response:
        path = _STATIC / request.path_params.get("name", "index.html")
        if path.parent != _STATIC or path.suffix not in _TYPES or not path.is_file():
            return _answer({"error": "There is no such file."}, status=404)
        return Response(path.read_bytes(), media_type=_TYPES[path.suffix])

    async def list_runs(_: Request) -> Response:
        return _answer({"runs": [{"name": run.name, "is_live": run.status is not None} for run in runs.values()]})

    async def events(_: Request) -> Response:
        return StreamingResponse(_changes(runs, stopping or anyio.Event()), media_type="text/event-stream")

    def answering(read: Read) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            run = runs.get(request.query_params.get("run", ""))
            if run is None:
                return _answer({"error": "There is no such run."}, status=404)
            try:
                # Files are read on a thread, since a disk may be slow and the event loop is that of a run.
                found = await to_thread.run_sync(read, run, request)
            except ValueError as error:
                return _answer({"error": f"The request cannot be understood: {error}"}, status=400)
            except OSError as error:
                return _answer({"error": f"The files of the run cannot be read: {error}"}, status=500)
            return _answer(found) if found is not None else _answer({"error": "There is no such record."}, status=404)

        return endpoint

    routes = [
        Route("/", asset),
        Route("/static/{name}", asset),
        Route("/api/runs", list_runs),
        Route("/api/events", events),
        *(Route(f"/api/{name}", answering(read)) for name, read in _READERS.items()),
    ]
    return _Guarded(Starlette(routes=routes), token)


_READERS: dict[str, Read] = {
    "run": lambda run, _: run.describe(),
    "metrics": lambda run, request: run.read_metrics(request.query_params.get("after", "")),
    "failures": lambda run, _: {"failures": run.list_failures()},
    "sessions": lambda run, request: {"sessions": run.list_sessions(request.query_params.get("query", ""))},
    "session": lambda run, request: run.read_session(int(request.query_params["index"])),
    "groups": lambda run, request: {"groups": run.list_groups(*_kind_and_version(request))},
    "group": lambda run, request: {
        "rows": run.read_group(*_kind_and_version(request), request.query_params.get("task", ""))
    },
}


def _kind_and_version(request: Request) -> tuple[str, int]:
    return request.query_params.get("kind", "rollout"), int(request.query_params.get("version", "0"))


def _answer(document: Any, *, status: int = 200) -> Response:
    return Response(orjson.dumps(document, default=str), status, media_type="application/json")


async def _changes(runs: Mapping[str, ViewedRun], stopping: anyio.Event) -> AsyncIterator[bytes]:
    """Yield a server-sent event for each run with the names of its parts that changed, as long as a browser listens."""
    before: dict[str, dict[str, str]] = {}
    yield b": connected\n\n"
    while not stopping.is_set():
        for name, run in runs.items():
            after = await to_thread.run_sync(run.signature)
            parts = [part for part, state in after.items() if state != before.get(name, after)[part]]
            before[name] = after
            if parts:
                yield b"data: " + orjson.dumps({"run": name, "parts": parts}) + b"\n\n"
        with anyio.move_on_after(_SECONDS_BETWEEN_LOOKS):
            await stopping.wait()


@frozen
class _Guarded:
    """Answers only requests with the token: in the URL of the page once, then as a cookie, or as a bearer."""

    app: ASGIApp
    token: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # hypercorn's lifespan messages
            await self.app(scope, receive, send)
            return
        request = Request(scope)
        # Cookies are shared by all ports of a host, so the name tells the pages of two runs apart.
        cookie = f"areal_page_{request.url.port or 80}"
        given = request.query_params.get("token", "")
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        if request.method not in ("GET", "HEAD"):
            response: ASGIApp = _answer({"error": "The page only reads."}, status=405)
        elif self._is_right(given) and request.url.path == "/":
            # The token leaves the address bar and the history.
            response = RedirectResponse("/", status_code=303, headers=_HEADERS)
            response.set_cookie(cookie, self.token, httponly=True, samesite="strict")
        elif self._is_right(request.cookies.get(cookie, "")) or self._is_right(bearer):
            response = self.app
        else:
            hint = "Open the whole URL that the run printed, with its token."
            response = _answer({"error": f"This page needs its token. {hint}"}, status=401)
        await response(scope, receive, _with_headers(send))

    def _is_right(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self.token.encode())


def _with_headers(send: Send) -> Send:
    async def sending(message: Any) -> None:
        if message["type"] == "http.response.start":
            known = {name for name, _ in message["headers"]}
            added = ((name.encode(), value.encode()) for name, value in _HEADERS.items())
            message["headers"] = [*message["headers"], *(pair for pair in added if pair[0] not in known)]
        await send(message)

    return sending


@asynccontextmanager
async def open_page(
    runs: Mapping[str, ViewedRun], *, host: str = "127.0.0.1", port: int = 0, token: str | None = None
) -> AsyncIterator[str]:
    """Serve the page of ``runs`` while the block lasts; yield its URL with the token in it.

    Raises ``ConfigError`` if the address cannot be used.
    """
    token = token or secrets.token_urlsafe(16)
    listener = listen(host, port, section="page")
    stopping = anyio.Event()
    app = create_page(runs, token=token, stopping=stopping)
    try:
        url = url_of(listener)
        async with open_tasks() as tasks:
            # Shielded because a cancelled Hypercorn leaves its connections open; `stopping` ends it and its streams.
            tasks.start_soon(_serve_shielded, app, listener, stopping)
            try:
                yield f"{url}/?token={token}"
            finally:
                stopping.set()
    finally:
        listener.close()


async def _serve_shielded(app: ASGIApp, listener: Any, stopping: anyio.Event) -> None:
    with anyio.CancelScope(shield=True):
        await serve(app, listener, shutdown=stopping.wait)


def run_viewer(paths: tuple[Path, ...], *, host: str, port: int, announce: Callable[[str], object]) -> None:
    """Serve the page of the runs at ``paths`` until SIGINT or SIGTERM.

    Raises ``RunDirectoryError`` for a path without runs, and ``ConfigError`` for an address that cannot be used.
    """
    runs = find_runs(paths)
    anyio.run(partial(_run_viewer, runs, host=host, port=port, announce=announce))


async def _run_viewer(
    runs: Mapping[str, ViewedRun], *, host: str, port: int, announce: Callable[[str], object]
) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with open_page(runs, host=host, port=port) as url:
            announce(f"{len(runs)} run{'' if len(runs) == 1 else 's'} at {url}")
            async for _ in signals:
                break
