"""The server of the page: a Starlette application over the files of runs, on loopback, for the owner of a token.

The first request carries the token in its URL and receives a cookie; every other request needs the cookie or the token
as a bearer. Both are as good as the run directory itself: they show prompts and answers, but no keys. A page of another
origin can neither read answers (no CORS headers) nor use the cookie (``SameSite=Strict``).
"""

from __future__ import annotations

import hmac
import secrets
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import anyio
import orjson
from anyio import to_thread
from attrs import frozen
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from areal_actors.errors import RequestError
from areal_actors.lib.bearer_keys import read_bearer
from areal_actors.lib.task_groups import open_tasks
from areal_actors.proxy.server import listen, serve_shielded, url_of
from areal_actors.viewer.conversations import GroupFilter, Trait
from areal_actors.viewer.curves import Axis, format_csv, sample_curves
from areal_actors.viewer.runs import Access, FailureFilter, ViewedRun, find_runs

T = TypeVar("T")

STATIC = Path(__file__).parent / "static"
PAGE_HEADERS = {
    # Texts of models and agents are on the page; they must not become scripts, whatever they contain.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
}


@frozen(kw_only=True)
class PollIntervals:
    """How often files are looked at for an open page. Each event makes a browser ask for what has changed."""

    seconds: float = 2.0
    seconds_after_change: float = 5.0
    """The requests of a browser take 30 ms of CPU: 1.5 % of a core if they come every 2 s."""


DEFAULT_INTERVALS = PollIntervals()

Find = Callable[[Request], Awaitable[Mapping[str, ViewedRun]]]
"""Returns the runs that the sender of a request may see. Raises ``RequestError``."""
Describe = Callable[[Mapping[str, ViewedRun]], Awaitable[list[dict[str, Any]]]]


def create_page(
    runs: Mapping[str, ViewedRun],
    *,
    token: str,
    stopping: anyio.Event | None = None,
    intervals: PollIntervals = DEFAULT_INTERVALS,
) -> ASGIApp:
    """Return the application that shows ``runs`` to the owner of ``token``. Streams end when ``stopping`` is set."""

    async def find(_: Request) -> Mapping[str, ViewedRun]:
        return runs

    async def describe(found: Mapping[str, ViewedRun]) -> list[dict[str, Any]]:
        return [{"name": name} for name in found]

    return _Guarded(create_app(find, describe=describe, stopping=stopping, intervals=intervals), token)


def create_app(
    find: Find,
    *,
    describe: Describe,
    stopping: anyio.Event | None = None,
    intervals: PollIntervals = DEFAULT_INTERVALS,
    more: Sequence[Route] = (),
) -> Starlette:
    """Return the application of a page, with ``more`` routes.

    ``describe`` adds facts to the table of runs; streams end when ``stopping`` is set.
    """

    async def list_runs(request: Request) -> Response:
        found = await find(request)
        facts = {row["name"]: row for row in await describe(found)}
        rows = await to_thread.run_sync(lambda: [_summarize(run) for run in found.values()])
        return _answer({"runs": [row | facts.get(row["name"], {}) for row in rows]})

    async def events(request: Request) -> Response:
        await find(request)
        changes = _changes(request, find, describe, stopping or anyio.Event(), intervals)
        return StreamingResponse(changes, media_type="text/event-stream")

    def answering(resource: _Resource) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            known = await find(request)
            names = request.query_params.getlist("run")
            runs = [known[name] for name in names if name in known]
            # A run that is gone leaves a comparison, and does not end it.
            if not runs or (len(names) == 1 and len(runs) != 1):
                return _answer({"error": "There is no such run."}, status=404)
            if resource.is_private and any(run.access is Access.CURVES for run in runs):
                hidden = "Several users share this run, so that only the operator of the host sees this."
                return _answer({"error": hidden}, status=403)
            try:
                # Files are read on a thread, since a disk may be slow and the event loop is that of a run.
                found = await to_thread.run_sync(resource.read, runs, request)
            except ValueError as error:
                return _answer({"error": f"The request cannot be understood: {error}"}, status=400)
            except OSError as error:
                return _answer({"error": f"The files of the run cannot be read: {error}"}, status=500)
            if isinstance(found, Response):
                return found
            return _answer(found) if found is not None else _answer({"error": "There is no such record."}, status=404)

        return endpoint

    routes = [
        *more,
        Route("/", _send_index),
        Mount("/static", StaticFiles(directory=STATIC)),
        Route("/api/runs", list_runs),
        Route("/api/events", events),
        *(Route(f"/api/{name}", answering(resource)) for name, resource in _RESOURCES.items()),
    ]
    return Starlette(routes=routes, exception_handlers={RequestError: _refuse})


