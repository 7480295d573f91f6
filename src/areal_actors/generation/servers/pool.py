"""The servers behind one engine: which of them are ready, with which weights, and how lost servers are replaced.

A server is ready once it has answered, has the weights that were published last, and is paused exactly if the engine
is. A server that refuses connections, or fails a request, is removed at once; one that is silent (its process is
stopped or hangs) after two health checks. What waits for an answer of a silent server is cancelled, so that requests
continue elsewhere and the other servers need not wait for it. A process that was started here and stays silent is
killed.

The watcher of a server brings it back after asking for the label of its weights: a server that was restarted has none
of our labels.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Protocol, TypeVar

import anyio
import httpx
from attrs import define, field

from areal_actors.domain import PauseMode
from areal_actors.errors import ArealError, ConfigError, EngineError, ModelError
from areal_actors.generation.routing import ReplicaRegistry, ReplicaStatus
from areal_actors.generation.servers.adapters import Adapters
from areal_actors.generation.servers.broadcasting import Broadcasts
from areal_actors.generation.servers.config import ServerConfig
from areal_actors.generation.servers.dialect import ServerDialect, ServerFacts
from areal_actors.generation.servers.http import create_client
from areal_actors.generation.servers.publishing import Weights
from areal_actors.kernel.failure import open_tasks
from areal_actors.lib.telemetry import get_logger
from areal_actors.messages import ReplicaState

__all__ = [
    "Server",
    "ServerPool",
    "ServerProcesses",
    "leave_groups_at_end",
    "open_gateway",
    "open_servers",
    "open_watchers",
    "read_key",
    "unload_adapters_at_end",
    "wait_until_ready",
]

_log = get_logger(__name__)

_NUM_SILENT_CHECKS = 2
"""Health checks in a row that a server leaves without an answer before it counts as silent: one may be unlucky."""

T = TypeVar("T")


@define(eq=False, kw_only=True)
class Server(ReplicaStatus):
    """One server, named by its URL. ``generating`` is the client for generations, ``control`` the one for the rest."""

    generating: httpx.AsyncClient
    control: httpx.AsyncClient
    facts: ServerFacts | None = None
    failure: ArealError | None = None
    """Why the last attempt to prepare it failed."""
    may_be_outdated: bool = False
    """Whether it may answer with outdated weights: it was not checked yet, or is being prepared."""
    silent_since: float | None = None
    """When the first health check began that it left without an answer; ``None`` if it answered the last one."""
    has_served: bool = False
    """Whether its process has served: one that starts may be silent for minutes."""
    _waiting: set[anyio.CancelScope] = field(factory=set, init=False)

    @property
    def url(self) -> str:
        """Where it is."""
        return self.name

    @property
    def capacity(self) -> int | None:
        """Number of generations that it can run at once, if it is known."""
        return None if self.facts is None else self.facts.max_concurrent

    def mark_unhealthy(self) -> None:
        """Take the server out until its watcher, which this wakes, has checked it and its weights."""
        self.state, self.may_be_outdated = ReplicaState.JOINING, True
        self.wakeup.set()

    async def until_silent(self, answer: Awaitable[T]) -> T:
        """Await an answer of the server. Raises ``EngineError`` if the server is silent before it comes."""
        with anyio.CancelScope() as scope:
            self._waiting.add(scope)
            try:
                return await answer
            finally:
                self._waiting.discard(scope)
        raise EngineError(f"{self.url} does not answer any more.")

    def give_up(self) -> None:
        """Cancel everything that waits in ``until_silent``."""
        for scope in self._waiting:
            scope.cancel()


@define(eq=False, kw_only=True)
class ServerPool(ReplicaRegistry[Server]):
    """The servers, and the lock under which they are paused, updated and brought back.

    ``weights`` are those of every ready server; ``is_paused`` is the state that the engine requests. ``num_loads`` is
    incremented before weights change on any server.
    """

    dialect: ServerDialect
    config: ServerConfig
    weights: Weights
    broadcasts: Broadcasts | None = None
    """Sends weights from the weight store to servers, if the run has a store."""
    adapters: Adapters | None = None
    """Loads adapters into servers, if they keep their weights and are given adapters."""
    processes: ServerProcesses | None = None
    """The processes of servers that were started here."""
    is_paused: bool = False
    is_loading: bool = False
    num_loads: int = 0
    control: anyio.Lock = field(factory=anyio.Lock)

    @property
    def servers(self) -> tuple[Server, ...]:
        """All servers, whether they serve or not."""
        return tuple(self.by_name.values())

    @property
    def is_held(self) -> bool:
        """Return whether no generation may begin now."""
        return self.is_paused or self.is_loading

    @property
    def may_be_outdated(self) -> bool:
        """Return whether a request through a gateway, which chooses the server, may reach one with outdated weights."""
        return any(server.may_be_outdated for server in self.servers)

    # --------------------------------------------------------------------------------------- pauses and weights

    async def pause(self) -> None:
        """Pause all ready servers. The caller holds ``control``."""
        await self._each(lambda server: self.dialect.pause(server.control, PauseMode.KEEP))

    async def resume(self) -> None:
        """Resume all ready servers. The caller holds ``control``."""
        await self._each(lambda server: self.dialect.resume(server.control))

    async def load(self, weights: Weights) -> None:
        """Load ``weights`` into all ready servers; others get them when they come back.

        The caller holds ``control``. Raises ``ModelError`` if a server rejects the weights. All servers then have the
        old ones.
        """
        # Before any server changes: attempts that began earlier hold tokens back until their versions are reported.
        self.num_loads += 1
        self.is_loading = True
        try:
            if not self.is_paused:
                await self.pause()
            refusals = await self._update_all(weights)
            if refusals:
                # Servers that accepted the new weights get the old ones back.
                await self._update_all(self.weights)
                for server in self.serving:
                    if server.version is None:
                        _log.warning("server_lost", url=server.url, reason="it refuses the former weights as well")
                        server.mark_unhealthy()
                raise refusals[0]
            self.weights = weights
        finally:
            if not self.is_paused:
                await self.resume()
            self.is_loading = False
            self.notify()

    async def load_adapter(self, weights: Weights, *, used: Collection[str]) -> None:
        """Load the adapter of ``weights`` into all ready servers, which go on sampling; others get it later.

        Older adapters are unloaded unless they are in ``used``. The caller holds ``control``. Raises ``ModelError`` if
        a server rejects the adapter; no request uses it then.
        """
        adapters, adapter, former = self.adapters, weights.adapter, self.weights.adapter
        assert adapters is not None
        assert adapter is not None
        kept = {*used, *(each.name for each in (adapter, former) if each is not None)}

        async def update(server: Server) -> None:
            # First, because servers have room for a few adapters only.
            await adapters.unload_unused(server.control, kept)
            await adapters.dialect.load_adapter(server.control, adapter)

        if refusals := await self._each(update):
            await self._each(lambda server: adapters.unload_unused(server.control, kept - {adapter.name}))
            raise refusals[0]
        self.weights = weights
        for server in self.serving:
            server.version = weights.version
        self.notify()

    async def unload_adapters(self) -> None:
        """Unload all adapters of this engine from servers that answer."""
        adapters = self.adapters
        if adapters is not None:
            await self._each(lambda server: adapters.unload_unused(server.control, ()))

    async def _update_all(self, weights: Weights) -> list[ModelError]:
        """Load ``weights`` into all ready servers; return rejections.

        Weights in the store are sent to all of them at once. Servers that do not receive them load them from disk.
        """
        servers = self.serving
        for server in servers:
            # Unknown until the load is complete: an interrupted load leaves undefined weights under an old label.
            server.version = None
        if weights.path is None and servers:
            assert self.broadcasts is not None
            receiving = [(server.url, server.control, server.facts) for server in servers if server.facts is not None]
            lost = await self.broadcasts.send(receiving, version=weights.version, buckets=weights.buckets)
            for url, error in lost.items():
                _log.warning("weights_not_received", url=url, version=weights.version, reason=str(error))
            for server in servers:
                server.version = None if server.url in lost else weights.version
        return await self._each(
            lambda server: self._update(server, weights), only=lambda server: server.version is None
        )

    async def _update(self, server: Server, weights: Weights) -> None:
        """Load ``weights`` into a server from disk, to which those in the store are written if necessary."""
        server.version = None
        path = weights.path
        if path is None:
            assert self.broadcasts is not None
            path = await self.broadcasts.write(weights.version)
        await self.dialect.update_from_disk(server.control, path, version=weights.label)
        server.version = weights.version

    async def _each(
        self, action: Callable[[Server], Awaitable[None]], *, only: Callable[[Server], bool] = lambda _: True
    ) -> list[ModelError]:
        """Run ``action`` for all ready servers concurrently, or ``only`` for some.

        Servers that fail are removed; rejections are returned.
        """
        refusals: list[ModelError] = []

        async def act(server: Server) -> None:
            try:
                await server.until_silent(action(server))
            except ModelError as error:
                refusals.append(error)
            except EngineError as error:
                _log.warning("server_lost", url=server.url, reason=str(error))
                server.mark_unhealthy()

        async with anyio.create_task_group() as tasks:
            for server in filter(only, self.serving):
                tasks.start_soon(act, server)
        return refusals

    # -------------------------------------------------------------------------------------------------- watching

    async def watch(self, server: Server) -> None:
        """Check one server forever: at intervals, and as soon as it is marked as unhealthy."""
        while True:
            server.wakeup = anyio.Event()
            # Servers that serve are asked as well: one that dies between two generations must not get the next one.
            if not await self._answers(server):
                if server.is_serving:
                    _log.warning("server_lost", url=server.url, reason="it does not answer")
                server.state = ReplicaState.JOINING
            elif not server.is_serving:
                server.may_be_outdated = True
                try:
                    async with anyio.create_task_group() as tasks:
                        # All servers wait for the one that holds ``control``.
                        tasks.start_soon(self._check_while_preparing, server)
                        async with self.control:
                            await server.until_silent(self._prepare(server))
                        tasks.cancel_scope.cancel()
                except* ArealError as errors:
                    server.failure = next(error for error in errors.exceptions if isinstance(error, ArealError))
                    _log.warning("server_not_ready", url=server.url, reason=str(server.failure))
                else:
                    server.failure, server.state, server.has_served = None, ReplicaState.SERVING, True
                    _log.info("server_serves", url=server.url, version=self.weights.version)
            server.may_be_outdated = False
            self.notify()
            with anyio.move_on_after(self.config.health_interval_seconds):
                await server.wakeup.wait()

    async def _answers(self, server: Server) -> bool:
        """Return whether a server answers. If it is silent, give up on what waits for it, and kill it in the end."""
        began = anyio.current_time()
        for _ in range(_NUM_SILENT_CHECKS):
            with anyio.move_on_after(self.config.health_timeout_seconds):
                is_ready = await self.dialect.is_ready(server.control)
                server.silent_since = None
                # A server that refuses connections is started again, or has not begun to listen.
                server.has_served = server.has_served and is_ready
                return is_ready
        silent_since = server.silent_since = began if server.silent_since is None else server.silent_since
        # Behind a gateway, any request may be at this server.
        for each in (server,) if self.config.gateway_url is None else self.servers:
            each.give_up()
        silent_seconds = anyio.current_time() - silent_since
        if self.processes is not None and server.has_served and silent_seconds >= self.config.hang_timeout_seconds:
            _log.warning("server_killed", url=server.url, reason=f"it has not answered for {silent_seconds:.0f} s")
            self.processes.kill(server.url)
            server.has_served = False
        return False

    async def _check_while_preparing(self, server: Server) -> None:
        """Give up on a server that is silent while it is prepared."""
        # One that has just started may be silent for long while it loads its first weights.
        is_alive = server.has_served
        while is_alive:
            await anyio.sleep(self.config.health_interval_seconds)
            is_alive = await self._answers(server)

    async def _prepare(self, server: Server) -> None:
        """Load the current weights into a server, unless it has them, and pause or resume it as the engine is.

        The weights come from disk: a restarted server is in no group, and others must not wait for one to form.
        """
        server.facts = await self.dialect.describe(server.control)
        if self.adapters is not None:
            await self.adapters.prepare(server.control, server.facts, self.weights.adapter)
            server.version = self.weights.version
        # The label shows a restart that was not noticed. It is not enough: before the first contact, another run may
        # have set it, and an interrupted load leaves undefined weights under it; both have no version here.
        has_label = server.facts.weight_version == self.weights.label
        is_current = has_label and server.failure is None and server.version == self.weights.version
        if self.adapters is None and not is_current:
            self.num_loads += 1
            # Requests that still run there must not sample from weights that are half loaded.
            await self.dialect.pause(server.control, PauseMode.KEEP)
            if self.broadcasts is not None:
                await self.broadcasts.forget(server.url, server.control)
            await self._update(server, self.weights)
        if self.is_paused:
            await self.dialect.pause(server.control, PauseMode.KEEP)
        else:
            await self.dialect.resume(server.control)


@asynccontextmanager
async def open_servers(urls: Sequence[str], config: ServerConfig) -> AsyncIterator[tuple[Server, ...]]:
    """Open clients for the servers at ``urls``."""
    key = read_key(config)
    async with AsyncExitStack() as stack:
        servers = []
        for url in urls:
            generating, control = [
                await stack.enter_async_context(create_client(url, api_key=key, read_timeout_seconds=seconds))
                for seconds in (config.read_timeout_seconds, config.update_timeout_seconds)
            ]
            servers.append(Server(name=url.rstrip("/"), generating=generating, control=control))
        yield tuple(servers)


def read_key(config: ServerConfig) -> str | None:
    """Return the API key of the servers, if any. Raises ``ConfigError`` if its file cannot be read."""
    if config.api_key_file is None:
        return None
    try:
        return config.api_key_file.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"api_key_file: {config.api_key_file} cannot be read: {error.strerror}") from error


class ServerProcesses(Protocol):
    """The processes of servers that were started here, by URL."""

    def diagnose(self, url: str) -> str | None:
        """Return how the last process of a server ended; ``None`` if none has."""

    def kill(self, url: str) -> None:
        """Kill the process of a server. Another one is started in its place."""


@asynccontextmanager
async def open_watchers(pool: ServerPool) -> AsyncIterator[ServerPool]:
    """Watch all servers in background tasks while the block lasts."""
    async with open_tasks() as tasks:
        for server in pool.servers:
            tasks.start_soon(pool.watch, server)
        yield pool
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def leave_groups_at_end(pool: ServerPool) -> AsyncIterator[None]:
    """At the end of the block, let servers that keep running leave our process groups."""
    try:
        yield
    finally:
        if (broadcasts := pool.broadcasts) is not None:
            with anyio.CancelScope(shield=True):
                async with anyio.create_task_group() as tasks:
                    for server in pool.serving:
                        tasks.start_soon(broadcasts.forget, server.url, server.control)


@asynccontextmanager
async def unload_adapters_at_end(pool: ServerPool) -> AsyncIterator[None]:
    """At the end of the block, unload our adapters from servers that keep running."""
    try:
        yield
    finally:
        with anyio.move_on_after(pool.config.health_timeout_seconds, shield=True):
            await pool.unload_adapters()


async def wait_until_ready(pool: ServerPool, config: ServerConfig) -> None:
    """Wait until all servers are ready. Raises ``EngineError`` or ``ModelError`` for one that cannot become ready."""
    processes = pool.processes
    with anyio.move_on_after(config.start_timeout_seconds):
        while len(pool.serving) < len(pool.servers):
            for server in pool.servers:
                if server.failure is not None:
                    raise server.failure
                reason = None if processes is None or server.is_serving else processes.diagnose(server.url)
                if reason is not None:
                    raise EngineError(f"The server at {server.url} has ended before it was ready. {reason}")
            await pool.changed.wait()
        for server in () if pool.broadcasts is None else pool.servers:
            if server.facts is not None and not server.facts.num_ranks:
                raise EngineError(
                    f"{server.url} cannot be sent weights: its processes are parallel in other ways than by tensors. "
                    "Start several servers in the place of data parallelism, or publish by disk (trainer.publish)."
                )
        return
    missing = [server.url for server in pool.servers if not server.is_serving]
    raise EngineError(
        f"{', '.join(missing)} did not answer within {config.start_timeout_seconds:g} s (start_timeout_seconds). "
        "Check that the servers run, and that this machine reaches them."
    )


@asynccontextmanager
async def open_gateway(config: ServerConfig) -> AsyncIterator[httpx.AsyncClient | None]:
    """Open a client for the gateway; ``None`` if none is configured."""
    if config.gateway_url is None:
        yield None
        return
    seconds = config.read_timeout_seconds
    async with create_client(config.gateway_url, api_key=read_key(config), read_timeout_seconds=seconds) as client:
        yield client
