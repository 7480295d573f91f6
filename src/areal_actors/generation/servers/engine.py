"""``ServerEngine``: an engine of one inference server, whose pauses and weights it alone controls.

A generation is one request to the server. If the server is lost, it fails with ``EngineError``; if the server ends it
early, because another client did so or because the next tokens are sampled under another adapter, with
``EngineInterrupted``. In both cases the replica set (``replicas``) continues it after the tokens already known. A
server's stream is read only when the consumer asks for a chunk. ``Attribution`` determines which weights sampled a
token.

A server that comes back gets the weights and the pause of its engine before it serves. The label of its weights shows
whether it was restarted: it has none of our labels then.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from uuid import uuid4

import anyio
import anyio.lowlevel
from anyio import to_thread
from attrs import define, evolve

from areal_actors.domain import (
    Chunk,
    EngineInfo,
    EngineRequest,
    EngineStatistics,
    FinishReason,
    PauseMode,
    SampleKey,
    Sampling,
    Snapshot,
)
from areal_actors.errors import (
    ArealError,
    ConfigError,
    EngineError,
    EngineInterrupted,
    EngineLost,
    InvalidRequest,
    ModelError,
    RequestError,
    UnsupportedParameter,
)
from areal_actors.generation.base import Decode, StopScanner, find_stop_ids, validate_request
from areal_actors.generation.replicas import EngineSet, ReplicaSetConfig
from areal_actors.generation.servers.adapters import Adapters
from areal_actors.generation.servers.config import AdapterSlots, Backend, ServerConfig
from areal_actors.generation.servers.dialect import Attribution, Delta, ServerDialect
from areal_actors.generation.servers.launching import find_kind
from areal_actors.generation.servers.publishing import Publisher, ServerAdmission, Weights
from areal_actors.generation.servers.server import Server, ServerProcesses, open_server
from areal_actors.lib.change_signal import ChangeSignal
from areal_actors.lib.task_groups import open_tasks
from areal_actors.lib.telemetry import get_logger

_log = get_logger(__name__)

_ABORT_SECONDS = 5.0
"""How long telling a server to abort a request may take."""


class ServerEngine:
    """An ``Engine`` of one server. Samples do not depend on sample keys (``samples_follow_keys`` is false)."""

    def __init__(
        self,
        server: Server,
        weights: Weights,
        publisher: Publisher,
        *,
        adapters: Adapters | None = None,
        decode: Decode | None = None,
    ) -> None:
        """Use ``open_server_engines``."""
        self._server = server
        self._weights = weights
        """The weights that the server has, or is given when it comes back."""
        self._loaded: Weights | None = None
        """The weights that the server was given last; ``None`` while they are undefined, as during a load."""
        self._publisher = publisher
        self._adapters = adapters
        self._decode = decode
        self._info: EngineInfo
        self._dialect = server.dialect
        self._is_paused = False
        self._control = anyio.Lock()
        """Held while the server is paused, updated or brought back."""
        self._failure: ArealError | None = None
        """Why the last attempt to bring the server back failed."""
        self._running: dict[str, ServerAttempt] = {}
        self._placed: set[ServerAttempt] = set()
        # Numbers by the names of EngineStatistics, which is frozen: copying it for each chunk would take 10 µs.
        self._counters: Counter[str] = Counter()
        self._finished_seconds = 0.0
        self._busy_since = 0.0

    async def start(self) -> None:
        """Wait until the server has the first weights.

        Raises ``EngineError`` or ``ModelError`` if it cannot get them, has ended, or does not answer in time.
        """
        server = self._server
        seconds = server.config.start_timeout_seconds
        with anyio.move_on_after(seconds):
            while not server.is_ready:
                if self._failure is not None:
                    raise self._failure
                if server.processes is not None and (reason := server.processes.diagnose(server.url)) is not None:
                    raise EngineError(f"The server at {server.url} has ended before it was ready. {reason}")
                await server.changed.wait()
        facts = server.facts
        if not server.is_ready or facts is None:
            raise EngineError(
                f"{server.url} did not answer within {seconds:g} s (start_timeout_seconds). Check that the server "
                "runs, and that this machine reaches it."
            )
        model = self._publisher.model
        try:
            config = json.loads((model / "config.json").read_text(encoding="utf-8"))
            vocab_size = int(config.get("vocab_size") or config["text_config"]["vocab_size"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(f"{model} is not a directory of a transformers model: {error}") from error
        self._publisher.dtype = facts.dtype
        self._info = EngineInfo(
            name=facts.software,
            model=str(model),
            vocab_size=vocab_size,
            context_length=facts.context_length,
            dtype=facts.dtype,
            device="server",
            max_concurrent=facts.max_concurrent,
            logprobs_follow_truncation=facts.logprobs_follow_truncation,
            knows_raw_logprobs=False,
            samples_follow_keys=False,
            has_grammars=facts.has_grammars,
        )

    async def close(self) -> None:
        """Unload our adapters from a server that keeps running."""
        server, adapters = self._server, self._adapters
        if server.is_ready and adapters is not None:
            with anyio.move_on_after(server.config.health_timeout_seconds, shield=True), suppress(EngineError):
                await adapters.unload_unused(server.control, ())

    # ------------------------------------------------------------------------------------------ the protocol

    @property
    def info(self) -> EngineInfo:
        """Return facts that do not change while the engine is open."""
        return self._info

    @property
    def server(self) -> Server:
        """Return the server."""
        return self._server

    @property
    def version(self) -> int:
        """Return the version of the weights with which the next token will be sampled."""
        return self._weights.version

    @asynccontextmanager
    async def generate(self, request: EngineRequest) -> AsyncIterator[AsyncIterator[Chunk]]:
        """Open a generation; see ``Engine.generate``."""
        validate_request(request, self._info, can_decode=True)
        self._dialect.check(request)
        if request.grammar is not None and not self._info.has_grammars:
            raise UnsupportedParameter(
                f"The servers of {self._info.name} cannot hold answers to a grammar; see how to start them."
            )
        if request.id in self._running:
            raise InvalidRequest(
                f"A generation with the id {request.id!r} is running; give each its own id.", param="id"
            )
        run = self._running[request.id] = ServerAttempt.begin(request, decode=self._decode)
        self._counters["prompt_tokens"] += len(request.prompt)
        try:
            async with aclosing(self._generate(run)) as chunks:
                yield chunks
        finally:
            del self._running[request.id]

    async def abort(self, request_id: str) -> None:
        """End a generation with ``FinishReason.ABORT`` after delivering what was sampled. Unknown ids are ignored."""
        await anyio.lowlevel.checkpoint()
        run = self._running.get(request_id)
        if run is not None:
            run.is_aborted = True
            self._server.changed.notify()
            await self._end_attempt(run)

    async def pause(self, mode: PauseMode = PauseMode.KEEP) -> None:
        """Stop sampling until ``resume``; return once no more tokens are sampled.

        Mode ``WAIT`` waits for generations that run at the server; they end only if their consumers keep reading. If it
        is cancelled, the engine remains pausing: call ``resume``. A server that is lost is paused when it comes back.
        """
        self._is_paused = self._server.is_paused = True
        if mode is PauseMode.ABORT:
            async with anyio.create_task_group() as tasks:
                for run in tuple(self._placed):
                    run.was_interrupted = True
                    tasks.start_soon(self._end_attempt, run)
        while mode is PauseMode.WAIT and self._placed and self._is_paused:
            await self._server.changed.wait()
        async with self._control:
            # ``resume`` may have been called while this waited.
            if self._is_paused and self._server.is_ready:
                await self._command(self._pause_server())

    async def resume(self) -> None:
        """Continue sampling."""
        self._is_paused = self._server.is_paused = False
        self._server.restart_clock()
        async with self._control:
            if not self._is_paused and self._server.is_ready:
                await self._command(self._dialect.resume(self._server.control))
        self._server.changed.notify()

    async def load(self, snapshot: Snapshot) -> None:
        """Replace the weights between two tokens; see ``Engine.load``.

        A server that is lost gets them when it comes back; ``EngineError`` is raised meanwhile. If it is cancelled, it
        still returns only after the load has ended.
        """
        # A load that is cancelled half-way would leave the server with undefined weights.
        with anyio.CancelScope(shield=True):
            if self._adapters is not None and snapshot.adapter is not None:
                adapter = await to_thread.run_sync(self._adapters.admit, snapshot.version, snapshot.adapter)
                weights = Weights(version=snapshot.version, path=self._weights.path, adapter=adapter)
            else:
                weights = await to_thread.run_sync(self._publisher.write, snapshot)
            async with self._control:
                if not self._server.is_ready:
                    self._weights = weights
                    await self._restore()
                elif self._loaded != weights:
                    await (self._load if self._adapters is None else self._load_adapter)(weights)
            if weights.adapter is not None:
                async with anyio.create_task_group() as tasks:
                    for run in tuple(self._placed):
                        # A constrained generation stays under the adapter with which it began.
                        if run.adapter != weights.adapter.name and run.request.grammar is None:
                            run.was_moved = True
                            tasks.start_soon(self._end_attempt, run)

    def statistics(self) -> EngineStatistics:
        """Return the current counters. ``running`` counts generations that run at the server."""
        return EngineStatistics(
            **self._counters,
            running=len(self._placed),
            waiting=len(self._running) - len(self._placed),
            busy_seconds=self._finished_seconds + self._busy_seconds,
        )

    # ------------------------------------------------------------------------------------------------ weights

    async def _load(self, weights: Weights) -> None:
        """Load weights into a server that serves. The caller holds ``_control``."""
        server, former = self._server, self._weights
        # Before the weights change: attempts that began earlier hold tokens back until their versions are reported.
        server.num_loads += 1
        server.is_loading = True
        try:
            # If the server is lost, it is given them when it is back.
            self._weights = weights
            if not self._is_paused:
                await self._command(self._pause_server())
            try:
                await self._command(self._update(weights))
            except ModelError:
                self._weights = former
                try:
                    await self._command(self._update(former))
                except ModelError:
                    _log.warning("server_lost", url=server.url, reason="it refuses the former weights as well")
                    self._mark_unhealthy()
                raise
        finally:
            if not self._is_paused and server.is_ready:
                await self._command(self._dialect.resume(server.control))
            server.is_loading = False
            server.restart_clock()
            server.changed.notify()

    async def _load_adapter(self, weights: Weights) -> None:
        """Load an adapter into a server that serves, which goes on sampling, and unload older ones that are not used.

        The caller holds ``_control``. If the server rejects the adapter, no request uses it.
        """
        server, adapters, adapter = self._server, self._adapters, weights.adapter
        assert adapters is not None
        # A constrained generation stays under the adapter with which it began, so that one has to remain loaded.
        used = {name for name, number in adapters.used.items() if number}
        kept = {*used, *(each.name for each in (adapter, self._weights.adapter) if each is not None)}
        try:
            # First, because servers have room for a few adapters only.
            await self._command(adapters.unload_unused(server.control, kept))
            if adapter is not None:
                await self._command(adapters.load(server.control, adapter))
        except ModelError:
            if adapter is not None:
                await self._command(adapters.unload_unused(server.control, kept - {adapter.name}))
            raise
        self._weights = self._loaded = weights
        server.changed.notify()

    async def _update(self, weights: Weights) -> None:
        """Have the server load weights."""
        # Unknown until the load is complete: an interrupted load leaves undefined weights under an old label.
        self._loaded = None
        await self._dialect.update_from_disk(self._server.control, weights.path, version=weights.label)
        self._loaded = weights

    async def restore(self) -> None:
        """Give a server that is back its weights and its pause. Failures are logged; the watcher tries it again."""
        async with self._control:
            if not self._server.is_ready:
                with suppress(ArealError):
                    await self._restore()

    async def _restore(self) -> None:
        """Load the current weights into a server, unless it has them, and pause or resume it as the engine is.

        The caller holds ``_control``. Raises ``EngineError`` or ``ModelError`` if that fails.
        """
        server, weights, adapters = self._server, self._weights, self._adapters
        if not server.answers:
            raise EngineError(server.explain())
        try:
            facts = server.facts = await server.until_silent(self._dialect.describe(server.control))
            if server.stalled_since is not None:
                # First, because a scheduler that hangs would not answer a pause or an update either.
                await server.until_silent(self._sample_one())
            if adapters is not None:
                await server.until_silent(adapters.prepare(server.control, facts, weights.adapter))
            # The label shows a restart that was not noticed. It is not enough: before the first contact, another run
            # may have set it, and an interrupted load leaves undefined weights under it.
            elif self._loaded != weights or facts.weight_version != weights.label:
                server.num_loads += 1
                server.is_loading = True
                server.changed.notify()
                # Requests that still run there must not sample from weights that are half loaded.
                await server.until_silent(self._pause_server())
                await server.until_silent(self._update(weights))
            self._loaded = weights
            await server.until_silent(self._pause_server() if self._is_paused else self._dialect.resume(server.control))
        except ArealError as error:
            self._failure = error
            _log.warning("server_not_ready", url=server.url, reason=str(error))
            raise
        else:
            self._failure, server.is_ready, server.has_served = None, True, True
            _log.info("server_serves", url=server.url, version=weights.version)
        finally:
            server.may_be_outdated = server.is_loading = False
            server.restart_clock()
            server.changed.notify()

    async def _pause_server(self) -> None:
        await self._dialect.pause(self._server.control, PauseMode.KEEP)

    async def _command(self, command: Awaitable[None]) -> None:
        """Send a command to a server that serves; a server that fails is lost."""
        try:
            await self._server.until_silent(command)
        except EngineError as error:
            _log.warning("server_lost", url=self._server.url, reason=str(error))
            self._mark_unhealthy()
            raise

    # --------------------------------------------------------------------------------------------- generating

    async def _generate(self, run: ServerAttempt) -> AsyncGenerator[Chunk]:
        if await self._may_begin(run):
            async with aclosing(self._attempt(run)) as chunks:
                async for chunk in chunks:
                    yield chunk
            if run.is_over:
                return
            if not (run.is_ending or run.num_sampled):
                raise EngineError(f"{self._server.url} ended the generation without a token.")
            if not run.is_aborted:
                raise EngineInterrupted(f"{self._server.url} ended the generation after {run.num_sampled} tokens.")
        self._counters["aborted"] += 1
        yield Chunk(token_ids=(), logprobs=(), raw_logprobs=(), version=self.version, finish=FinishReason.ABORT)

    async def _may_begin(self, run: ServerAttempt) -> bool:
        """Wait until the engine is not paused; return whether to begin an attempt, which an abort prevents.

        Raises ``EngineLost`` if the server is lost.
        """
        server = self._server
        while not run.is_aborted:
            # The check after a failed request takes milliseconds, unless the server turns out to need its weights.
            if not server.is_ready and (server.is_loading or not server.may_be_outdated):
                raise EngineLost(server.explain(self._failure))
            # A gateway chooses the server itself, so every server behind it must have the current weights.
            if not (self._is_paused or any(peer.is_loading or peer.may_be_outdated for peer in server.peers)):
                return True
            await server.changed.wait()
        return False

    async def _attempt(self, run: ServerAttempt) -> AsyncGenerator[Chunk]:
        """Yield the chunks that the server samples, until the end of its stream."""
        server = self._server
        num_loads = sum(peer.num_loads for peer in server.peers)
        # A session's name grants access to the session, so servers get only a digest of it.
        session = run.request.routing_key or run.request.id
        routing_key = blake2b(session.encode(), digest_size=16).hexdigest()
        adapter, attribution = self._weights.adapter, Attribution(self.version)
        if adapter is not None and server.facts is not None:
            # The adapter decides the version, and the server labels the weights below it.
            attribution = Attribution(self.version, label=server.facts.weight_version)
        name = run.adapter = None if adapter is None else adapter.name
        request = evolve(run.request, id=run.id)
        has_ended = was_abort_repeated = False
        self._begin(run)
        try:
            opening = self._dialect.generate(server.generating, request, routing_key=routing_key, adapter=name)
            async with AsyncExitStack() as stack:
                deltas = await server.until_silent(stack.enter_async_context(opening))
                while (delta := await self._next_delta(request.id, deltas)) is not None:
                    has_ended = delta.finish is not None
                    if run.is_ending and not (has_ended or was_abort_repeated):
                        # The server may have received the abort before the request, and dropped it: repeat it once.
                        was_abort_repeated = True
                        await self._end_attempt(run)
                    is_settled = name is not None or num_loads == sum(peer.num_loads for peer in server.peers)
                    for chunk in attribution.take(delta, is_settled=is_settled):
                        taken = run.take(run.cut_at_stop(chunk))
                        self._counters["sampled_tokens"] += len(taken.token_ids)
                        self._counters["cached_tokens"] += taken.num_cached_tokens
                        self._counters["aborted"] += taken.finish is FinishReason.ABORT
                        yield taken
                        if run.is_over:
                            return
        except EngineError:
            self._mark_unhealthy()
            raise
        except RequestError as error:
            if name is None or name not in str(error):
                raise
            # A server that was started again does not know the adapter, which it is given before the next attempt.
            self._mark_unhealthy()
            raise EngineError(str(error)) from error
        finally:
            if not has_ended:
                await self._end_attempt(run)
            self._end(run)

    async def _next_delta(self, attempt_id: str, deltas: AsyncIterator[Delta]) -> Delta | None:
        """Return the next tokens of an attempt; ``None`` at the end of its stream."""
        self._server.await_tokens(attempt_id)
        delta = await self._server.until_silent(anext(deltas, None))
        if delta is not None:
            self._server.note_tokens(attempt_id)
        return delta

    async def _sample_one(self) -> None:
        """Let a server that has stalled sample one token. Raises ``EngineError`` if it does not in time."""
        server, seconds = self._server, self._server.config.stall_timeout_seconds
        request = EngineRequest(
            id=f"probe-{uuid4().hex}", prompt=[0], sampling=Sampling(max_new_tokens=1), key=SampleKey(seed=0)
        )
        await self._dialect.resume(server.control)
        with anyio.move_on_after(seconds):
            async with self._dialect.generate(server.control, request, routing_key="") as deltas:
                async for _ in deltas:
                    pass
            _log.info("server_samples_again", url=server.url)
            server.stalled_since = None
            server.stall_seconds *= 2
            return
        raise EngineError(f"{server.url} answers health checks, but has not sampled a token within {seconds:g} s.")

    def _begin(self, run: ServerAttempt) -> None:
        """Count an attempt that begins."""
        if not self._placed:
            self._busy_since = anyio.current_time()
        self._placed.add(run)
        if self._adapters is not None and run.adapter is not None:
            self._adapters.used[run.adapter] += 1

    def _end(self, run: ServerAttempt) -> None:
        """Count an attempt that has ended."""
        if len(self._placed) == 1:
            self._finished_seconds += self._busy_seconds
        self._placed.remove(run)
        self._server.end_attempt(run.id)
        if self._adapters is not None and run.adapter is not None:
            self._adapters.used[run.adapter] -= 1
        self._server.changed.notify()

    def _mark_unhealthy(self) -> None:
        """Mark the server as unhealthy; behind a gateway, all of them, because any may have failed."""
        for peer in self._server.peers:
            peer.mark_unhealthy()

    async def _end_attempt(self, run: ServerAttempt) -> None:
        """Tell the server, if there is one, to abort the current attempt.

        Cannot be cancelled; takes at most ``_ABORT_SECONDS``.
        """
        if run not in self._placed:
            return
        # Behind a gateway, any server may have the attempt. A silent one would only cost time.
        asked = tuple(peer for peer in self._server.peers if peer.silent_since is None)
        with anyio.move_on_after(_ABORT_SECONDS, shield=True):
            for peer in asked:
                with suppress(EngineError):
                    await self._dialect.abort(peer.control, run.id)

    @property
    def _busy_seconds(self) -> float:
        return anyio.current_time() - self._busy_since if self._placed else 0.0


# ------------------------------------------------------------------------------------------------------- opening


@asynccontextmanager
async def open_server_engines(
    dialect: ServerDialect,
    config: ServerConfig,
    *,
    urls: Sequence[str],
    model: Path,
    snapshot: Snapshot,
    publish_directory: Path,
    processes: ServerProcesses | None = None,
    adapters: AdapterSlots | None = None,
    decode: Decode | None = None,
) -> AsyncIterator[EngineSet]:
    """Open an engine for each of the servers at ``urls`` once all of them serve ``snapshot``, on asyncio or trio.

    Args:
        dialect: the interface to the servers.
        config: settings; its ``urls`` are ignored.
        urls: at least one.
        model: the directory of the model that they serve, for its vocabulary and its shapes.
        snapshot: the initial weights, loaded into every server whatever weights it has.
        publish_directory: where weights are written for the servers, which must see it under the same path.
        processes: the servers' processes, if they were started here. If one ends while it is opened, opening fails
            with the reason; one that hangs is killed.
        adapters: serve adapters of this size next to ``model``, whose weights the servers keep: snapshots after
            the first one are adapters.
        decode: the text of tokens, for stop strings that begin in tokens which another server has sampled.

    Raises:
        ConfigError: with ``adapters``, if servers of this kind cannot load them.
        EngineError: a server is too old, has exited, or was not ready within ``start_timeout_seconds``.
        ModelError: a server rejects the snapshot.
    """
    loaded = None
    if adapters is not None:
        if dialect.adapter_root is None:
            raise ConfigError(
                f"trainer.lora.serving: {dialect.name} servers cannot load adapters here; set it to merged, or "
                "serve with sglang or vllm"
            )
        options = find_kind(Backend(dialect.name)).describe_adapters(adapters)
        loaded = Adapters(dialect, adapters, options, model, uuid4().hex[:8])
    publisher = Publisher(config.publish_directory or publish_directory, model)
    await to_thread.run_sync(publisher.remove_leftovers)
    try:
        weights = await to_thread.run_sync(publisher.write, snapshot)
        async with AsyncExitStack() as stack:
            changed = ChangeSignal()
            servers = [
                await stack.enter_async_context(open_server(url, dialect, config, changed=changed, processes=processes))
                for url in urls
            ]
            engines: list[ServerEngine] = []
            for server in servers:
                server.peers = servers if config.gateway_url is not None else [server]
                engines.append(ServerEngine(server, weights, publisher, adapters=loaded, decode=decode))
            watching = await stack.enter_async_context(open_tasks())
            for server, engine in zip(servers, engines, strict=True):
                watching.start_soon(server.watch, engine.restore)
            try:
                # One after the other: all of them prepare their servers at the same time.
                for engine in engines:
                    await engine.start()
                yield EngineSet(
                    engines={engine.server.url: engine for engine in engines},
                    snapshot=Snapshot(version=weights.version, path=weights.path),
                    admission=ServerAdmission(publisher, loaded),
                    config=ReplicaSetConfig(
                        wait_seconds=config.start_timeout_seconds,
                        max_attempts=config.max_failures,
                        # A pause and a load may take as long as an update each.
                        load_seconds=2 * config.update_timeout_seconds + 60,
                        retry_seconds=config.health_interval_seconds,
                        max_retry_seconds=config.health_interval_seconds,
                    ),
                )
            finally:
                with anyio.CancelScope(shield=True):
                    async with anyio.create_task_group() as closing:
                        for engine in engines:
                            closing.start_soon(engine.close)
                watching.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            await to_thread.run_sync(publisher.close)


@define(eq=False, kw_only=True)
class ServerAttempt:
    """A generation at the server."""

    request: EngineRequest
    id: str
    """Id of the request to the server."""
    adapter: str | None = None
    """Name of the adapter that samples it."""
    is_aborted: bool = False
    """Whether the consumer has aborted the generation."""
    was_interrupted: bool = False
    """Whether it ends because the engine was paused with ``PauseMode.ABORT``."""
    was_moved: bool = False
    """Whether it ends because the next tokens are sampled under another adapter."""
    num_sampled: int = 0
    last_id: int | None = None
    """The last sampled id."""
    is_over: bool = False
    """Whether a chunk with a finish was passed on."""
    scanner: StopScanner | None = None
    """Finds stop strings that begin in tokens of earlier attempts, which this server has not sampled."""
    num_unscanned: int = 0
    """Tokens in which such a stop string may still end."""

    @classmethod
    def begin(cls, request: EngineRequest, *, decode: Decode | None) -> ServerAttempt:
        """Create the attempt for ``request``, of which earlier ones have sampled ``request.key.num_drawn`` tokens."""
        stop, num_earlier = request.sampling.stop, request.key.num_drawn
        # Servers also match requests by prefixes of their ids, so no id may be a prefix of another.
        self = cls(request=request, id=f"{uuid4().hex}-{request.id}")
        if stop and num_earlier and decode is not None:
            self.scanner = StopScanner(stop, decode, request.prompt[-num_earlier:].tolist())
            # As many tokens as the scanner's window: a token may be a third of a character.
            self.num_unscanned = 4 * max(map(len, stop)) + 16
        return self

    @property
    def is_ending(self) -> bool:
        """Whether the server was told to abort it."""
        return self.is_aborted or self.was_interrupted or self.was_moved

    def cut_at_stop(self, chunk: Chunk) -> Chunk:
        """Return a chunk up to the end of a stop string that began before the attempt, if it contains one."""
        if self.scanner is None:
            return chunk
        for index, token_id in enumerate(chunk.token_ids.tolist()):
            if self.scanner.is_complete(token_id):
                self.scanner, end = None, index + 1
                return evolve(
                    chunk,
                    token_ids=chunk.token_ids[:end],
                    logprobs=chunk.logprobs[:end],
                    raw_logprobs=chunk.raw_logprobs[:end],
                    top_logprobs=chunk.top_logprobs[:end],
                    finish=FinishReason.STOP,
                )
        self.num_unscanned -= len(chunk.token_ids)
        if self.num_unscanned <= 0:
            self.scanner = None
        return chunk

    def take(self, chunk: Chunk) -> Chunk:
        """Add a chunk, and return it as the consumer sees it: with a finish only if we asked for that finish."""
        request = self.request
        if len(chunk.token_ids):
            self.num_sampled += len(chunk.token_ids)
            self.last_id = int(chunk.token_ids[-1])
        if chunk.finish is FinishReason.ABORT:
            # Another client may have aborted it.
            num_known = request.key.num_drawn + self.num_sampled
            self.is_over = self.is_aborted or (self.was_interrupted and num_known > 0)
        elif chunk.finish is FinishReason.STOP:
            # Servers also stop at the end token of their model, at which this request may not stop.
            is_stopped = self.last_id in find_stop_ids(request)
            self.is_over = is_stopped or bool(request.sampling.stop) or request.grammar is not None
        else:
            self.is_over = chunk.finish is not None
        return chunk if self.is_over == (chunk.finish is not None) else evolve(chunk, finish=None)