def _summarize(run: ViewedRun) -> dict[str, Any]:
    """Return the row of a run; one whose files cannot be read does not hide the others."""
    try:
        return run.summarize()
    except OSError as error:
        return {"name": run.name, "status": "unreadable", "reason": str(error)}


async def _send_index(_: Request) -> Response:
    return FileResponse(STATIC / "index.html")


async def _refuse(_: Request, error: Exception) -> Response:
    return _answer({"error": str(error)}, status=401)


@frozen
class _Resource:
    """What a path of the API answers with: reads one run or several, and is private if it holds texts of episodes."""

    read: Callable[[Sequence[ViewedRun], Request], Any]
    is_private: bool = True


def _send_curves(runs: Sequence[ViewedRun], request: Request) -> Any:
    given = request.query_params
    return sample_curves(
        {run.name: run.metrics.read() for run in runs},
        keys=given.getlist("key"),
        axis=Axis(given.get("axis", Axis.STEP)),
        num_points=int(given.get("points", "400")),
        **{bound: float(given[bound]) for bound in ("low", "high") if given.get(bound)},
    )


def _send_csv(runs: Sequence[ViewedRun], _: Request) -> Response:
    headers = {"content-disposition": 'attachment; filename="metrics.csv"'}
    return Response(format_csv({run.name: run.metrics.read() for run in runs}), media_type="text/csv", headers=headers)


def _send_group(runs: Sequence[ViewedRun], request: Request) -> Any:
    given = request.query_params
    task, version = given.get("task", ""), int(given.get("version", ""))
    return runs[0].conversations.read_group(given.get("kind", "rollout"), version, task)


_RESOURCES = {
    "run": _Resource(lambda runs, _: runs[0].describe(), is_private=False),
    "curves": _Resource(_send_curves, is_private=False),
    "metrics.csv": _Resource(_send_csv, is_private=False),
    "failures": _Resource(
        lambda runs, request: {"failures": runs[0].list_failures(_parse_filter(request, FailureFilter, _OF_FAILURES))}
    ),
    "groups": _Resource(
        lambda runs, request: runs[0].conversations.list_groups(_parse_filter(request, GroupFilter, _OF_GROUPS))
    ),
    "group": _Resource(_send_group),
    "session": _Resource(
        lambda runs, request: runs[0].conversations.read_session(int(request.query_params.get("index", "")))
    ),
    "served": _Resource(lambda runs, _: {"sessions": runs[0].list_served()}),
}

_Parameters = Mapping[str, tuple[str, Callable[[str], Any]]]
"""The parameters of a filter: its field, and how the text is parsed. Empty ones are ignored."""
_OF_GROUPS: _Parameters = {
    "kind": ("kind", str),
    "version": ("version", int),
    "query": ("query", str),
    "source": ("source", str),
    "low": ("low", float),
    "high": ("high", float),
    "trait": ("trait", Trait),
}
_OF_FAILURES: _Parameters = {
    "query": ("query", str),
    "source": ("source", str),
    "outcome": ("outcome", str),
    "eval": ("is_eval", "yes".__eq__),
    "first": ("first_version", int),
    "last": ("last_version", int),
}


def _parse_filter(request: Request, kind: Callable[..., T], parameters: _Parameters) -> T:
    given = request.query_params
    return kind(**{name: parse(given[key]) for key, (name, parse) in parameters.items() if given.get(key)})


def _answer(document: Any, *, status: int = 200) -> Response:
    text = orjson.dumps(document, default=str, option=orjson.OPT_SERIALIZE_NUMPY)
    return Response(text, status, media_type="application/json")


