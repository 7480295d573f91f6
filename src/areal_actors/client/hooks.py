"""Where requests of other libraries are seen on their way out: httpx, httpx2, aiohttp and requests.

Each library has one method that sends a single request over a connection, after redirects, authentication and base URLs
were dealt with and before the next redirect is: that one is wrapped. So a redirect to another server never carries a
session's key, and the objects that programs hold (clients, requests, their headers) are never changed. Outside of a
session the wrappers do nothing.

``hooked`` installs them while it is open, once, however many are open at the same time; a library that is imported
meanwhile is wrapped as soon as it was imported. What is not installed is not looked for.
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
from areal_actors.telemetry import get_logger

__all__ = ["LIBRARIES", "hooked"]

_log = get_logger(__name__)

Method = Callable[..., Any]
Wrap = Callable[[Method], Method]


# ----------------------------------------------------------------------------------------------------- wrappers


def _with_key(request: Any, copy: Callable[[Any], Any]) -> Any:
    """A copy of ``request`` with the session's key, or the same request if it is not ours.

    A copy, because the next request of a redirect is made from the one that the library holds.
    """
    copies: list[Any] = []

    def headers() -> MutableMapping[str, str]:
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
        attribute(str(self.url), lambda: self.headers)  # they were made for this sending alone
        return await original(self, *args, **kwargs)

    return send


def _wrap_requests(original: Method) -> Method:
    @wraps(original)
    def send(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        response = original(self, _with_key(request, lambda given: given.copy()), *args, **kwargs)
        response.request = request
        return response

    return send


# ------------------------------------------------------------------------------------------------- installation


@frozen
class _Hook:
    """A method of a library, by the class that has it, and what is put around it."""

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
        """Whether nobody has put anything around it since."""
        return vars(self.owner).get(self.method) is self.wrapper


class _Installation:
    """All that is replaced in this process, and how many need it."""

    def __init__(self) -> None:
        self._lock = RLock()  # an import may happen while libraries are being wrapped
        self._num_users = 0
        self._installed: dict[tuple[str, str], _Installed] = {}
        self._watcher = _ImportWatcher(self._install)

    def acquire(self) -> None:
        """Wrap what is imported, and watch for the rest."""
        with self._lock:
            self._num_users += 1
            if self._num_users == 1:
                sys.meta_path.insert(0, self._watcher)
        for name in LIBRARIES:
            if name in sys.modules:
                self._install(import_module(name))  # waits for another thread that is in the middle of importing it

    def release(self) -> None:
        """Undo it after the last user."""
        with self._lock:
            self._num_users -= 1
            if self._num_users:
                return
            sys.meta_path.remove(self._watcher)
            for name, done in tuple(self._installed.items()):
                # What somebody else has wrapped since must stay; ours is idle there, and serves the next time.
                if done.is_outermost:
                    setattr(done.owner, done.method, done.original)
                    del self._installed[name]

    def _install(self, module: ModuleType) -> None:
        with self._lock:
            if not self._num_users:
                return
            for hook in _HOOKS[module.__name__]:
                self._wrap(module, hook)

    def _wrap(self, module: ModuleType, hook: _Hook) -> None:
        if (module.__name__, hook.owner) in self._installed:
            return
        owner = _find(module, hook.owner)
        original = None if owner is None else vars(owner).get(hook.method)
        if owner is None or original is None:
            _log.warning("library_not_attributed", library=module.__name__, missing=f"{hook.owner}.{hook.method}")
            return
        wrapper = hook.wrap(original)
        setattr(owner, hook.method, wrapper)
        done = _Installed(owner, hook.method, original, wrapper)
        self._installed[module.__name__, hook.owner] = done


def _find(module: ModuleType, path: str) -> type | None:
    found: Any = module
    for name in path.split("."):
        found = getattr(found, name, None)
    return found if isinstance(found, type) else None


class _ImportWatcher(MetaPathFinder):
    """Tells when one of the libraries was imported; the other finders find it, and its own loader loads it."""

    def __init__(self, then: Callable[[ModuleType], None]) -> None:
        self._then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The specification that the others find, with a loader that reports."""
        if fullname not in _HOOKS:
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next((spec for finder in others if (spec := finder.find_spec(fullname, path, target)) is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _ReportingLoader(spec.loader, self._then)
        return spec


class _ReportingLoader(Loader):
    """Loads as ``inner`` does, leaves the module as ``inner`` would, and reports."""

    def __init__(self, inner: Loader, then: Callable[[ModuleType], None]) -> None:
        self._inner = inner
        self._then = then

    def __getattr__(self, name: str) -> Any:
        # Those who only look for a module ask its loader for files.
        return getattr(self._inner, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """What ``inner`` creates."""
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, and report."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        module.__loader__ = self._inner
        self._inner.exec_module(module)
        self._then(module)


_installation = _Installation()


@contextmanager
def hooked() -> Iterator[None]:
    """Inside, requests of ``LIBRARIES`` are brought to ``attribute``, from whatever task or thread they come."""
    _installation.acquire()
    try:
        yield
    finally:
        _installation.release()
