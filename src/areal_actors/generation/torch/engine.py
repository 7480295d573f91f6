"""The asynchronous interface of the embedded engine: ``TorchEngine``, an ``Engine`` that computes on its own thread.

``worker.py`` does all computation. This module holds the streams that consumers read, and the communication between the
two: commands go through a queue that the thread reads between two steps; the results of a step come back in one call on
the event loop.
"""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import anyio
import anyio.lowlevel
import torch
from attrs import define, evolve, field, frozen
from safetensors import SafetensorError
from tokenizers import Tokenizer

from areal_actors.domain import Chunk, EngineInfo, EngineRequest, EngineStatistics, PauseMode, Snapshot
from areal_actors.errors import ArealError, ConfigError, EngineError, InvalidRequest, ModelError, UnsupportedParameter
from areal_actors.generation.base import Decode, find_stop_ids, validate_request
from areal_actors.generation.torch.config import TorchEngineConfig
from areal_actors.generation.torch.constraint import GrammarCompiler
from areal_actors.generation.torch.forward import Forward, LlamaForward, LlamaShape, create_forward
from areal_actors.generation.torch.graphs import create_runner
from areal_actors.generation.torch.known_models import find_shape, keep_shape, open_known
from areal_actors.generation.torch.scheduler import Generation
from areal_actors.generation.torch.worker import CreateRunner, Reply, Report, Worker
from areal_actors.lib.precision import choose_dtype
from areal_actors.lib.telemetry import quiet_transformers
from areal_actors.lib.threads import NUM_CHECKS, describe_place
from areal_actors.models import model_shape

CLOSE_SECONDS = 60.0
"""How long closing waits for a step or a weight load in progress. The thread is a daemon and never blocks the exit."""


