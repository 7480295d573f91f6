"""``FaultyEngine``: an engine that misreports what it sampled, for tests of the code that has to detect it."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from enum import StrEnum

import numpy as np
from attrs import define, evolve, field

from areal_actors.domain import Chunk, EngineInfo, EngineRequest, EngineStatistics, PauseMode, Snapshot
from areal_actors.generation.base import Engine

Retokenise = Callable[[Sequence[int]], Sequence[int]]
"""Maps ids to those that their text is tokenised to."""

_NUM_PLACES = 3
"""A fault of one token is at one of this many first places: a lost last token would leave no trace."""


class Fault(StrEnum):
    """The fault of every answer."""

    DROPPED_TOKEN = "dropped_token"  # noqa: S105
    """One token is missing, with all of its values."""
    DUPLICATED_TOKEN = "duplicated_token"  # noqa: S105
    """One token appears twice."""
    SHIFTED_LOGPROBS = "shifted_logprobs"
    """Each token has the log-probability of the one before it."""
    ZERO_LOGPROBS = "zero_logprobs"
    NAN_LOGPROB = "nan_logprob"
    """One log-probability is NaN."""
    RETOKENISED_IDS = "retokenised_ids"
    """The ids come from tokenising the text, and are not those that were sampled."""
    WRONG_VERSION = "wrong_version"
    """Tokens have a version that was never published."""
    EMPTY_CAPTURE = "empty_capture"
    """There are no tokens at all."""


class FaultyEngine:
    """``engine`` with a ``fault`` in each generation after the first ``num_honest``; other calls are passed on.

    ``seed`` decides where in an answer the fault is. ``retokenise`` is required for ``RETOKENISED_IDS``.
    """

    def __init__(
        self,
        engine: Engine,
        fault: Fault,
        *,
        seed: int = 0,
        num_honest: int = 0,
        retokenise: Retokenise | None = None,
    ) -> None:
        if fault is Fault.RETOKENISED_IDS and retokenise is None:
            msg = "retokenised ids need a tokenizer: pass retokenise"
            raise ValueError(msg)
        self._engine = engine
        self._fault = fault
        self._seed = seed
        self._num_honest = num_honest
        self._retokenise = retokenise
        self._num_opened = 0

    @property
    def info(self) -> EngineInfo:
        """The engine's info."""
        return self._engine.info

    @property
    def version(self) -> int:
        """The engine's version."""
        return self._engine.version

    @asynccontextmanager
    async def generate(self, request: EngineRequest) -> AsyncIterator[AsyncIterator[Chunk]]:
        """Open a generation of the engine and add the fault to it."""
        self._num_opened += 1
        is_honest = self._num_opened <= self._num_honest
        # From the seed and the number of the request, so that a run can be repeated.
        place = random.Random(f"{self._seed}:{self._num_opened}").randrange(_NUM_PLACES)  # noqa: S311 - a test's dice
        async with self._engine.generate(request) as chunks:
            yield chunks if is_honest else self._spoilt(chunks, _Spoiler(fault=self._fault, place=place))

    async def _spoilt(self, chunks: AsyncIterator[Chunk], spoiler: _Spoiler) -> AsyncIterator[Chunk]:
        held: list[Chunk] = []
        async for chunk in chunks:
            if self._retokenise is not None and self._fault is Fault.RETOKENISED_IDS:
                held.append(chunk)
                if chunk.finish is not None:
                    # One chunk with the ids of the text; the values of the sampled ids are distributed over them.
                    ids = list(self._retokenise([int(token_id) for each in held for token_id in each.token_ids]))
                    names = ("logprobs", "raw_logprobs")
                    columns = (np.concatenate([getattr(each, name) for each in held]) for name in names)
                    logprobs, raw_logprobs = (np.resize(column, len(ids)) for column in columns)
                    yield evolve(chunk, token_ids=ids, logprobs=logprobs, raw_logprobs=raw_logprobs, top_logprobs=())
            else:
                for spoilt in spoiler.spoil(chunk):
                    yield spoilt

    async def abort(self, request_id: str) -> None:
        """Pass the call to the engine."""
        await self._engine.abort(request_id)

    async def pause(self, mode: PauseMode = PauseMode.KEEP) -> None:
        """Pass the call to the engine."""
        await self._engine.pause(mode)

    async def resume(self) -> None:
        """Pass the call to the engine."""
        await self._engine.resume()

    async def load(self, snapshot: Snapshot) -> None:
        """Pass the call to the engine."""
        await self._engine.load(snapshot)

    def statistics(self) -> EngineStatistics:
        """Return the engine's statistics."""
        return self._engine.statistics()


@define
class _Spoiler:
    """Adds the fault to the chunks of one generation, at the token ``place`` for faults of one token."""

    fault: Fault
    place: int
    _num_seen: int = field(default=0, init=False)
    _last: tuple[float, float] | None = field(default=None, init=False)

    def spoil(self, chunk: Chunk) -> Iterator[Chunk]:
        where = self.place - self._num_seen
        is_here = 0 <= where < len(chunk.token_ids)
        self._num_seen += len(chunk.token_ids)
        match self.fault:
            case Fault.WRONG_VERSION:
                yield evolve(chunk, version=chunk.version + 7)
            case Fault.ZERO_LOGPROBS:
                zeros = np.zeros(len(chunk.token_ids))
                yield evolve(chunk, logprobs=zeros, raw_logprobs=zeros)
            case Fault.SHIFTED_LOGPROBS if len(chunk.token_ids):
                pairs = [(float(a), float(b)) for a, b in zip(chunk.logprobs, chunk.raw_logprobs, strict=True)]
                shifted = [self._last or pairs[-1], *pairs[:-1]]
                self._last = pairs[-1]
                yield evolve(chunk, logprobs=[a for a, _ in shifted], raw_logprobs=[b for _, b in shifted])
            case Fault.EMPTY_CAPTURE:
                if chunk.finish is not None:
                    yield _take(chunk, np.zeros(0, np.int64))
            case Fault.NAN_LOGPROB if is_here:
                logprobs = chunk.logprobs.copy()
                logprobs[where] = np.nan
                yield evolve(chunk, logprobs=logprobs, raw_logprobs=logprobs)
            case Fault.DROPPED_TOKEN if is_here:
                rest = _take(chunk, np.delete(np.arange(len(chunk.token_ids)), where))
                if len(rest.token_ids) or rest.finish is not None:
                    yield rest
            case Fault.DUPLICATED_TOKEN if is_here:
                yield _take(chunk, np.insert(np.arange(len(chunk.token_ids)), where, where))
            case _:
                yield chunk


def _take(chunk: Chunk, places: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Chunk:
    return evolve(
        chunk,
        token_ids=chunk.token_ids[places],
        logprobs=chunk.logprobs[places],
        raw_logprobs=chunk.raw_logprobs[places],
        top_logprobs=tuple(chunk.top_logprobs[place] for place in places) if chunk.top_logprobs else (),
    )
