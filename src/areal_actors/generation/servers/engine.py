"""``ServerEngine``: an engine of inference servers, which alone controls their pauses and weights.

A generation consists of one or several *attempts*. An attempt ends with the generation, because its server was lost, or
because another client ended it there. The next attempt goes to any server that has the current weights by then, and
continues after the tokens already known (``generation``). A server's stream is read only when the consumer asks for a
chunk. ``Attribution`` determines which weights sampled a token, and ``pool`` chooses the server.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from uuid import uuid4

import anyio
import anyio.lowlevel
import httpx
from anyio import to_thread
from attrs import define, evolve

from areal_actors.domain import FinishReason
from areal_actors.errors import (
    ConfigError,
    EngineError,
    InvalidRequest,
    ModelError,
    RequestError,
    Unavailable,
    UnsupportedParameter,
)
from areal_actors.generation.base import (
    Chunk,
    EngineInfo,
    EngineRequest,
    EngineStatistics,
    PauseMode,
    Snapshot,
    validate_request,
)
from areal_actors.generation.routing import ReroutableGeneration, describe_failure
from areal_actors.generation.servers.adapters import AdapterDialect, Adapters
from areal_actors.generation.servers.broadcasting import FindWeights, open_broadcasts
from areal_actors.generation.servers.config import AdapterSlots, ServerConfig
from areal_actors.generation.servers.dialect import Attribution, ServerDialect
from areal_actors.generation.servers.pool import (
    Server,
    ServerPool,
    ServerProcesses,
    leave_groups_at_end,
    open_gateway,
    open_servers,
    open_watchers,
    unload_adapters_at_end,
    wait_until_ready,
)
from areal_actors.generation.servers.publishing import Publisher, Weights

__all__ = ["ServerEngine", "ServerGeneration", "empty_chunk"]

_ABORT_SECONDS = 5.0
"""How long telling a server to abort a request may take."""


class ServerEngine:
    """An ``Engine`` of servers with the same dialect. Opened with ``open``, on asyncio or trio.

    If a server fails, another attempt is made, by the rules of ``generation.routing``. Samples do not depend on sample
    keys (``samples_follow_keys`` is false).
    """

    def __init__(self, pool: ServerPool, publisher: Publisher, info: EngineInfo, config: ServerConfig) -> None:
        """Use ``open``."""
        self._pool = pool
        self._publisher = publisher
        self._info = info
        self._config = config
        self._dialect = pool.dialect
        self._gateway: httpx.AsyncClient | None = None
        self._running: dict[str, ServerGeneration] = {}
        self._placed: dict[ServerGeneration, Server] = {}
        # Numbers by the names of EngineStatistics, which is frozen: copying it for each chunk would take 10 µs.
        self._counters: Counter[str] = Counter()
        self._finished_seconds = 0.0
        self._busy_since = 0.0

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        dialect: ServerDialect,
        config: ServerConfig,
        *,
        urls: Sequence[str],
        model: Path,
        snapshot: Snapshot,
        publish_directory: Path,
        processes: ServerProcesses | None = None,
        find_weights: FindWeights | None = None,
        adapters: AdapterSlots | None = None,
    ) -> AsyncIterator[ServerEngine]:
        """Open an engine of the servers at ``urls`` once all of them serve ``snapshot``.

        Args:
            dialect: the interface to the servers.
            config: settings; its ``urls`` are ignored.
            urls: at least one.
            model: the directory of the model that they serve, for its vocabulary and its shapes.
            snapshot: the initial weights, loaded into every server whatever weights it has.
            publish_directory: where weights are written for the servers, which must see it under the same path.
            processes: the servers' processes, if they were started here. If one ends while it is opened, opening fails
                with the reason; one that hangs is killed.
            find_weights: finds the weight store of snapshots with ``is_kept``.
            adapters: serve adapters of this size next to ``model``, whose weights the servers keep: snapshots after
                the first one are adapters.

        Raises:
            ConfigError: with ``find_weights`` or ``adapters``, if servers of this kind cannot receive them.
            EngineError: a server is too old, has exited, cannot receive weights, or was not ready within
                ``start_timeout_seconds``.
            ModelError: a server rejects the snapshot.
        """
        broadcasts = None if find_weights is None else open_broadcasts(dialect, find_weights, config)
        loaded = None
        if adapters is not None:
            if not isinstance(dialect, AdapterDialect):
                raise ConfigError(
                    f"trainer.lora.serving: {dialect.name} servers cannot load adapters here; set it to merged, or "
                    "serve with sglang or vllm"
                )
            loaded = Adapters(dialect, adapters, model, uuid4().hex[:8])
        publisher = Publisher(config.publish_directory or publish_directory, model)
        await to_thread.run_sync(publisher.remove_leftovers)
        try:
            weights = await to_thread.run_sync(publisher.write, snapshot)
            async with (
                open_servers(urls, config) as servers,
                open_watchers(
                    ServerPool(
                        dialect=dialect,
                        config=config,
                        by_name={server.name: server for server in servers},
                        weights=weights,
                        broadcasts=broadcasts,
                        adapters=loaded,
                        processes=processes,
                    )
                ) as pool,
                leave_groups_at_end(pool),
                unload_adapters_at_end(pool),
                open_gateway(config) as gateway,
            ):
                await wait_until_ready(pool, config)
                info = _describe(pool, model)
                publisher.dtype = info.dtype
                engine = cls(pool, publisher, info, config)
                engine._gateway = gateway
                yield engine
        finally:
            with anyio.CancelScope(shield=True):
                await to_thread.run_sync(publisher.close)

    # ------------------------------------------------------------------------------------------ the protocol

    @property
    def info(self) -> EngineInfo:
        """Return facts that do not change while the engine is open."""
        return self._info

    @property
    def version(self) -> int:
        """Return the version of the weights with which the next token will be sampled."""
        return self._pool.weights.version

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
        generation = ReroutableGeneration(request, context_length=self._info.context_length)
        run = self._running[request.id] = ServerGeneration(generation)
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
            self._pool.notify()
            await self._end_attempt(run)

    async def pause(self, mode: PauseMode = PauseMode.KEEP) -> None:
        """Stop sampling until ``resume``; return once no more tokens are sampled.

        Mode ``WAIT`` waits for generations that run at a server; they end only if their consumers keep reading. If it
        is cancelled, the engine remains pausing: call ``resume``.
        """
        pool = self._pool
        pool.is_paused = True
        if mode is PauseMode.ABORT:
            async with anyio.create_task_group() as tasks:
                for run in tuple(self._placed):
                    run.was_interrupted = True
                    tasks.start_soon(self._end_attempt, run)
        while mode is PauseMode.WAIT and self._placed and pool.is_paused:
            await pool.changed.wait()
        async with pool.control:
            # ``resume`` may have been called while this waited.
            if pool.is_paused:
                await pool.pause()

    async def resume(self) -> None:
        """Continue sampling."""
        self._pool.is_paused = False
        async with self._pool.control:
            if not self._pool.is_paused:
                await self._pool.resume()
        self._pool.notify()

    async def load(self, snapshot: Snapshot) -> None:
        """Replace the weights between two tokens; see ``Engine.load``.

        If no server is left, wait for one to come back; raises ``EngineError`` if none does. If it is cancelled, it
        still returns only after the load has ended.
        """
        # A load that is cancelled half-way would leave servers with different weights.
        with anyio.CancelScope(shield=True):
            if self._pool.adapters is not None:
                await self._load_adapter(snapshot, self._pool.adapters)
                return
            pool = self._pool
            if not snapshot.is_kept:
                weights = await to_thread.run_sync(self._publisher.write, snapshot)
            elif pool.broadcasts is None:
                raise ModelError(
                    f"Snapshot of version {snapshot.version} is in a weight store that this engine does not know; "
                    "publish its state or a path."
                )
            else:
                buckets = await pool.broadcasts.describe(snapshot.version, is_receiving=bool(pool.serving))
                weights = await to_thread.run_sync(self._publisher.admit, snapshot.version, buckets)
            try:
                async with pool.control:
                    await pool.load(weights)
            finally:
                await to_thread.run_sync(self._publisher.keep_only, pool.weights)
        await self._wait_for_server()

    async def _load_adapter(self, snapshot: Snapshot, adapters: Adapters) -> None:
        """Load an adapter; running generations continue under it, except for those whose grammar forbids that."""
        if snapshot.adapter is None:
            raise ModelError(
                f"Snapshot of version {snapshot.version} is no adapter, and these servers keep their weights; set "
                "trainer.lora.serving to merged to publish all weights."
            )
        adapter = await to_thread.run_sync(adapters.admit, snapshot.version, snapshot.adapter)
        async with self._pool.control:
            weights = Weights(version=snapshot.version, path=self._pool.weights.path, adapter=adapter)
            # A constrained generation stays under the adapter with which it began, so that one has to remain loaded.
            used = {run.adapter for run in self._placed if run.adapter is not None}
            await self._pool.load_adapter(weights, used=used)
        async with anyio.create_task_group() as tasks:
            for run in tuple(self._placed):
                if run.adapter != adapter.name and run.request.grammar is None:
                    run.was_moved = True
                    tasks.start_soon(self._end_attempt, run)

    def statistics(self) -> EngineStatistics:
        """Return the current counters. ``running`` counts generations that run at a server."""
        return EngineStatistics(
            **self._counters,
            running=len(self._placed),
            waiting=len(self._running) - len(self._placed),
            busy_seconds=self._finished_seconds + self._busy_seconds,
        )

    # --------------------------------------------------------------------------------------------- generating

    async def _generate(self, run: ServerGeneration) -> AsyncGenerator[Chunk]:
        generation = run.generation
        while (server := await self._place(run)) is not None:
            failure = None
            num_known = generation.num_sampled
            try:
                async with aclosing(self._attempt(run, server)) as chunks:
                    async for chunk in chunks:
                        yield chunk
            except EngineError as error:
                failure = error
            if generation.is_over:
                return
            if run.is_aborted:
                break
            # Another client may end attempts at a server again and again; each of them counts as a failure.
            was_ended_by_us = run.was_interrupted or run.was_moved
            if failure is None and not was_ended_by_us and generation.num_sampled == num_known:
                failure = EngineError(f"{server.url} ended the generation without a token.")
            end = generation.end_attempt(
                server.name,
                failure,
                describe_failure(failure),
                is_failure=failure is not None,
                max_failures=self._config.max_failures,
            )
            if end is not None:
                yield end
                return
        generation.is_over = True
        self._counters["aborted"] += 1
        yield empty_chunk(FinishReason.ABORT, version=self.version)

    async def _place(self, run: ServerGeneration) -> Server | None:
        """Wait until the engine is not paused, and return the server for the next attempt.

        Returns ``None`` if the generation was aborted meanwhile. Raises ``Unavailable`` if no server comes in time.
        """
        pool = self._pool
        if delay := run.generation.find_delay(server.name for server in pool.serving):
            await anyio.sleep(delay)
        while not run.is_aborted:
            # A gateway chooses the server itself, so every server behind it must have the current weights.
            if pool.is_held or (self._gateway is not None and pool.may_be_outdated):
                await pool.changed.wait()
                continue
            server = pool.choose(run.generation, version=pool.weights.version)
            if server is not None:
                return server
            try:
                await self._wait_for_server()
            except EngineError as error:
                raise Unavailable(f"{error} The request may be repeated.") from error
        return None

    async def _wait_for_server(self) -> None:
        with anyio.move_on_after(self._config.start_timeout_seconds):
            while not self._pool.serving:
                await self._pool.changed.wait()
            return
        processes = self._pool.processes

        def explain(server: Server) -> str:
            ended = None if processes is None else processes.diagnose(server.url)
            return str(server.failure or f"{server.url} does not answer. {ended or ''}").strip()

        reasons = "; ".join(map(explain, self._pool.servers))
        raise EngineError(
            f"No server of {self._info.name} was ready within {self._config.start_timeout_seconds:g} s: {reasons}"
        )

    async def _attempt(self, run: ServerGeneration, server: Server) -> AsyncGenerator[Chunk]:
        """Yield the chunks that one server samples, until the end of its stream."""
        num_loads = self._pool.num_loads
        # A session's name grants access to the session, so servers get only a digest of it.
        session = run.request.routing_key or run.request.id
        routing_key = blake2b(session.encode(), digest_size=16).hexdigest()
        adapter, attribution = self._pool.weights.adapter, Attribution(self.version)
        if adapter is not None and server.facts is not None:
            # The adapter decides the version, and the server labels the weights below it.
            attribution = Attribution(self.version, label=server.facts.weight_version)
        name = None if adapter is None else adapter.name
        request = run.begin_attempt(adapter=name)
        has_ended = was_abort_repeated = False
        if not self._placed:
            self._busy_since = anyio.current_time()
        self._placed[run] = server
        server.num_running += 1
        try:
            client = self._gateway or server.generating
            opening = self._dialect.generate(client, request, routing_key=routing_key, adapter=name)
            async with AsyncExitStack() as stack:
                deltas = await server.until_silent(stack.enter_async_context(opening))
                while (delta := await server.until_silent(anext(deltas, None))) is not None:
                    has_ended = delta.finish is not None
                    if run.is_ending and not (has_ended or was_abort_repeated):
                        # The server may have received the abort before the request, and dropped it: repeat it once.
                        was_abort_repeated = True
                        await self._end_attempt(run)
                    is_settled = name is not None or self._pool.num_loads == num_loads
                    for chunk in attribution.take(delta, is_settled=is_settled):
                        taken = run.take(chunk)
                        self._counters["sampled_tokens"] += len(taken.token_ids)
                        self._counters["cached_tokens"] += taken.num_cached_tokens
                        self._counters["aborted"] += taken.finish is FinishReason.ABORT
                        yield taken
        except EngineError:
            self._mark_unhealthy(server)
            raise
        except RequestError as error:
            if name is None or name not in str(error):
                raise
            # A server that was started again does not know the adapter, which it is given before the next attempt.
            self._mark_unhealthy(server)
            raise EngineError(str(error)) from error
        finally:
            if not has_ended:
                await self._end_attempt(run)
            self._remove(run)

    def _mark_unhealthy(self, server: Server) -> None:
        """Mark the server as unhealthy; behind a gateway, all of them, because any may have failed."""
        for each in self._pool.servers if self._gateway is not None else (server,):
            each.mark_unhealthy()

    async def _end_attempt(self, run: ServerGeneration) -> None:
        """Tell the server, if there is one, to abort the current attempt.

        Cannot be cancelled; takes at most ``_ABORT_SECONDS``.
        """
        server = self._placed.get(run)
        if server is None or run.attempt_id is None:
            return
        # Behind a gateway, any server may have the attempt. A silent one would only cost time.
        asked = self._pool.servers if self._gateway is not None else (server,)
        asked = tuple(each for each in asked if each.silent_since is None)
        with anyio.move_on_after(_ABORT_SECONDS, shield=True):
            for each in asked:
                with suppress(EngineError):
                    await self._dialect.abort(each.control, run.attempt_id)

    def _remove(self, run: ServerGeneration) -> None:
        if len(self._placed) == 1:
            self._finished_seconds += self._busy_seconds
        self._placed.pop(run).num_running -= 1
        self._pool.notify()

    @property
    def _busy_seconds(self) -> float:
        return anyio.current_time() - self._busy_since if self._placed else 0.0


# ------------------------------------------------------------------------------------------------------- opening


def _describe(pool: ServerPool, model: Path) -> EngineInfo:
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        vocab_size = int(config.get("vocab_size") or config["text_config"]["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{model} is no directory of a transformers model: {error}") from error
    facts = [server.facts for server in pool.servers if server.facts is not None]
    return EngineInfo(
        name=facts[0].software,
        model=str(model),
        vocab_size=vocab_size,
        context_length=min(each.context_length for each in facts),
        dtype=facts[0].dtype,
        device="server",
        max_concurrent=sum(each.max_concurrent for each in facts),
        logprobs_follow_truncation=all(each.logprobs_follow_truncation for each in facts),
        knows_raw_logprobs=False,
        samples_follow_keys=False,
        has_grammars=all(each.has_grammars for each in facts),
    )


@define(eq=False)
class ServerGeneration:
    """A generation, and its current attempt at a server."""

    generation: ReroutableGeneration
    attempt_id: str | None = None
    """Request id of the current attempt at its server."""
    adapter: str | None = None
    """Name of the adapter of the current attempt."""
    is_aborted: bool = False
    """Whether the consumer has aborted the generation."""
    was_interrupted: bool = False
    """Whether the current attempt ends because the engine was paused with ``PauseMode.ABORT``."""
    was_moved: bool = False
    """Whether the current attempt ends because the next one samples under another adapter."""

    @property
    def request(self) -> EngineRequest:
        """The request of the whole generation."""
        return self.generation.request

    @property
    def is_ending(self) -> bool:
        """Whether the server was told to abort the current attempt."""
        return self.is_aborted or self.was_interrupted or self.was_moved

    def begin_attempt(self, *, adapter: str | None) -> EngineRequest:
        """Return the request for the next attempt, which continues after the tokens already known."""
        # Servers also match requests by prefixes of their ids, so no id may be a prefix of another.
        self.attempt_id = f"{uuid4().hex}-{self.request.id}"
        self.adapter = adapter
        self.was_interrupted = self.was_moved = False
        return evolve(self.generation.next_request(), id=self.attempt_id)

    def take(self, chunk: Chunk) -> Chunk:
        """Add a chunk, and return it as the consumer sees it: with a finish only if the whole generation is over."""
        taken = self.generation.add(chunk)
        if taken.finish is None:
            return taken
        generation, request = self.generation, self.request
        # The finish of an attempt is that of the generation only if we asked for it; otherwise the generation goes on
        # unless all of its tokens are known.
        if taken.finish is FinishReason.ABORT:
            # Another client may have aborted the attempt.
            was_asked_for = self.is_aborted or (self.was_interrupted and generation.num_sampled > 0)
        elif taken.finish is FinishReason.STOP:
            # Servers also stop at the end token of their model, at which this request may not stop.
            was_asked_for = bool(request.sampling.stop) or request.grammar is not None or generation.has_stopped
        else:
            was_asked_for = True
        finish = taken.finish if was_asked_for else generation.find_finish()
        generation.is_over = finish is not None
        return taken if finish is taken.finish else evolve(taken, finish=finish)


def empty_chunk(finish: FinishReason, *, version: int) -> Chunk:
    """Return a chunk without tokens that ends a generation."""
    return Chunk(token_ids=(), logprobs=(), raw_logprobs=(), version=version, finish=finish)
