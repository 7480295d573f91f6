"""Attribution of requests to sessions: a context variable, and the rule by which keys are attached.

``hooks`` passes every outgoing request to this module. A request is attributed if its URL is below the base URL of a
session that is open around the code that sends it; it then gets the key of that session. All other requests are
unchanged.

Context variables are copied into tasks, and into threads that ``asyncio.to_thread`` and ``anyio.to_thread`` start. Code
that is started without a copy (``loop.run_in_executor``, a bare ``threading.Thread``) belongs to no session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from ipaddress import ip_address
from typing import TypeAlias
from urllib.parse import urlsplit

from attrs import field, frozen

from areal_actors.domain import SessionId
from areal_actors.errors import ConfigError

_DEFAULT_PORTS = {"http": 80, "https": 443}
_KEY_HEADER = "x-api-key"
_TOKEN_LENGTH = 22
"""Length of the random part of a session id: 16 random bytes in base64."""
_OPENED_BY_OTHER_KEYS = frozenset({"start_session", "grant_capacity", "export_trajectories"})
"""The last segments of routes that a session's key does not open."""


Origin: TypeAlias = tuple[str, str, int]
"""Scheme, host and port of a server: the common part of all URLs of one server, in canonical form."""


def origin_of(url: str) -> Origin | None:
    """Return the origin of an absolute HTTP URL, or ``None`` for anything else."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return None
    scheme = parts.scheme.lower()
    if scheme not in _DEFAULT_PORTS or not parts.hostname:
        return None
    host = parts.hostname.lower().rstrip(".")
    with suppress(ValueError):  # a name
        address = ip_address(host)
        # One name for all of this machine's loopback: 127.0.0.1, ::1, and 0.0.0.0, which reaches it.
        host = "localhost" if address.is_loopback or address.is_unspecified else str(address)
    return scheme, host, port or _DEFAULT_PORTS[scheme]


def role_base_url(base_url: str, role: str) -> str:
    """Return the base URL at which a session's requests have ``role``: those of a user simulator, or of a judge.

    ``base_url`` is that of a session, as an agent gets it. Raises ``ConfigError`` for a URL that names no session.
    """
    parts = urlsplit(base_url)
    segments = parts.path.split("/")
    named = [index for index, segment in enumerate(segments) if segment and segment != "v1"]
    if not named:
        raise ConfigError(f"{base_url!r} names no session, whose requests could have a role; use a session's base_url.")
    session = segments[named[-1]].partition("@")[0]
    segments[named[-1]] = f"{session}@{role}"
    return parts._replace(path="/".join(segments)).geturl()


def parse_root(base_url: str) -> str:
    """Return the proxy's URL without any trailing ``/v1`` segments.

    Raises:
        ConfigError: it is not an absolute HTTP URL.
    """
    root = base_url.strip().rstrip("/")
    while root.endswith("/v1"):
        root = root.removesuffix("/v1").rstrip("/")
    if origin_of(root) is None:
        raise ConfigError(f"base_url: {base_url!r} is not a URL of a proxy; write one such as 'http://127.0.0.1:8080'.")
    return root


@frozen(kw_only=True)
class Attribution:
    """An open session, with the information to attribute requests to it."""

    session: SessionId
    key: str = field(repr=False)
    origin: Origin
    path: str
    """Path prefix of the proxy's URL, such as ``/train`` behind another server; usually empty."""

    @classmethod
    def to_session(cls, session: SessionId, key: str, root: str) -> Attribution:
        """Create the attribution to ``session`` at the proxy whose URL is ``root`` (see ``parse_root``)."""
        origin = origin_of(root)
        assert origin is not None
        return cls(session=session, key=key, origin=origin, path=urlsplit(root).path.rstrip("/"))

    def covers(self, url: str) -> bool:
        """Return whether this session's proxy serves ``url``."""
        return origin_of(url) == self.origin and f"{urlsplit(url).path}/".startswith(f"{self.path}/")

    def key_for(self, url: str) -> str | None:
        """Return the key for a request to a covered ``url``, or ``None`` if the request should not be changed.

        If the URL names a session, it is the key of that session, if it is open in this process; otherwise it is this
        session's key.
        """
        path = urlsplit(url).path.removeprefix(self.path)
        segments = [segment for segment in path.split("/") if segment and segment != "v1"]
        if not segments or segments[-1] in _OPENED_BY_OTHER_KEYS:
            return None
        # A role may follow the session.
        first = segments[0].partition("@")[0]
        # The random token of a session id follows a hyphen, or the name of a controller process and a dot.
        if first in _open_sessions or first[-_TOKEN_LENGTH - 1 : -_TOKEN_LENGTH] in {"-", "."}:
            named = _open_sessions.get(first)
            return None if named is None or named.origin != self.origin else named.key
        return self.key


_current: ContextVar[tuple[Attribution, ...]] = ContextVar("areal_actors_sessions", default=())
"""The sessions around the running code, innermost first. They may belong to several proxies."""
_open_sessions: dict[str, Attribution] = {}
"""Open sessions by id, for URLs that name a session; ``attributed_to`` adds and removes its own entry."""


def attribute(url: str, headers: Callable[[], MutableMapping[str, str]]) -> None:
    """Write the session's key into the headers of a request to ``url``, if the request belongs to a session.

    Args:
        url: the URL of the request.
        headers: returns the headers to change, a mapping with case-insensitive names; called only if there is a key to
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
    """Attribute the requests to the proxy inside the block to ``session``."""
    _open_sessions[session.session] = session
    token = _current.set((session, *_current.get()))
    try:
        yield
    finally:
        _open_sessions.pop(session.session, None)
        # A block may be left in another context than it was entered in, as generators of test fixtures are. The
        # variable was never set there, and resetting it raises ValueError.
        with suppress(ValueError):
            _current.reset(token)


@contextmanager
def unattributed() -> Iterator[None]:
    """Send the requests inside the block unchanged, for callers that supply the right key themselves."""
    token = _current.set(())
    try:
        yield
    finally:
        _current.reset(token)
