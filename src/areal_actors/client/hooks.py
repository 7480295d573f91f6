"""Interception of outgoing requests of other libraries: httpx, httpx2, aiohttp and requests.

Each library has one method that sends a single request over a connection, after redirects, authentication and base URLs
were handled and before the next redirect; that method is wrapped. A redirect to another server therefore never carries
a session's key, and the objects that programs hold (clients, requests, their headers) are never changed. Outside of a
session the wrappers do nothing.

``hooked`` installs the wrappers while it is open, once, however many are open at the same time. A library that is
imported in the meantime is wrapped right after its import; no library is imported for this purpose.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from threading import RLock
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
LIBRARIES = tuple(_HOOKS)
"""The libraries whose requests are attributed."""


@frozen(eq=False)
class _Installed:
    """A method that was replaced."""

    owner: type
    method: str
    original: Method
    wrapper: Method

    @property
    def is_outermost(self) -> bool:
        """Whether the method is still our wrapper, not wrapped again by other code."""
        return vars(self.owner).get(self.method) is self.wrapper


class _Installation:
    """The replaced methods of this process, and the number of their users."""

    def __init__(self) -> None:
        # Reentrant, because an import may happen while libraries are being wrapped.
        self._lock = RLock()
        self._num_users = 0
        self._installed: dict[tuple[str, str], _Installed] = {}
        self._watcher = _ImportWatcher(self._install)

    def acquire(self) -> None:
        """Wrap the libraries that are already imported, and watch for imports of the others."""
        with self._lock:
            self._num_users += 1
            if self._num_users == 1:
                sys.meta_path.insert(0, self._watcher)
        for name in LIBRARIES:
            if name in sys.modules:
                # Waits for another thread that is importing it.
                self._install(import_module(name))

    def release(self) -> None:
        """Restore the original methods after the last user."""
        with self._lock:
            self._num_users -= 1
            if self._num_users:
                return
            sys.meta_path.remove(self._watcher)
            for name, done in tuple(self._installed.items()):
                # A method that other code has wrapped since must stay. Our wrapper inside it does nothing without a
                # session, and is used again by the next user.
                if done.is_outermost:
                    setattr(done.owner, done.method, done.original)
                    del self._installed[name]

    def _install(self, module: ModuleType) -> None:
        with self._lock:
            if not self._num_users:
                return
            for hook in _HOOKS[module.__name__]:
                if (module.__name__, hook.owner) in self._installed:
                    continue
                owner: Any = module
                for name in hook.owner.split("."):
                    owner = getattr(owner, name, None)
                original = vars(owner).get(hook.method) if isinstance(owner, type) else None
                if original is None:
                    # A version of the library that differs must not end the program; its requests stay unchanged.
                    missing = f"{hook.owner}.{hook.method}"
                    _log.warning("library_not_attributed", library=module.__name__, missing=missing)
                    continue
                wrapper = hook.wrap(original)
                setattr(owner, hook.method, wrapper)
                self._installed[module.__name__, hook.owner] = _Installed(owner, hook.method, original, wrapper)


class _ImportWatcher(MetaPathFinder):
    """Reports the import of one of the libraries; the other finders find it, and its own loader loads it."""

    def __init__(self, then: Callable[[ModuleType], None]) -> None:
        self._then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec that the other finders return, with a loader that reports the import."""
        if fullname not in _HOOKS:
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next((spec for finder in others if (spec := finder.find_spec(fullname, path, target)) is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _ReportingLoader(spec.loader, self._then)
        return spec


class _ReportingLoader(Loader):
    """A loader that delegates to ``inner``, leaves the module as ``inner`` would, and reports the import."""

    def __init__(self, inner: Loader, then: Callable[[ModuleType], None]) -> None:
        self._inner = inner
        self._then = then

    def __getattr__(self, name: str) -> Any:
        # Code that only inspects a module's spec asks its loader for files.
        return getattr(self._inner, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Return the module that ``inner`` creates."""
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module, then report it."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        module.__loader__ = self._inner
        self._inner.exec_module(module)
        self._then(module)


_installation = _Installation()


@contextmanager
def hooked() -> Iterator[None]:
    """Pass requests of ``LIBRARIES`` to ``attribute`` inside the block, from every task and thread of the process."""
    _installation.acquire()
    try:
        yield
    finally:
        _installation.release()
