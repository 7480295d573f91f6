"""The application of the entry point: it finds the session of a request and forwards the request to that proxy.

It reads only the controller names in paths and keys, and the field in which an export names its session. All other
content is passed on unread, so new routes of the proxies need no changes here. ``EntryConfig`` has its settings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Any

import anyio
import httpx
from attrs import Attribute, field, frozen
from attrs.validators import ge, gt, le
from starlette.applications import Starlette

from areal_actors.cache.session import SHARD_NAME, shard_of
from areal_actors.lib.exact_json import parse_object
from areal_actors.proxy.access import read_key
from areal_actors.proxy.exchange import Exchange, Traffic
from areal_actors.proxy.forwarding import Backend, EveryPath, forward, segments_of


def _check_backends(_: Any, attribute: Attribute[Any], value: Mapping[str, str]) -> None:
    if not value:
        raise ValueError(f"{attribute.name} must name at least one proxy, as in 'a: http://127.0.0.1:8001'")
    for name, url in value.items():
        if re.fullmatch(SHARD_NAME, name) is None:
            raise ValueError(f"{attribute.name}: {name!r} must be 1 to 16 small letters and digits")
        if re.fullmatch(r"https?://[^/\s]+/?", url) is None:
            raise ValueError(f"{attribute.name}.{name}: {url!r} must be a URL without a path, as http://host:port")


@frozen(kw_only=True)
class EntryConfig:
    """Settings of the entry point: its address, its limits, and the proxies behind it."""

    backends: Mapping[str, str] = field(validator=_check_backends)
    """URLs of the proxies by their names; each proxy has the same name in its setting proxy.name."""
    host: str = "127.0.0.1"
    port: int = field(default=8080, validator=[ge(0), le(65535)])
    """Port to listen on; 0 takes any free port."""
    public_host: str | None = None
    """Name under which agents reach this machine, if it differs from ``host``."""
    max_body_bytes: int = field(default=16 * 2**20, validator=gt(0))
    body_timeout_seconds: float = field(default=60.0, validator=gt(0))
    connect_timeout_seconds: float = field(default=5.0, validator=gt(0))
    down_seconds: float = field(default=2.0, validator=gt(0))
    """How long a proxy that could not be reached is tried last."""
    drain_seconds: float = field(default=2.0, validator=ge(0))
    """How long requests in flight may continue when the entry point stops."""


class Targets:
    """The proxies, and the order in which they are tried."""

    def __init__(self, backends: Mapping[str, str], *, down_seconds: float = 2.0) -> None:
        self._backends = {name: Backend(name, url.rstrip("/")) for name, url in backends.items()}
        self._down_seconds = down_seconds
        self._down_until: dict[str, float] = {}
        self._next = 0

    def __iter__(self) -> Iterator[Backend]:
        """Iterate over all proxies, sorted by name."""
        return iter(sorted(self._backends.values(), key=lambda backend: backend.name))

    def home(self, *names: str) -> Backend | None:
        """Return the proxy of the first id or key that contains the name of a known proxy."""
        homes = (shard_of(name) for name in names)
        return next((self._backends[home] for home in homes if home in self._backends), None)

    def by_key(self, key: str, now: float) -> tuple[Backend, ...]:
        """Return the proxies in the order for ``key``, which is the same every time while all are up."""

        # Rendezvous hashing: keys are spread evenly, and each key keeps its order of proxies.
        def weight(backend: Backend) -> bytes:
            return blake2b(f"{backend.name}\0{key}".encode("utf-8", "surrogatepass"), digest_size=8).digest()

        return self._up_first(sorted(self._backends.values(), key=weight), now)

    def in_turn(self, now: float) -> tuple[Backend, ...]:
        """Return the proxies in order for a new session: round-robin, with recently unreachable ones last."""
        order = list(self._backends.values())
        start, self._next = self._next % len(order), self._next + 1
        return self._up_first(order[start:] + order[:start], now)

    def note_down(self, backend: Backend, now: float) -> None:
        """Record that the proxy could not be reached."""
        self._down_until[backend.name] = now + self._down_seconds

    def _up_first(self, order: list[Backend], now: float) -> tuple[Backend, ...]:
        return tuple(sorted(order, key=lambda backend: self._down_until.get(backend.name, 0.0) > now))


def create_entry_app(config: EntryConfig, *, client: httpx.AsyncClient, traffic: Traffic | None = None) -> Starlette:
    """Create the application; ``client`` sends all requests to the proxies and is not closed."""
    targets = Targets(config.backends, down_seconds=config.down_seconds)
    return Starlette(routes=[_Entry(config, targets, client, traffic)])


class _Entry(EveryPath):
    def __init__(
        self, config: EntryConfig, targets: Targets, client: httpx.AsyncClient, traffic: Traffic | None
    ) -> None:
        super().__init__(traffic)
        self._config = config
        self._targets = targets
        self._client = client

    async def serve(self, exchange: Exchange) -> None:
        """Report health, or forward the request."""
        config = self._config
        body = await exchange.read_body(max_bytes=config.max_body_bytes, timeout_seconds=config.body_timeout_seconds)
        if segments_of(exchange)[-1:] == ["health"]:
            async with exchange.cut_on_disconnect():
                await self._report_health(exchange)
        else:
            # The proxy of the session that the request names, else the proxies that may serve it, in order.
            key, home = read_key(exchange.headers), self._targets.home(*_names_in(exchange, body))
            if home is not None:
                backends: tuple[Backend, ...] = (home,)
            elif key is None or segments_of(exchange)[-1:] == ["start_session"]:
                backends = self._targets.in_turn(anyio.current_time())
            else:
                backends = self._targets.by_key(key, anyio.current_time())
            async with exchange.cut_on_disconnect():
                await forward(
                    exchange,
                    body=body,
                    backends=lambda: backends,
                    client=self._client,
                    on_unreachable=lambda backend: self._targets.note_down(backend, anyio.current_time()),
                )

    async def _report_health(self, exchange: Exchange) -> None:
        """Answer 200 while at least one proxy can serve, 503 otherwise."""
        statuses: dict[str, str] = {}

        async def ask(backend: Backend) -> None:
            try:
                response = await self._client.get(f"{backend.url}/health", timeout=self._config.connect_timeout_seconds)
            except httpx.HTTPError:
                self._targets.note_down(backend, anyio.current_time())
                statuses[backend.name] = "unreachable"
            else:
                statuses[backend.name] = "ok" if response.is_success else "unavailable"

        async with anyio.create_task_group() as tasks:
            for backend in self._targets:
                tasks.start_soon(ask, backend)
        is_ready = "ok" in statuses.values()
        document = {"status": "ok" if is_ready else "unavailable", "proxies": dict(sorted(statuses.items()))}
        await exchange.send_json(200 if is_ready else 503, document)


def _names_in(exchange: Exchange, body: bytes) -> Iterator[str]:
    """Return what may name a session in a request, in the order in which it counts: path, query, key and body."""
    yield from segments_of(exchange)
    yield exchange.query.get("session_id", "")
    yield read_key(exchange.headers) or ""
    if b'"session_id"' in body:
        named = parse_object(body).get("session_id")
        yield named if isinstance(named, str) else ""