async def _changes(
    request: Request, find: Find, describe: Describe, stopping: anyio.Event, intervals: PollIntervals
) -> AsyncIterator[bytes]:
    """Yield server-sent events as long as a browser listens, and its key is valid.

    There is one for each run, with the names of its parts that changed, and one for the list of runs if that did.
    """
    before: dict[str, dict[str, str]] = {}
    listed: list[dict[str, Any]] | None = None
    yield b": connected\n\n"
    while not stopping.is_set():
        try:
            runs = await find(request)
            found = await describe(runs)
        except RequestError:  # the key was revoked
            return
        if listed is not None and found != listed:
            yield b"data: " + orjson.dumps({"runs": found}) + b"\n\n"
        listed, has_changed = found, False
        for name, run in runs.items():
            after = await to_thread.run_sync(run.signature)
            parts = [part for part, state in after.items() if state != before.get(name, after)[part]]
            before[name] = after
            if parts:
                has_changed = True
                yield b"data: " + orjson.dumps({"run": name, "parts": parts}) + b"\n\n"
        with anyio.move_on_after(intervals.seconds_after_change if has_changed else intervals.seconds):
            await stopping.wait()


def read_cookie(request: Request) -> str:
    """Return the cookie of the page that ``request`` was sent to, or an empty text."""
    return request.cookies.get(_name_cookie(request), "")


def set_cookie(response: Response, request: Request, value: str) -> None:
    """Give the browser a cookie that scripts and other sites cannot use."""
    response.set_cookie(_name_cookie(request), value, httponly=True, samesite="strict")


def _name_cookie(request: Request) -> str:
    # Cookies are shared by all ports of a host, so the name tells the pages of two runs apart.
    return f"areal_page_{request.url.port or 80}"


@frozen
class _Guarded:
    """Answers only requests with the token: in the URL of the page once, then as a cookie, or as a bearer."""

    app: ASGIApp
    token: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # the lifespan of a server
            await self.app(scope, receive, send)
            return
        request = Request(scope)
        given = request.query_params.get("token", "")
        bearer = read_bearer(request.headers.get("authorization", ""))
        if request.method not in ("GET", "HEAD"):
            response: ASGIApp = _answer({"error": "The page only reads."}, status=405)
        elif self._is_right(given) and request.url.path == "/":
            # The token leaves the address bar and the history.
            response = RedirectResponse("/", status_code=303, headers=PAGE_HEADERS)
            set_cookie(response, request, self.token)
        elif self._is_right(read_cookie(request)) or self._is_right(bearer):
            response = self.app
        else:
            hint = "Open the whole URL that the run printed, with its token."
            response = _answer({"error": f"This page needs its token. {hint}"}, status=401)
        await response(scope, receive, with_headers(send))

    def _is_right(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self.token.encode())


def with_headers(send: Send) -> Send:
    """Return a sender that adds ``PAGE_HEADERS`` to a response, unless it has others."""

    async def sending(message: Any) -> None:
        if message["type"] == "http.response.start":
            known = {name for name, _ in message["headers"]}
            added = ((name.encode(), value.encode()) for name, value in PAGE_HEADERS.items())
            message["headers"] = [*message["headers"], *(pair for pair in added if pair[0] not in known)]
        await send(message)

    return sending


@asynccontextmanager
async def open_page(
    runs: Mapping[str, ViewedRun],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    intervals: PollIntervals = DEFAULT_INTERVALS,
    prefix: str = "--",
) -> AsyncIterator[str]:
    """Serve the page of ``runs`` while the block lasts; yield its URL with the token in it.

    Raises ``ConfigError`` if the address cannot be used; ``prefix`` is what precedes ``host`` and ``port`` in the names
    of their settings.
    """
    token = token or secrets.token_urlsafe(16)
    listener = listen(host, port, prefix=prefix)
    stopping = anyio.Event()
    app = create_page(runs, token=token, stopping=stopping, intervals=intervals)
    try:
        url = url_of(listener)
        async with open_tasks() as tasks:
            # Shielded because a cancelled server leaves its connections open; `stopping` ends it and its streams.
            tasks.start_soon(serve_shielded, app, listener, stopping, anyio.CancelScope(shield=True))
            try:
                yield f"{url}/?token={token}"
            finally:
                stopping.set()
    finally:
        listener.close()


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
