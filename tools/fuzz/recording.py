"""An engine that writes down all it sees and says, and says what a writer tells it to."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from contextvars import ContextVar
from random import Random

import anyio
import anyio.lowlevel
import numpy as np
from attrs import define, field

from areal_actors.domain import Chunk, EngineInfo, EngineRequest, EngineStatistics, FinishReason, PauseMode, Snapshot
from areal_actors.errors import EngineError
from areal_actors_testing.exactness import Recorded

__all__ = ["ORDER", "Order", "RecordingEngine", "Writing"]

CONTEXT_LENGTH = 3072
_LOGPROBS = -np.random.default_rng(0).exponential(2.0, 1 << 14).astype(np.float32)
_NO_TOKENS = np.zeros(0, np.int32)


@define
class Writing:
    """What is to be sampled: ids, and whether the last of them was the model's own end."""

    token_ids: list[int]
    finish: FinishReason = FinishReason.STOP


@define
class Order:
    """What befalls one request: where it stops, and why. ``after`` counts chunks."""

    write: Callable[[EngineRequest], Writing]
    hang_up: anyio.CancelScope | None = None
    fault: FinishReason | EngineError | None = None
    after: int = 0
    has_pauses: bool = False
    """Whether other requests may run between chunks."""


ORDER: ContextVar[Order] = ContextVar("order")
"""What befalls the requests of the task that asks."""


@define(eq=False)
class _Log:
    prompt: np.ndarray
    chunks: list[Chunk] = field(factory=list)


class RecordingEngine:
    """An ``Engine`` whose log is the truth."""

    def __init__(self, rng: Random, *, vocab_size: int) -> None:
        self.rng = rng
        self.version = 0
        self._logs: dict[str, _Log] = {}
        self.info = EngineInfo(
            name="recording",
            model="none",
            vocab_size=vocab_size,
            context_length=CONTEXT_LENGTH,
            dtype="float32",
            device="cpu",
            max_concurrent=1 << 10,
        )

    def begin(self) -> None:
        """Start a new log."""
        self._logs = {}

    def recorded(self) -> dict[str, Recorded]:
        """The log, by request."""
        return {name: _join(log) for name, log in self._logs.items()}

    @asynccontextmanager
    async def generate(self, request: EngineRequest) -> AsyncIterator[AsyncIterator[Chunk]]:
        """Sample what the order of the asking task has written."""
        order = ORDER.get()
        log = self._logs[request.id] = _Log(request.prompt)
        # The consumer stops reading at a stop string.
        async with aclosing(self._sample(order, self._cut(order.write(request)), log)) as chunks:
            yield chunks

    async def _sample(self, order: Order, chunks: list[Chunk], log: _Log) -> AsyncGenerator[Chunk]:
        for number, chunk in enumerate(chunks):
            if order.has_pauses:
                await anyio.lowlevel.checkpoint()
            if number == order.after:
                if order.hang_up is not None:
                    order.hang_up.cancel()
                    await anyio.lowlevel.checkpoint()
                if isinstance(order.fault, EngineError):
                    raise order.fault
                if order.fault is not None:
                    yield Chunk(token_ids=(), logprobs=(), raw_logprobs=(), version=self.version, finish=order.fault)
                    return
            log.chunks.append(chunk)
            yield chunk

    def _cut(self, writing: Writing) -> list[Chunk]:
        """In chunks of random lengths, some of them under newer weights."""
        ids = np.array(writing.token_ids, np.int32)
        ends = [len(ids)]
        if len(ids) > 1 and self.rng.random() < 0.7:
            ends = sorted({*(self.rng.randrange(1, len(ids)) for _ in range(self.rng.randrange(1, 4))), len(ids)})
        chunks, start = [], 0
        for end in ends:
            self.version += self.rng.random() < 0.05
            chunks.append(self._chunk(ids[start:end], writing.finish if end == len(ids) else None))
            start = end
        return chunks

    def _chunk(self, ids: np.ndarray, finish: FinishReason | None) -> Chunk:
        at = self.rng.randrange(len(_LOGPROBS) - len(ids))
        logprobs = _LOGPROBS[at : at + len(ids)]
        raw = logprobs if at % 4 else _LOGPROBS[: len(ids)]
        return Chunk(token_ids=ids, logprobs=logprobs, raw_logprobs=raw, version=self.version, finish=finish)

    # ------------------------------------------------------------------------------- what nobody asks for here

    async def abort(self, request_id: str) -> None:
        """Nothing runs on its own."""

    async def pause(self, mode: PauseMode = PauseMode.KEEP) -> None:
        """Nothing runs on its own."""

    async def resume(self) -> None:
        """Nothing was paused."""

    async def load(self, snapshot: Snapshot) -> None:
        """Stamp its version."""
        self.version = snapshot.version

    def statistics(self) -> EngineStatistics:
        """None are kept."""
        return EngineStatistics()


def _join(log: _Log) -> Recorded:
    chunks = log.chunks
    if not chunks:
        return Recorded(prompt=log.prompt, token_ids=_NO_TOKENS, logprobs=_NO_TOKENS, versions=_NO_TOKENS)
    return Recorded(
        prompt=log.prompt,
        token_ids=np.concatenate([chunk.token_ids for chunk in chunks]),
        logprobs=np.concatenate([chunk.logprobs for chunk in chunks]),
        versions=np.concatenate([np.full(len(chunk.token_ids), chunk.version, np.int32) for chunk in chunks]),
    )
