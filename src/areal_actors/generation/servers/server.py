"""One inference server: its clients, its health, and the process that it runs in if that was started here.

A server that refuses connections, or fails a request, is lost at once; one that is silent (its process is stopped or
hangs) after two health checks. One that answers these, and sends no token of any request for ``stall_timeout_seconds``,
has stalled: it gets no requests until it has sampled one token. What waits for an answer of either is cancelled, so
that requests continue at other replicas and an update does not wait for it. A process that was started here is killed
if it stays silent, or stalled.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Protocol, TypeVar

import anyio
import httpx
from attrs import define, field

from areal_actors.errors import ConfigError, EngineError
from areal_actors.generation.servers.config import ServerConfig
from areal_actors.generation.servers.dialect import ServerDialect, ServerFacts
from areal_actors.generation.servers.http import create_client
from areal_actors.lib.change_signal import ChangeSignal
from areal_actors.lib.telemetry import get_logger

_log = get_logger(__name__)

_NUM_SILENT_CHECKS = 2
"""Health checks in a row that a server leaves without an answer before it counts as silent: one may be unlucky."""

T = TypeVar("T")


class ServerProcesses(Protocol):
    """The processes of servers that were started here, by URL."""

    def diagnose(self, url: str) -> str | None:
        """Return how the last process of a server ended; ``None`` if none has."""

    def kill(self, url: str) -> None:
        """Kill the process of a server. Another one is started in its place."""


@define(eq=False, kw_only=True)
class Server:
    """One server. ``generating`` is the client for generations, ``control`` the one for the rest.

    Its engine (``engine``) decides whether it ``is_ready``.
    """

    url: str
    dialect: ServerDialect
    config: ServerConfig
    generating: httpx.AsyncClient
    control: httpx.AsyncClient
    processes: ServerProcesses | None = None
    peers: list[Server] = field(factory=list)
    """Servers that may have the requests of this one, which is among them; several behind a gateway."""
    facts: ServerFacts | None = None
    answers: bool = False
    """Whether it answered the last health check."""
    is_ready: bool = False
    """Whether it has the weights and the pause of its engine."""
    is_loading: bool = False
    """Whether it is being given weights; it samples nothing meanwhile."""
    may_be_outdated: bool = False
    """Whether it may answer with outdated weights: it was not checked yet, or is being given weights."""
    num_loads: int = 0
    """Incremented before its weights change."""
    silent_since: float | None = None
    """When the first health check began that it left without an answer; ``None`` if it answered the last one."""
    stall_seconds: float = field(init=False)
    """How long it may send no token of any request; doubled whenever it turns out to have been only slow."""
    stalled_since: float | None = None
    """When it sent the last token, if it has stalled and has not sampled since."""
    is_paused: bool = False
    """Whether it was told to stop sampling."""
    has_served: bool = False
    """Whether its process has served: one that starts may be silent for minutes."""
    changed: ChangeSignal
    """Notified when the state of this server or of a peer changes."""
    _wakeup: anyio.Event = field(factory=anyio.Event, init=False)
    _waiting: set[anyio.CancelScope] = field(factory=set, init=False)
    _awaited: set[str] = field(factory=set, init=False)
    """Attempts whose next tokens are awaited. A stream is read only when its consumer asks, who may be slow."""
    _silent_from: float = field(default=0.0, init=False)
    """When it sent the last token, or tokens began to be awaited."""
    _has_sampled: bool = field(default=False, init=False)
    """Whether it has sent a token since it was lost last: before that, it may compile kernels for minutes."""

    def __attrs_post_init__(self) -> None:
        self.stall_seconds = self.config.stall_timeout_seconds

    def await_tokens(self, attempt_id: str) -> None:
        """Note that the next tokens of an attempt are awaited from now on."""
        if not self._awaited:
            self.restart_clock()
        self._awaited.add(attempt_id)

    def note_tokens(self, attempt_id: str) -> None:
        """Note that tokens of an attempt have arrived."""
        self._has_sampled = True
        self.restart_clock()
        self._awaited.discard(attempt_id)

    def end_attempt(self, attempt_id: str) -> None:
        """Note that no more tokens of an attempt are awaited."""
        self._awaited.discard(attempt_id)

    def restart_clock(self) -> None:
        """Count the time without a token from now on, as after a pause or a load."""
        self._silent_from = anyio.current_time()

    def mark_unhealthy(self) -> None:
        """Take the server out until its health and its weights were checked, which begins now."""
        self.is_ready, self.may_be_outdated = False, True
        self._wakeup.set()

    def explain(self, failure: Exception | None = None) -> str:
        """Return why it is not ready; ``failure`` is that of the last attempt to give it weights."""
        ended = None if self.processes is None else self.processes.diagnose(self.url)
        return str(failure or f"{self.url} does not answer. {ended or ''}").strip()

    async def until_silent(self, answer: Awaitable[T]) -> T:
        """Await an answer of the server. Raises ``EngineError`` if the server is silent before it comes."""
        with anyio.CancelScope() as scope:
            self._waiting.add(scope)
            try:
                return await answer
            finally:
                self._waiting.discard(scope)
        raise EngineError(f"{self.url} does not answer any more.")

    async def watch(self, restore: Callable[[], Awaitable[None]]) -> None:
        """Check the server forever: at intervals, and as soon as it is marked as unhealthy.

        ``restore`` is called after each check that it answers without being ready.
        """
        async with anyio.create_task_group() as tasks:
            is_restoring = False

            async def run() -> None:
                nonlocal is_restoring
                is_restoring = True
                await restore()
                is_restoring = False

            while True:
                self._wakeup = anyio.Event()
                # Servers that serve are asked as well: one that dies between two generations must not get the next one.
                self.answers = await self._answers()
                if not self.answers:
                    if self.is_ready:
                        _log.warning("server_lost", url=self.url, reason="it does not answer")
                    self.is_ready = self.may_be_outdated = False
                    self._has_sampled = False
                elif not (self.is_ready or is_restoring):
                    self.may_be_outdated = True
                    # In a task: the server is also watched while it is given weights.
                    tasks.start_soon(run)
                self.changed.notify()
                with anyio.move_on_after(self.config.health_interval_seconds):
                    await self._wakeup.wait()

    def _give_up(self) -> None:
        """Cancel what waits for an answer of the server, or of the gateway in front of it."""
        for peer in self.peers:
            for scope in tuple(peer._waiting):  # noqa: SLF001 - of the same class
                scope.cancel()

    async def _answers(self) -> bool:
        """Return whether the server answers. If it is silent, give up what waits for it, and kill it in the end."""
        began = anyio.current_time()
        for _ in range(_NUM_SILENT_CHECKS):
            with anyio.move_on_after(self.config.health_timeout_seconds):
                is_ready = await self.dialect.is_ready(self.control)
                self.silent_since = None
                # A server that refuses connections is started again, or has not begun to listen.
                self.has_served = self.has_served and is_ready
                return is_ready and self._is_sampling()
        self.stalled_since = None
        silent_since = self.silent_since = began if self.silent_since is None else self.silent_since
        # One that has just started may be silent for long while it loads its first weights.
        if not self.has_served:
            return False
        self._give_up()
        silent_seconds = anyio.current_time() - silent_since
        if silent_seconds >= self.config.hang_timeout_seconds:
            self._kill(f"it has not answered for {silent_seconds:.0f} s")
        return False

    def _is_sampling(self) -> bool:
        """Give up what waits for a server that has stalled; kill it in the end, and return whether it was not."""
        now = anyio.current_time()
        if self.stalled_since is None:
            seconds = now - self._silent_from
            is_busy = self._awaited and self._has_sampled and not (self.is_loading or self.is_paused)
            if not is_busy or seconds < self.stall_seconds:
                return True
            self.stalled_since = now - seconds
            _log.warning("server_stalled", url=self.url, reason=f"it has sent no token for {seconds:.0f} s")
            self.mark_unhealthy()
            self._give_up()
        stalled_seconds = now - self.stalled_since
        if self.processes is None or stalled_seconds < 2 * self.stall_seconds:
            return True
        self.stalled_since = None
        self._kill(f"it has sampled nothing for {stalled_seconds:.0f} s")
        return False

    def _kill(self, reason: str) -> None:
        """Kill the process of the server, if it was started here."""
        if self.processes is not None:
            _log.warning("server_killed", url=self.url, reason=reason)
            self.processes.kill(self.url)
            self.has_served = False


@asynccontextmanager
async def open_server(
    url: str, dialect: ServerDialect, config: ServerConfig, *, changed: ChangeSignal, processes: ServerProcesses | None
) -> AsyncIterator[Server]:
    """Open clients for the server at ``url``; its requests go to the gateway if there is one."""
    key = read_key(config)
    async with AsyncExitStack() as stack:
        generating, control = [
            await stack.enter_async_context(create_client(address, api_key=key, read_timeout_seconds=seconds))
            for address, seconds in (
                (config.gateway_url or url, config.read_timeout_seconds),
                (url, config.update_timeout_seconds),
            )
        ]
        yield Server(
            url=url.rstrip("/"),
            dialect=dialect,
            config=config,
            generating=generating,
            control=control,
            processes=processes,
            changed=changed,
        )


def read_key(config: ServerConfig) -> str | None:
    """Return the API key of the servers, if any. Raises ``ConfigError`` if its file cannot be read."""
    if config.api_key_file is None:
        return None
    try:
        return config.api_key_file.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"api_key_file: {config.api_key_file} cannot be read: {error.strerror}") from error
