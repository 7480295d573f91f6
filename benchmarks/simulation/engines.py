"""Engines that pretend: a batch, a queue, a prefix cache and the time that they take, at the protocol of real ones.

A generation waits for a place in the batch, then for the prefill of what is not cached, then samples chunks whose pace
is set by the size of the batch when each of them begins. Lengths are lognormal and keyed by the request, so that the
order of arrival changes no answer. With a real clock it is an engine of real time.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
import numpy as np
from attrs import evolve, field, frozen
from benchmarks.simulation.vocabulary import FIRST_WORD, NUM_WORDS

from areal_actors.domain import (
    Chunk,
    EngineInfo,
    EngineRequest,
    EngineStatistics,
    FinishReason,
    PauseMode,
    Snapshot,
)

__all__ = ["EngineModel", "LogNormal", "SimulatedEngine"]

_POOL = np.random.default_rng(1).integers(FIRST_WORD, FIRST_WORD + NUM_WORDS, 1 << 16, dtype=np.int32)
_LOGPROBS = -np.random.default_rng(2).exponential(0.5, 1 << 16).astype(np.float32)


@frozen(kw_only=True)
class LogNormal:
    """A long-tailed size: its median, the deviation of its logarithm, and its bounds."""

    median: float
    sigma: float
    least: float = 0.0
    most: float = math.inf

    def draw(self, source: random.Random) -> float:
        """One size."""
        return min(max(self.median * math.exp(self.sigma * source.gauss(0.0, 1.0)), self.least), self.most)


@frozen(kw_only=True)
class EngineModel:
    """How fast an engine is. The defaults are those of an 8B model on one accelerator of 80 GB."""

    answer_tokens: LogNormal = field(default=LogNormal(median=256, sigma=0.8, least=8, most=2048))
    max_running: int = 64
    step_seconds: float = 0.008
    """Of one token for each sequence of the batch, if there is one."""
    step_seconds_per_sequence: float = 0.0001
    """More of it for each sequence."""
    prefill_tokens_per_second: float = 20_000.0
    """One prompt after the other, beside the batch."""
    cache_tokens: int = 400_000
    """Of the prefix cache, whose least recently used conversation goes first."""
    tokens_per_chunk: int = 64
    """How many tokens the engine hands over at once."""
    load_seconds: float = 2.0
    """Nothing is sampled while new weights are loaded."""

    def step(self, num_running: int) -> float:
        """Seconds of one token with so many sequences in the batch."""
        return self.step_seconds + num_running * self.step_seconds_per_sequence


class SimulatedEngine:
    """An ``Engine`` without a model."""

    def __init__(self, model: EngineModel, *, name: str, stop_token_id: int, vocab_size: int) -> None:
        self._model = model
        self._stop_token_id = stop_token_id
        self.info = EngineInfo(
            name=name,
            model="simulated",
            vocab_size=vocab_size,
            context_length=2**17,
            dtype="none",
            device="none",
            max_concurrent=model.max_running,
        )
        self.version = 0
        self._statistics = EngineStatistics()
        self._running = 0
        self._waiting: deque[anyio.Event] = deque()
        self._cached: OrderedDict[tuple[int | str, ...], int] = OrderedDict()
        self._num_cached = 0
        self._prefilled_at = 0.0
        self._going: anyio.Event | None = None
        """Set when sampling goes on; ``None`` while it does."""
        self._is_paused = False
        self._is_loading = False

    @asynccontextmanager
    async def generate(self, request: EngineRequest) -> AsyncIterator[AsyncIterator[Chunk]]:
        """A place in the batch, for as long as the block lasts."""
        await self._take_place()
        try:
            yield self._sample(request)
        finally:
            self._give_place_back()

    async def _take_place(self) -> None:
        if self._running < self._model.max_running:
            self._running += 1
            return
        turn = anyio.Event()
        self._waiting.append(turn)
        try:
            await turn.wait()
        except BaseException:
            if turn in self._waiting:
                self._waiting.remove(turn)
            else:
                self._give_place_back()
            raise

    def _give_place_back(self) -> None:
        """To the first in line, if there is one."""
        if self._waiting:
            self._waiting.popleft().set()
        else:
            self._running -= 1

    async def _sample(self, request: EngineRequest) -> AsyncIterator[Chunk]:
        model, num_cached = self._model, self._take_cached(request)
        await self._prefill(len(request.prompt) - num_cached)
        drawn = model.answer_tokens.draw(random.Random(f"{request.key.seed} {request.key.path}"))
        num_left = min(round(drawn), request.sampling.max_new_tokens)
        total = len(request.prompt) + num_left
        while num_left:
            await self._until_going()
            version, num = self.version, min(num_left, model.tokens_per_chunk)
            await anyio.sleep(num * model.step(self._running))
            num_left -= num
            yield self._chunk(num, version, is_last=not num_left, num_cached=num_cached)
        self._keep_cached(_conversation_of(request), total)

    async def _prefill(self, num_tokens: int) -> None:
        now = anyio.current_time()
        self._prefilled_at = max(now, self._prefilled_at) + num_tokens / self._model.prefill_tokens_per_second
        await anyio.sleep(self._prefilled_at - now)

    def _chunk(self, num: int, version: int, *, is_last: bool, num_cached: int) -> Chunk:
        start = self._statistics.sampled_tokens % (len(_POOL) - self._model.tokens_per_chunk)
        ids, logprobs = _POOL[start : start + num], _LOGPROBS[start : start + num]
        if is_last:
            ids = np.append(ids[:-1], np.int32(self._stop_token_id))
        self._statistics = evolve(self._statistics, sampled_tokens=self._statistics.sampled_tokens + num)
        return Chunk(
            token_ids=ids,
            logprobs=logprobs,
            raw_logprobs=logprobs,
            version=version,
            finish=FinishReason.STOP if is_last else None,
            num_cached_tokens=num_cached,
        )

    # ----------------------------------------------------------------------------------------- prefix cache

    def _take_cached(self, request: EngineRequest) -> int:
        """How many tokens of the prompt are there; they are out of the cache while they grow."""
        num_prompt = len(request.prompt)
        known = self._cached.pop(_conversation_of(request), 0)
        self._num_cached -= known
        num_cached = min(known, num_prompt - 1)
        self._statistics = evolve(
            self._statistics,
            prompt_tokens=self._statistics.prompt_tokens + num_prompt,
            cached_tokens=self._statistics.cached_tokens + num_cached,
        )
        return num_cached

    def _keep_cached(self, conversation: tuple[int | str, ...], num_tokens: int) -> None:
        self._num_cached += num_tokens - self._cached.pop(conversation, 0)
        self._cached[conversation] = num_tokens
        while self._num_cached > self._model.cache_tokens and self._cached:
            self._num_cached -= self._cached.popitem(last=False)[1]

    # ---------------------------------------------------------------------------------------------- control

    async def _until_going(self) -> None:
        while self._going is not None:
            await self._going.wait()

    def _hold(self) -> None:
        if (self._is_paused or self._is_loading) and self._going is None:
            self._going = anyio.Event()
        elif not self._is_paused and not self._is_loading and self._going is not None:
            self._going.set()
            self._going = None

    async def abort(self, request_id: str) -> None:
        """Whoever leaves the block has aborted."""

    async def pause(self, mode: PauseMode = PauseMode.KEEP) -> None:  # noqa: ARG002 - it keeps what runs
        """No chunk begins any more."""
        self._is_paused = True
        self._hold()
        await anyio.lowlevel.checkpoint()

    async def resume(self) -> None:
        """Go on."""
        self._is_paused = False
        self._hold()
        await anyio.lowlevel.checkpoint()

    async def load(self, snapshot: Snapshot) -> None:
        """Hold everything for as long as a load takes; what was cached is of the old weights."""
        self._is_loading = True
        self._hold()
        await anyio.sleep(self._model.load_seconds)
        self._cached.clear()
        self._num_cached = 0
        self.version = snapshot.version
        self._is_loading = False
        self._hold()

    def statistics(self) -> EngineStatistics:
        """Counters, at once."""
        return evolve(self._statistics, running=self._running, waiting=len(self._waiting))


def _conversation_of(request: EngineRequest) -> tuple[int | str, ...]:
    """A request's key is its conversation's, and three more: prompt, occurrence, choice."""
    return request.key.path[:-3]
