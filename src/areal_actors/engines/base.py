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
        leaves no room for one token, ``InvalidRequest`` for ids outside the vocabulary or a grammar that is none,
        ``UnsupportedParameter`` for one that it cannot hold, ``EngineError`` if the engine failed.
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
