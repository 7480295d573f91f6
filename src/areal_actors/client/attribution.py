"""Which session a request belongs to: a context variable, and the one rule by which keys are attached.

``hooks`` brings every outgoing request here. A request is ours if its URL lies below the base URL of a session that is
open around the code that sends it; it is given the key of that session. All others pass as they are.

Context variables are copied into tasks, and into threads that ``asyncio.to_thread`` and ``anyio.to_thread`` start. What
is started without a copy (``loop.run_in_executor``, a bare ``threading.Thread``) belongs to no session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from ipaddress import ip_address
from urllib.parse import urlsplit

from attrs import field, frozen

from areal_actors.domain import SessionId
from areal_actors.errors import ConfigError

__all__ = ["Attribution", "Origin", "attribute", "attributed_to", "parse_root", "unattributed"]

_DEFAULT_PORTS = {"http": 80, "https": 443}
_KEY_HEADER = "x-api-key"
_TOKEN_LENGTH = 22
"""What makes the id of a session unguessable: 16 random bytes in base64, after a hyphen, or a home's name and a dot."""
_OPENED_BY_OTHER_KEYS = frozenset({"start_session", "grant_capacity", "export_trajectories"})
"""The last segments of routes that no session's key opens."""


@frozen(kw_only=True)
class Origin:
    """Where a server is: what two URLs of one server have in common, however they are written."""

    scheme: str
    host: str
    port: int

    @classmethod
    def of(cls, url: str) -> Origin | None:
        """The origin of an absolute URL of HTTP; ``None`` for anything else."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            return None
        scheme = parts.scheme.lower()
        if scheme not in _DEFAULT_PORTS or not parts.hostname:
            return None
        return cls(scheme=scheme, host=_canonical(parts.hostname), port=port or _DEFAULT_PORTS[scheme])


def _canonical(host: str) -> str:
    """One name for this machine's many: ``localhost``, ``127.0.0.1``, ``::1``, and ``0.0.0.0``, which leads there."""
    host = host.lower().rstrip(".")
    try:
        address = ip_address(host)
    except ValueError:
        return host
    return "localhost" if address.is_loopback or address.is_unspecified else str(address)


def parse_root(base_url: str) -> str:
    """The proxy's URL without ``/v1`` at its end, however often it stands there.

    Raises:
        ConfigError: it is no absolute URL of HTTP.
    """
    root = base_url.strip().rstrip("/")
    while root.endswith("/v1"):
        root = root.removesuffix("/v1").rstrip("/")
    if Origin.of(root) is None:
        raise ConfigError(f"base_url: {base_url!r} is no URL of a proxy; write one such as 'http://127.0.0.1:8080'.")
    return root


@frozen(kw_only=True)
class Attribution:
    """An open session, as requests see it."""

    session: SessionId
    key: str = field(repr=False)
    origin: Origin
    path: str
    """What the proxy's URL has before its routes, such as ``/train`` behind another server; mostly nothing."""

    @classmethod
    def to_session(cls, session: SessionId, key: str, root: str) -> Attribution:
        """To ``session`` at the proxy whose URL is ``root`` (see ``parse_root``)."""
        origin = Origin.of(root)
        assert origin is not None
        return cls(session=session, key=key, origin=origin, path=urlsplit(root).path.rstrip("/"))

    def covers(self, url: str) -> bool:
        """Whether ``url`` is served by this session's proxy."""
        return Origin.of(url) == self.origin and f"{urlsplit(url).path}/".startswith(f"{self.path}/")

    def key_for(self, url: str) -> str | None:
        """The key that a request to a covered ``url`` needs; ``None`` if it is to stay as it is.

        It is ours, unless the URL names a session: then it is the one of that session, if we know it.
        """
        path = urlsplit(url).path.removeprefix(self.path)
        segments = [segment for segment in path.split("/") if segment and segment != "v1"]
        if not segments or segments[-1] in _OPENED_BY_OTHER_KEYS:
            return None
        if _is_session(segments[0]):
            named = _open_sessions.get(segments[0])
            return None if named is None or named.origin != self.origin else named.key
        return self.key


def _is_session(segment: str) -> bool:
    return segment in _open_sessions or segment[-_TOKEN_LENGTH - 1 : -_TOKEN_LENGTH] in {"-", "."}


_current: ContextVar[tuple[Attribution, ...]] = ContextVar("areal_actors_sessions", default=())
"""The sessions around the code that runs, the innermost first. There may be several proxies among them."""
_open_sessions: dict[str, Attribution] = {}
"""By id, for URLs that name a session; an entry belongs to the ``attributed_to`` that made it."""


def attribute(url: str, headers: Callable[[], MutableMapping[str, str]]) -> None:
    """Write the session's key into the headers of a request to ``url``, if it is ours.

    Args:
        url: where the request goes.
        headers: gives the headers to change, which compare names without case; asked only if there is something to
            write.
    """
    session = next((session for session in _current.get() if session.covers(url)), None)
    key = None if session is None else session.key_for(url)
    if key is None:
        return
    written = headers()
    written["Authorization"] = f"Bearer {key}"
    if _KEY_HEADER in written:
        written[_KEY_HEADER] = key


@contextmanager
def attributed_to(session: Attribution) -> Iterator[None]:
    """Inside, requests to the proxy belong to ``session``."""
    _open_sessions[session.session] = session
    token = _current.set((session, *_current.get()))
    try:
        yield
    finally:
        _open_sessions.pop(session.session, None)
        # A block may be left in another context than it was entered in, as generators of test fixtures are; there,
        # nothing was set.
        with suppress(ValueError):
            _current.reset(token)


@contextmanager
def unattributed() -> Iterator[None]:
    """Inside, requests are sent as they are: for those who bring the right key themselves."""
    token = _current.set(())
    try:
        yield
    finally:
        _current.reset(token)
