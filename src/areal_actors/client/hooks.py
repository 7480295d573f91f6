"""Interception of outgoing requests of other libraries: httpx, httpx2, aiohttp and requests.

Each library has one method that sends a single request over a connection, after redirects, authentication and base URLs
were handled and before the next redirect; that method is wrapped. A redirect to another server therefore never carries
a session's key, and the objects that programs hold (clients, requests, their headers) are never changed.

The first session of a process wraps the installed ones of these libraries, which stay wrapped. Outside of a session the
wrappers do nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from threading import Lock
from types import ModuleType
from typing import Any

from attrs import frozen

from areal_actors.client.attribution import attribute
from areal_actors.lib.telemetry import get_logger

_log = get_logger(__name__)

Method = Callable[..., Any]
Wrap = Callable[[Method], Method]


# ----------------------------------------------------------------------------------------------------- wrappers


def _with_key(request: Any, copy: Callable[[Any], Any]) -> Any:
    """Return a copy of ``request`` with the session's key, or the same request if it belongs to no session."""
    copies: list[Any] = []

    def headers() -> MutableMapping[str, str]:
        # A copy, because the library derives the next request of a redirect from the one that it holds.
        copies.append(copy(request))
        changed: MutableMapping[str, str] = copies[0].headers
        return changed

    attribute(str(request.url), headers)
    return copies[0] if copies else request


def _copy_httpx(request: Any) -> Any:
    return type(request)(
        request.method, request.url, headers=request.headers, stream=request.stream, extensions=request.extensions
    )


def _wrap_httpx(original: Method) -> Method:
    @wraps(original)
    def handle_request(self: Any, request: Any) -> Any:
        return original(self, _with_key(request, _copy_httpx))

    return handle_request


def _wrap_httpx_async(original: Callable[..., Awaitable[Any]]) -> Method:
    @wraps(original)
    async def handle_async_request(self: Any, request: Any) -> Any:
        return await original(self, _with_key(request, _copy_httpx))

    return handle_async_request


def _wrap_aiohttp(original: Callable[..., Awaitable[Any]]) -> Method:
    @wraps(original)
    async def send(self: Any, *args: Any, **kwargs: Any) -> Any:
        # aiohttp creates these headers for this request only.
        attribute(str(self.url), lambda: self.headers)
        return await original(self, *args, **kwargs)

    return send


def _wrap_requests(original: Method) -> Method:
    @wraps(original)
    def send(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        response = original(self, _with_key(request, lambda given: given.copy()), *args, **kwargs)
        # The program sees its own request, without the session's key.
        response.request = request
        return response

    return send


# ------------------------------------------------------------------------------------------------- installation


@frozen
class _Hook:
    """A method of a library, identified by its class, and the wrapper for it."""

    owner: str
    method: str
    wrap: Wrap


_HTTPX = (
    _Hook("HTTPTransport", "handle_request", _wrap_httpx),
    _Hook("AsyncHTTPTransport", "handle_async_request", _wrap_httpx_async),
)
_HOOKS: Mapping[str, tuple[_Hook, ...]] = {
    "httpx": _HTTPX,
    "httpx2": _HTTPX,
    "aiohttp": (_Hook("ClientRequest", "send", _wrap_aiohttp),),
    "requests": (_Hook("adapters.HTTPAdapter", "send", _wrap_requests),),
}
_installing = Lock()
_installed: set[tuple[str, str]] = set()
"""Libraries and classes whose methods are wrapped."""


def install_hooks() -> None:
    """Pass all requests of the installed libraries to ``attribute``, from every task and thread of this process."""
    # Imported here, so that a program that imports one later finds it wrapped. It takes 0.2 s, once in a process.
    modules = [import_module(name) for name in _HOOKS if find_spec(name) is not None]
    with _installing:
        for module in modules:
            for hook in _HOOKS[module.__name__]:
                _install(module, hook)


def _install(module: ModuleType, hook: _Hook) -> None:
    if (module.__name__, hook.owner) in _installed:
        return
    _installed.add((module.__name__, hook.owner))
    owner: object = module
    for name in hook.owner.split("."):
        owner = getattr(owner, name, None)
    original = vars(owner).get(hook.method) if isinstance(owner, type) else None
    if original is None:
        # A version of the library that differs must not end the program; its requests stay unchanged.
        missing = f"{hook.owner}.{hook.method}"
        _log.warning("library_not_attributed", library=module.__name__, missing=missing)
        return
    setattr(owner, hook.method, hook.wrap(original))