class TorchEngine:
    """An ``Engine`` that runs a transformers causal LM in this process. Opened with ``open``, on asyncio or trio.

    All methods are called from the event loop that opened it. If its thread fails, or hangs for longer than
    ``step_timeout_seconds``, every generation and every later call raises ``EngineError`` with the failure as its
    cause.
    """

    def __init__(
        self, config: TorchEngineConfig, info: EngineInfo, decode: Decode | None, compiler: GrammarCompiler | None
    ) -> None:
        """Use ``open``."""
        self._config = config
        self._info = info
        self._decode = decode
        self._compiler = compiler
        self._streams: dict[Generation, _Stream] = {}
        self._ids: set[str] = set()
        self._replies: set[Reply] = set()
        self._statistics = EngineStatistics()
        self._version = 0
        self._gone: EngineError | None = None
        self._ended = anyio.Event()
        self._is_unwatched = threading.Event()
        self._worker: Worker

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        config: TorchEngineConfig | None = None,
        *,
        model: Any,
        decode: Decode | None = None,
        tokenizer: Tokenizer | None = None,
        version: int = 0,
        create_runner: CreateRunner = create_runner,
    ) -> AsyncIterator[TorchEngine]:
        """Open an engine for ``model``: a directory, or a transformers causal LM.

        A model is copied, so that the caller can continue to train it. ``decode`` turns ids into text and is only
        needed for stop strings; a tokenizer's ``decode`` can be used. ``tokenizer`` (``tokenizers.Tokenizer``) is the
        model's and is only needed for grammars. ``version`` is that of the model's weights.
        ``create_runner`` chooses what computes the steps; the default knows the fastest way for model and device.

        Raises:
            ConfigError: the device is not available, or keys and values of all slots do not fit into its memory.
            ModelError: the model cannot be read, or cannot be run here.
        """
        config = config or TorchEngineConfig()
        device = config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        known = find_shape(Path(model), device) if isinstance(model, str | Path) else None
        info = evolve(_describe(config, model, device, known), has_grammars=tokenizer is not None)
        compiler = None if tokenizer is None else GrammarCompiler(tokenizer, vocab_size=info.vocab_size)
        engine = cls(config, info, decode, compiler)
        engine._version = version
        await engine._start(model, known, create_runner)
        try:
            yield engine
        finally:
            await engine._close()

    async def _start(self, model: Any, known: LlamaShape | None, create_runner: CreateRunner) -> None:
        native: Any = anyio.lowlevel.current_token().native_token
        # The thread schedules a call on this event loop without waiting for it: asyncio has call_soon_threadsafe, trio
        # run_sync_soon.
        post = getattr(native, "call_soon_threadsafe", None) or native.run_sync_soon
        dtype, device = getattr(torch, self._info.dtype), self._info.device

        def open_forward() -> Forward:
            directory = Path(model) if isinstance(model, str | Path) else None
            if directory is not None and known is not None:
                opened = open_known(directory, known, dtype=dtype, device=device)
                if opened is not None:
                    return opened
            forward = create_forward(own_copy(model, dtype, device), max_length=self._info.context_length)
            if directory is not None and isinstance(forward, LlamaForward):
                keep_shape(directory, device, forward.shape)
            return forward

        def report(news: Report) -> None:
            post(lambda: self._take(news))

        ready = anyio.Event()
        started = Reply(ready)
        self._replies.add(started)
        self._worker = Worker(
            self._config,
            open_forward=open_forward,
            create_runner=create_runner,
            context_length=self._info.context_length,
            report=report,
            opened=started,
            version=self._version,
        )
        thread = threading.Thread(target=self._worker.run, name="areal-torch-engine", daemon=True)
        thread.start()
        if (limit := self._config.step_timeout_seconds) is not None:
            watch = partial(self._watch, thread, limit, post)
            threading.Thread(target=watch, name="areal-torch-engine-watch", daemon=True).start()
        try:
            await ready.wait()
        except BaseException:
            await self._close()
            raise
        if started.error is not None:
            raise started.error.__cause__ if isinstance(started.error.__cause__, ArealError) else started.error

    async def _close(self) -> None:
        self._worker.post(self._worker.close)
        with anyio.move_on_after(CLOSE_SECONDS, shield=True):
            await self._ended.wait()
        self._is_unwatched.set()

    # ------------------------------------------------------------------------------------------ the protocol

    @property
    def info(self) -> EngineInfo:
        """Return facts that do not change while the engine is open."""
        return self._info

    @property
    def version(self) -> int:
        """Return the version of the weights with which the next token will be sampled."""
        return self._version

    @asynccontextmanager
    async def generate(self, request: EngineRequest) -> AsyncIterator[AsyncIterator[Chunk]]:
        """Open a generation; see ``Engine.generate``."""
        validate_request(request, self._info, can_decode=self._decode is not None)
        constraint = None
        if request.grammar is not None:
            if self._compiler is None:
                raise UnsupportedParameter("Grammars need a tokenizer, and this engine was opened without one.")
            constraint = await self._compiler.compile(request.grammar, stop_ids=find_stop_ids(request))
        if request.id in self._ids:
            raise InvalidRequest(
                f"A generation with the id {request.id!r} is running; give each its own id.", param="id"
            )
        generation = Generation.create(
            request, context_length=self._info.context_length, decode=self._decode, constraint=constraint
        )
        stream = self._streams[generation] = _Stream()
        self._ids.add(request.id)
        try:
            self._send(partial(self._worker.submit, generation))
            yield stream
        finally:
            del self._streams[generation]
            self._ids.discard(request.id)
            if not stream.is_over and self._gone is None:
                self._send(partial(self._worker.abort, request_id=request.id))

    async def abort(self, request_id: str) -> None:
        """End a generation with ``FinishReason.ABORT`` after delivering what was sampled. Unknown ids are ignored."""
        self._send(partial(self._worker.abort, request_id=request_id))
        await anyio.lowlevel.checkpoint()

    async def pause(self, mode: PauseMode = PauseMode.KEEP) -> None:
        """Stop sampling until ``resume``; return once no more tokens are sampled.

        If it is cancelled, the engine remains pausing: call ``resume``.
        """
        await self._ask(partial(self._worker.pause, mode))

    async def resume(self) -> None:
        """Continue sampling."""
        self._send(self._worker.resume)
        await anyio.lowlevel.checkpoint()

    async def load(self, snapshot: Snapshot) -> None:
        """Replace the weights between two tokens; see ``Engine.load``.

        Keys and values of running generations are computed again with the new weights. If this call is cancelled, it
        still returns only after the load has ended, because ``snapshot.state`` is read until then.
        """
        await self._ask(partial(self._worker.load, snapshot), shield=True)

    def statistics(self) -> EngineStatistics:
        """Return the current counters without waiting."""
        running = min(self._statistics.running, len(self._streams))
        return evolve(self._statistics, running=running, waiting=len(self._streams) - running)

    async def wait_failed(self) -> NoReturn:
        """Raise ``EngineError`` once the engine has failed. Waits forever if it is closed instead."""
        await self._ended.wait()
        while self._gone is None or self._gone.__cause__ is None:
            await anyio.sleep_forever()
        raise EngineError(str(self._gone)) from self._gone.__cause__

    # ------------------------------------------------------------------------------------- to and fro

    def _send(self, command: Callable[[], None]) -> None:
        if self._gone is not None:
            raise EngineError(str(self._gone)) from self._gone.__cause__
        self._worker.post(command)

    async def _ask(self, command: Callable[[Reply], None], *, shield: bool = False) -> None:
        reply = Reply(anyio.Event())
        self._send(partial(command, reply))
        self._replies.add(reply)
        with anyio.CancelScope(shield=shield):
            await reply.done.wait()
        if reply.error is not None:
            raise reply.error

    def _take(self, news: Report) -> None:
        """Process the report of a step on the event loop."""
        if self._ended.is_set():  # the step had counted as hung
            return
        self._version = news.version
        self._statistics = news.statistics
        for generation, chunk in news.chunks:
            if (stream := self._streams.get(generation)) is not None:
                stream.put(chunk)
        for reply in news.replies:
            self._replies.discard(reply)
            reply.done.set()
        if news.is_last:
            self._end(news.failure)

    def _end(self, failure: BaseException | None) -> None:
        """Fail all that waits, and all later calls."""
        if self._ended.is_set():
            return
        what = "has been closed" if failure is None else f"failed: {type(failure).__name__}: {failure}"
        self._gone = EngineError(f"The torch engine {what}. Open a new one.")
        self._gone.__cause__ = failure
        for stream in self._streams.values():
            stream.put(self._gone)
        for reply in self._replies:
            reply.error = self._gone
            reply.done.set()
        self._replies.clear()
        self._ended.set()
        self._is_unwatched.set()

    def _watch(self, thread: threading.Thread, limit: float, post: Callable[[Callable[[], None]], object]) -> None:
        """End the engine when a turn of ``thread`` takes longer than ``limit`` seconds. Runs on a thread.

        It counts how often it finds the same turn instead of comparing times: if the whole process was stopped for an
        hour (SIGSTOP, a suspended machine), no step has been hung for an hour.
        """
        turn, num_checks = None, 0
        while thread.is_alive() and not self._is_unwatched.wait(limit / NUM_CHECKS):
            last, turn = turn, None if self._worker.is_idle else self._worker.num_turns
            num_checks = num_checks + 1 if turn is not None and turn == last else 0
            if num_checks < NUM_CHECKS:
                continue
            failure = TimeoutError(
                f"its thread hangs{describe_place(thread)}: a step, or a load of weights, has taken more than "
                f"{limit:g} s (engine.step_timeout_seconds)"
            )
            # The event loop is closed, and no task waits.
            with suppress(RuntimeError):
                post(lambda: self._end(failure))  # noqa: B023 - the loop ends here
            return


