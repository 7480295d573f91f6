"""What an inference engine must do to be trained through: the ``Engine`` protocol.

An engine takes prompt ids and streams what it samples: ids, log-probabilities and the version of the weights behind
each token. Nothing here knows messages, chat templates or HTTP. ``engines/torch`` runs in this process; servers plug in
at the same protocol, and one contract suite (``areal_actors.testing.engine_contract``) holds for all of them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from areal_actors.domain import Chunk, EngineInfo, EngineRequest, EngineStatistics, PauseMode, Snapshot

__all__ = ["Chunk", "Engine", "EngineInfo", "EngineRequest", "EngineStatistics", "PauseMode", "Snapshot"]


<<<<<<< HEAD
=======
@frozen(kw_only=True)
class EngineRequest:
    """One generation. ``prompt`` int32 [T], T >= 1; ``id`` names it for ``abort`` and in logs, alone while it runs.

    ``key`` seeds its random numbers. ``stop_token_ids`` are the renderer's end-of-turn ids; those of ``sampling`` are
    added.
    """

    id: str
    prompt: Ints = field(converter=as_ints, eq=False)
    sampling: Sampling = field(factory=Sampling)
    key: SampleKey
    stop_token_ids: tuple[int, ...] = ()


@frozen(kw_only=True)
class Chunk:
    """Tokens that were sampled since the last chunk, all under one version; the last chunk carries ``finish``.

    Arrays are [n], n >= 0 (only the last may be empty). A stop token is delivered as it was sampled.
    ``num_cached_tokens`` of the prompt came from the prefix cache (set in the first chunk).
    """

    token_ids: Ints = field(converter=as_ints, eq=False)
    logprobs: Floats = field(converter=as_floats, eq=False)
    raw_logprobs: Floats = field(converter=as_floats, eq=False)
    version: int
    finish: FinishReason | None = None
    top_logprobs: tuple[tuple[TopLogprob, ...], ...] = ()
    num_cached_tokens: int = 0


class PauseMode(StrEnum):
    """What happens to running generations when the engine pauses.

    Those run that have been given a place; those that still queue for one, and new ones, wait in every mode.
    """

    KEEP = "keep"
    """They stop where they are and go on at ``resume``, under whatever weights are loaded then."""
    WAIT = "wait"
    """They finish first."""
    ABORT = "abort"
    """They end with ``FinishReason.ABORT``."""


@frozen(kw_only=True)
class Snapshot:
    """Weights to load, in memory or as a directory of safetensors.

    ``state`` (parameter name to tensor, by the names of the model's state dict; shared, not copied) stays valid and
    unchanged until ``Engine.load`` has returned. Tied weights may be left out.
    """

    version: int
    state: Mapping[str, Any] | None = field(default=None, repr=False, eq=False)
    path: Path | None = None


@frozen(kw_only=True)
class EngineInfo:
    """What an engine can do.

    ``context_length`` bounds prompt plus output, ``vocab_size`` bounds the ids that it accepts.
    ``logprobs_follow_truncation`` tells whether reported log-probabilities are those after top-p, top-k and min-p.
    """

    name: str
    model: str
    vocab_size: int
    context_length: int
    dtype: str
    device: str
    max_concurrent: int
    logprobs_follow_truncation: bool = True


@frozen(kw_only=True)
class EngineStatistics:
    """Counters since the engine opened; ``running`` and ``waiting`` are of this moment."""

    running: int = 0
    waiting: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    sampled_tokens: int = 0
    aborted: int = 0
    busy_seconds: float = 0.0


>>>>>>> engine
class Engine(Protocol):
    """Prompt ids in, sampled ids out. Opened with ``async with``; all methods are called from one event loop."""

    @property
    def info(self) -> EngineInfo:
        """Facts that do not change while the engine is open."""
        ...

    @property
    def version(self) -> int:
        """Version of the weights that the next token will be sampled with."""
        ...

    def generate(self, request: EngineRequest) -> AbstractAsyncContextManager[AsyncIterator[Chunk]]:
        """Open a generation: ``async with engine.generate(request) as chunks: async for chunk in chunks: ...``.

        The stream ends after the chunk that carries ``finish``. Leaving the block early, or being cancelled in it,
        aborts the generation in the engine before the next token. Raises ``ContextLengthExceeded`` for a prompt that
        leaves no room for one token, ``InvalidRequest`` for ids outside the vocabulary, ``EngineError`` if the engine
        failed.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End a generation with ``FinishReason.ABORT``; what was sampled is delivered. Unknown ids are ignored."""
        ...

    async def pause(self, mode: PauseMode = PauseMode.KEEP) -> None:
        """Return when no token will be sampled until ``resume``."""
        ...

    async def resume(self) -> None:
        """Go on sampling."""
        ...

    async def load(self, snapshot: Snapshot) -> None:
        """Change the weights between two tokens. Running generations go on and stamp the new version from there.

        Keys and values of the old weights are not reused. Raises ``ModelError`` if the snapshot does not fit, and keeps
        the old weights then.
        """
        ...

    def statistics(self) -> EngineStatistics:
        """Counters, at once."""
        ...
