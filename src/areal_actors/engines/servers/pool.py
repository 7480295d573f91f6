"""The servers behind one engine: which of them serve, with which weights, and what is done when one is lost.

A server serves once it has answered, has the weights that were published last, and is as paused as the engine is. One
that does not answer, or fails a request, is taken out at once and brought back by its watcher, which asks for its label
first: a server that was started again has none of ours.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from hashlib import blake2b

import anyio
import httpx
from attrs import define, field

from areal_actors.domain import PauseMode
from areal_actors.engines.servers.broadcasting import Broadcasts
from areal_actors.engines.servers.config import ServerConfig
from areal_actors.engines.servers.dialect import ServerDialect, ServerFacts
from areal_actors.engines.servers.http import create_client
from areal_actors.engines.servers.publishing import Weights
from areal_actors.errors import ArealError, ConfigError, EngineError, ModelError
from areal_actors.telemetry import get_logger

__all__ = ["Server", "ServerPool", "open_servers", "read_key"]

_log = get_logger(__name__)


@define(eq=False)
class Server:
    """One server. Requests are generated through ``generating``, all else is said through ``control``."""

    url: str
    generating: httpx.AsyncClient
    control: httpx.AsyncClient
    facts: ServerFacts | None = None
    is_serving: bool = False
    failure: ArealError | None = None
    """Why it could not be brought to serve, last time."""
    is_doubtful: bool = False
    """Whether it may answer with weights that are not the present ones: nobody has looked, or it is being prepared."""
    is_spoiled: bool = False
    """Whether nobody knows which weights it has, whatever their label says: it began to load some."""
    suspected: anyio.Event = field(factory=anyio.Event)

    def suspect(self) -> None:
        """Take it out; its watcher looks after it at once."""
        self.is_serving, self.is_doubtful = False, True
        self.suspected.set()


@define(eq=False)
class ServerPool:
    """The servers, and the one lock under which they are paused, updated and brought back.

    ``weights`` are those that every serving server has, ``is_paused`` what the engine wants. ``num_loads`` grows
    before weights change anywhere.
    """

    dialect: ServerDialect
    config: ServerConfig
    servers: tuple[Server, ...]
    weights: Weights
    broadcasts: Broadcasts | None = None
    """How servers get weights that somebody keeps, where there is somebody."""
    is_paused: bool = False
    is_loading: bool = False
    num_loads: int = 0
    changed: anyio.Event = field(factory=anyio.Event)
    """Set when something happened that somebody may wait for; another takes its place."""
    control: anyio.Lock = field(factory=anyio.Lock)

    @property
    def serving(self) -> tuple[Server, ...]:
        """Those that may be asked to generate."""
        return tuple(server for server in self.servers if server.is_serving)

    @property
    def is_held(self) -> bool:
        """Whether nobody may begin to generate now."""
        return self.is_paused or self.is_loading

    @property
    def is_doubtful(self) -> bool:
        """Whether who does not choose the server may meet one without the present weights."""
        return any(server.is_doubtful for server in self.servers)

    def notify(self) -> None:
        """Wake all that wait for ``changed``."""
        self.changed.set()
        self.changed = anyio.Event()

    def choose(self, routing_key: str) -> Server | None:
        """The server for ``routing_key``: always the same while it serves; when it is lost, only its keys move."""
        return max(self.serving, key=lambda server: _weigh(server.url, routing_key), default=None)

    # --------------------------------------------------------------------------------------- pauses and weights

    async def pause(self) -> None:
        """Pause whoever serves. Hold ``control``."""
        await self._each(lambda server: self.dialect.pause(server.control, PauseMode.KEEP))

    async def resume(self) -> None:
        """Resume whoever serves. Hold ``control``."""
        await self._each(lambda server: self.dialect.resume(server.control))

    async def load(self, weights: Weights) -> None:
        """Give ``weights`` to whoever serves; the others get them when they are back. Hold ``control``.

        Raises ``ModelError`` if a server refuses them. Then all have the old ones.
        """
        self.num_loads += 1
        self.is_loading = True
        try:
            if not self.is_paused:
                await self.pause()
            refusals = await self._each(lambda server: self._update(server, weights))
            if refusals:
                await self._each(lambda server: self._update(server, self.weights))
                raise refusals[0]
            self.weights = weights
        finally:
            if not self.is_paused:
                await self.resume()
            self.is_loading = False
            self.notify()

    async def _update(self, server: Server, weights: Weights, *, is_sent: bool = True) -> None:
        """Have it load ``weights``: those that somebody keeps are sent if ``is_sent``, or written where that fails."""
        server.is_spoiled = True
        path = weights.path
        if path is None and not (is_sent and await self._send(server, weights)):
            assert self.broadcasts is not None
            path = await self.broadcasts.write(weights.version)
        if path is not None:
            await self.dialect.update_from_disk(server.control, path, version=weights.label)
        server.is_spoiled = False

    async def _send(self, server: Server, weights: Weights) -> bool:
        """Whether it has got them all."""
        assert self.broadcasts is not None
        assert server.facts is not None
        try:
            await self.broadcasts.send(
                server.url, server.control, server.facts, version=weights.version, buckets=weights.buckets
            )
        except EngineError as error:
            _log.warning("weights_not_received", url=server.url, version=weights.version, reason=str(error))
            return False
        return True

    async def _each(self, action: Callable[[Server], Awaitable[None]]) -> list[ModelError]:
        """Do it to all that serve, at once. Who fails is taken out; who refuses is returned."""
        refusals: list[ModelError] = []

        async def act(server: Server) -> None:
            try:
                await action(server)
            except ModelError as error:
                refusals.append(error)
            except EngineError as error:
                _log.warning("server_lost", url=server.url, reason=str(error))
                server.suspect()

        async with anyio.create_task_group() as tasks:
            for server in self.serving:
                tasks.start_soon(act, server)
        return refusals

    # -------------------------------------------------------------------------------------------------- watching

    async def watch(self, server: Server) -> None:
        """Look after one server, for ever: at intervals, and as soon as somebody suspects it."""
        while True:
            server.suspected = anyio.Event()
            if not await self._is_alive(server):
                if server.is_serving:
                    _log.warning("server_lost", url=server.url, reason="it does not answer")
                server.is_serving = False
            elif not server.is_serving:
                server.is_doubtful = True
                await self._bring_back(server)
            server.is_doubtful = False
            self.notify()
            with anyio.move_on_after(self.config.health_interval_seconds):
                await server.suspected.wait()

    async def _is_alive(self, server: Server) -> bool:
        with anyio.move_on_after(self.config.health_timeout_seconds):
            return await self.dialect.is_ready(server.control)
        return False

    async def _bring_back(self, server: Server) -> None:
        try:
            async with self.control:
                await self._prepare(server)
        except ArealError as error:
            server.failure = error
            _log.warning("server_not_ready", url=server.url, reason=str(error))
        else:
            server.failure, server.is_serving = None, True
            _log.info("server_serves", url=server.url, version=self.weights.version)

    async def _prepare(self, server: Server) -> None:
        """Give it the present weights, unless it has them, and leave it as paused as the engine is.

        They come from disk: a server that was started anew is in no group, and others are not to wait for one.
        """
        is_known, server.facts = server.facts is not None, await self.dialect.describe(server.control)
        # A label that it had before we came may be that of another run.
        has_label = server.facts.weight_version == self.weights.label
        if not is_known or server.failure is not None or server.is_spoiled or not has_label:
            self.num_loads += 1
            await self.dialect.pause(server.control, PauseMode.KEEP)
            if self.broadcasts is not None:
                await self.broadcasts.part(server.url, server.control)
            await self._update(server, self.weights, is_sent=False)
        if self.is_paused:
            await self.dialect.pause(server.control, PauseMode.KEEP)
        else:
            await self.dialect.resume(server.control)


def _weigh(url: str, routing_key: str) -> bytes:
    """Rendezvous hashing."""
    return blake2b(f"{url} {routing_key}".encode(), digest_size=8).digest()


@asynccontextmanager
async def open_servers(urls: Sequence[str], config: ServerConfig) -> AsyncIterator[tuple[Server, ...]]:
    """Clients for the servers at ``urls``."""
    key = read_key(config)
    async with AsyncExitStack() as stack:
        servers = []
        for url in urls:
            generating, control = [
                await stack.enter_async_context(create_client(url, api_key=key, read_timeout_seconds=seconds))
                for seconds in (config.read_timeout_seconds, config.update_timeout_seconds)
            ]
            servers.append(Server(url=url.rstrip("/"), generating=generating, control=control))
        yield tuple(servers)


def read_key(config: ServerConfig) -> str | None:
    """The key of the servers. Raises ``ConfigError`` if its file cannot be read."""
    if config.api_key_file is None:
        return None
    try:
        return config.api_key_file.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"api_key_file: {config.api_key_file} cannot be read: {error.strerror}") from error