@define(eq=False)
class _Stream:
    """The chunks of one generation, up to its last one or an error."""

    is_over: bool = False
    _pending: deque[Chunk | ArealError] = field(factory=deque)
    _news: anyio.Event = field(factory=anyio.Event)

    def put(self, chunk: Chunk | ArealError) -> None:
        self._pending.append(chunk)
        self._news.set()

    def __aiter__(self) -> _Stream:
        return self

    async def __anext__(self) -> Chunk:
        if self.is_over or self._pending:
            await anyio.lowlevel.checkpoint()
        if self.is_over:
            raise StopAsyncIteration
        while not self._pending:
            self._news = anyio.Event()
            await self._news.wait()
        chunk = self._pending.popleft()
        if isinstance(chunk, ArealError):
            self.is_over = True
            # A new object of the same kind: several generations may share the error.
            raise type(chunk)(str(chunk)) from chunk.__cause__
        self.is_over = chunk.finish is not None
        return chunk


def _describe(config: TorchEngineConfig, model: Any, device: str, known: LlamaShape | None) -> EngineInfo:
    if known is not None:
        name, vocab_size, limit = str(model), known.vocab_size, known.context_length
    else:
        if isinstance(model, str | Path):
            from transformers import AutoConfig

            try:
                settings = AutoConfig.from_pretrained(model, local_files_only=True)
            except (OSError, ValueError) as error:
                raise ModelError(f"{model} is not a directory of a transformers model: {error}") from error
        else:
            settings = model.config
        name = str(getattr(settings, "name_or_path", "") or type(model).__name__)
        found = model_shape(settings)
        vocab_size, limit = found.vocab_size, found.max_positions
    limit = limit or config.max_length
    return EngineInfo(
        name="torch",
        model=name,
        vocab_size=vocab_size,
        context_length=min(config.max_length, limit),
        dtype=choose_dtype(config.dtype, device),
        device=device,
        max_concurrent=config.max_concurrent,
    )


