"""``EchoEngine``: an engine without a model, at the same plug point and under the same contract as the real ones.

Its samples are scripted, and a test may hold back every token until it releases it: streaming, abort, pause and loads
can be tested at any chosen moment without a clock. Nothing runs in the background: a consumer that reads drives its
generation.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
from attrs import define, evolve

from areal_actors.domain import (
    Chunk,
    EngineInfo,
    EngineRequest,
    EngineStatistics,
    FinishReason,
    Ints,
    PauseMode,
    Snapshot,
    TopLogprob,
)
from areal_actors.errors import ContextLengthExceeded, EngineError, InvalidRequest, ModelError, UnsupportedParameter
from areal_actors.lib.change_signal import ChangeSignal

Script = Callable[[Ints], Sequence[int]]
"""Maps prompt ids to the ids to be sampled; the generation ends with ``STOP`` after the last of them."""


def echo(prompt: Ints) -> Sequence[int]:
    """Return the ids of the prompt."""
    return [int(token_id) for token_id in prompt]


def script_answers(*answers: Sequence[int]) -> Script:
    """Return a script whose requests sample the answers in order; the last answer serves all further requests."""
    remaining = list(answers)

    def next_answer(_: Ints) -> Sequence[int]:
        return remaining.pop(0) if len(remaining) > 1 else remaining[0]

    return next_answer


def echo_logprob(token_id: int) -> float:
    """Return the log-probability that ``EchoEngine`` reports: exact in float32, and different for neighbouring ids."""
    return -(1 + token_id % 15) / 16


@define(eq=False)
class _EchoGeneration:
    request: EngineRequest
    answer: list[int]
    num_sampled: int = 0
    is_aborted: bool = False
    is_over: bool = False


@define(eq=False)
class _EchoStream:
    """A plain iterator: an abandoned async generator would have to be closed by its consumer."""

    _generation: _EchoGeneration
    _next_chunk: Callable[[_EchoGeneration], Awaitable[Chunk]]

    def __aiter__(self) -> _EchoStream:
        return self

    async def __anext__(self) -> Chunk:
        return await self._next_chunk(self._generation)


class EchoEngine:
    """A scripted ``Engine``. With ``is_gated`` a token is sampled only after ``release`` permits it.

    With ``has_grammars`` it accepts grammars, and the script has to match them.

    ``requests`` holds all requests, in order. ``fail`` makes it fail like an engine whose thread died.
    """

    def __init__(
        self,
        script: Script = echo,
        *,
        is_gated: bool = False,
        vocab_size: int = 1 << 17,
        context_length: int = 1 << 15,
        version: int = 0,
        has_grammars: bool = False,
    ) -> None:
        self.requests: list[EngineRequest] = []
        self._script = script
        self._permits: int | None = 0 if is_gated else None
        self._info = EngineInfo(
            name="echo",
            model="echo",
            vocab_size=vocab_size,
            context_length=context_length,
            dtype="float32",
            device="cpu",
            max_concurrent=1 << 10,
            has_grammars=has_grammars,
        )
        self._version = version
        self._is_paused = False
        self._pausing: PauseMode | None = None
        self._failure: Exception | None = None
        self._statistics = EngineStatistics()
        self._open: dict[_EchoGeneration, None] = {}
        self._changed = ChangeSignal()

    @property
    def info(self) -> EngineInfo:
        """Properties of the engine, which do not change."""
        return self._info

    @property
    def version(self) -> int:
        """Version of the weights that the next token is stamped with."""
        return self._version

    def release(self, num_tokens: int = 1) -> None:
        """Permit ``num_tokens`` more tokens, for the generations that read first."""
        self._permits = (self._permits or 0) + num_tokens
        self._changed.notify()

    def fail(self, error: Exception) -> None:
        """Make all later calls raise ``EngineError`` with ``error`` as its cause."""
        self._failure = error
        self._changed.notify()

    @asynccontextmanager
    async def generate(self, request: EngineRequest) -> AsyncIterator[AsyncIterator[Chunk]]:
        """Open a generation; see ``Engine.generate``."""
        self._check()
        prompt = request.prompt
        if len(prompt) == 0:
            raise InvalidRequest("The prompt has no tokens; send at least one.", param="prompt")
        if len(prompt) >= self._info.context_length:
            raise ContextLengthExceeded(num_tokens=len(prompt), max_tokens=self._info.context_length)
        if prompt.min() < 0 or prompt.max() >= self._info.vocab_size:
            raise InvalidRequest("The prompt has ids outside the vocabulary.", param="prompt")
        if request.grammar is not None and not self._info.has_grammars:
            raise UnsupportedParameter("The echo engine was made without grammars.")
        self.requests.append(request)
        generation = _EchoGeneration(request, [int(i) for i in self._script(request.prompt)])
        self._open[generation] = None
        self._statistics = evolve(self._statistics, prompt_tokens=self._statistics.prompt_tokens + len(request.prompt))
        try:
            yield _EchoStream(generation, self._next_chunk)
        finally:
            self._open.pop(generation, None)
            # The consumer left before the end.
            if not generation.is_over:
                self._count_abort()
            self._changed.notify()

    async def abort(self, request_id: str) -> None:
        """End a generation with ``FinishReason.ABORT``. Unknown ids are ignored."""
        self._check()
        for generation in self._open:
            generation.is_aborted |= generation.request.id == request_id
        self._changed.notify()
        await anyio.lowlevel.checkpoint()

    async def pause(self, mode: PauseMode = PauseMode.KEEP) -> None:
        """Return when no token will be sampled until ``resume``."""
        self._check()
        if mode is PauseMode.ABORT:
            for generation in self._running:
                generation.is_aborted = True
        self._pausing = mode
        while mode is PauseMode.WAIT and self._running and self._pausing is mode:
            await self._wait()
        # Unless it was resumed, or paused in another way, while this call waited.
        if self._pausing is mode:
            self._is_paused, self._pausing = True, None
        self._changed.notify()
        await anyio.lowlevel.checkpoint()

    async def resume(self) -> None:
        """Continue sampling."""
        self._check()
        self._is_paused, self._pausing = False, None
        self._changed.notify()
        await anyio.lowlevel.checkpoint()

    async def load(self, snapshot: Snapshot) -> None:
        """Stamp the snapshot's version from the next token on."""
        self._check()
        if snapshot.is_empty:
            raise ModelError(f"Snapshot of version {snapshot.version} has neither state nor path; give it one of them.")
        self._version = snapshot.version
        await anyio.lowlevel.checkpoint()

    def statistics(self) -> EngineStatistics:
        """Return the counters, without waiting."""
        running = len(self._running)
        return evolve(self._statistics, running=running, waiting=len(self._open) - running)

    # ----------------------------------------------------------------------------------------- how it samples

    @property
    def _running(self) -> list[_EchoGeneration]:
        return [g for g in self._open if g.num_sampled and not g.is_over]

    async def _wait(self) -> None:
        await self._changed.wait()
        self._check()

    def _check(self) -> None:
        if self._failure is not None:
            raise EngineError(f"The echo engine failed: {self._failure}") from self._failure

    def _count_abort(self) -> None:
        self._statistics = evolve(self._statistics, aborted=self._statistics.aborted + 1)

    async def _next_chunk(self, generation: _EchoGeneration) -> Chunk:
        # So that other tasks run between two tokens, as with a real engine.
        await anyio.lowlevel.checkpoint()
        if generation.is_over:
            raise StopAsyncIteration
        while not (generation.is_aborted or self._failure):
            # A pause that waits lets generations end that have begun, and holds back the others.
            is_held = self._is_paused or (self._pausing is not None and not generation.num_sampled)
            if not is_held and self._permits != 0:
                break
            await self._wait()
        self._check()
        return self._sample(generation)

    def _sample(self, generation: _EchoGeneration) -> Chunk:
        """Return the next chunk: one token, or an empty chunk if the generation was aborted or its script has ended."""
        if generation.is_aborted or not generation.answer:
            self._end(generation)
            if generation.is_aborted:
                self._count_abort()
            reason = FinishReason.ABORT if generation.is_aborted else FinishReason.STOP
            return Chunk(token_ids=(), logprobs=(), raw_logprobs=(), version=self._version, finish=reason)
        if self._permits is not None:
            self._permits -= 1
        token_id = generation.answer.pop(0)
        generation.num_sampled += 1
        self._statistics = evolve(self._statistics, sampled_tokens=self._statistics.sampled_tokens + 1)
        request, finish = generation.request, None
        room = self._info.context_length - len(request.prompt)
        if token_id in (*request.stop_token_ids, *request.sampling.stop_token_ids) or not generation.answer:
            finish = FinishReason.STOP
        elif generation.num_sampled >= min(request.sampling.max_new_tokens, room):
            finish = FinishReason.LENGTH
        if finish is not None:
            self._end(generation)
        logprob = echo_logprob(token_id)
        has_top = request.sampling.top_logprobs > 0
        return Chunk(
            token_ids=[token_id],
            logprobs=[logprob],
            raw_logprobs=[logprob],
            version=self._version,
            finish=finish,
            top_logprobs=((TopLogprob(token_id=token_id, logprob=logprob),),) if has_top else (),
        )

    def _end(self, generation: _EchoGeneration) -> None:
        generation.is_over = True
        self._changed.notify()