def own_copy(model: Any, dtype: torch.dtype, device: str) -> Any:
    """Return a private copy of the model, ready to run."""
    if not isinstance(model, str | Path):
        own = copy.deepcopy(model)
        # Weights alone, as transformers does: ``own.to(dtype)`` would also round the frequencies of rotary embeddings,
        # which turn a key by a whole radian too much or too little after a few hundred tokens in bfloat16.
        for weight in own.parameters():
            weight.data = weight.data.to(dtype)
        return _move(own, device).eval()
    from transformers import AutoModelForCausalLM

    try:
        with quiet_transformers():
            factory: Any = AutoModelForCausalLM
            loaded, report = factory.from_pretrained(
                model, local_files_only=True, dtype=dtype, output_loading_info=True
            )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"{model} cannot be loaded: {error}") from error
    if missing := sorted(report["missing_keys"]):  # transformers would initialise them randomly
        raise ModelError(f"The files in {model} lack {len(missing)} weights, {missing[0]} among them; save it again.")
    return _move(loaded, device).eval()


def _move(model: Any, device: str) -> Any:
    try:
        return model.to(device)
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch was built without this device
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"engine.device: the model cannot be moved to {device!r}: {reason}. Use auto or cpu, or install a build of "
            "torch for that device."
        ) from error


@frozen(kw_only=True)
class EnginePlan:
    """Bytes of an embedded engine: weights, and keys and values of ``max_concurrent`` generations at full length."""

    weights: int
    cache: int

    @property
    def total(self) -> int:
        """The sum of both."""
        return self.weights + self.cache


def plan_engine(model: Any, config: TorchEngineConfig, *, device_type: str) -> EnginePlan:
    """Predict what an embedded engine needs for ``model`` when all its slots are full."""
    dtype: torch.dtype = getattr(torch, choose_dtype(config.dtype, device_type))
    shape = model_shape(model.config)
    per_token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * dtype.itemsize
    return EnginePlan(
        weights=sum(weight.numel() for weight in model.parameters()) * dtype.itemsize,
        cache=config.max_concurrent * config.max_length * per_token,
    )
