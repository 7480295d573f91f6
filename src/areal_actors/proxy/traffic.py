"""Requests in flight: counted, and cut off when the proxy stops."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import anyio

from areal_actors.errors import Unavailable

__all__ = ["Traffic"]

_CUT_SECONDS = 1.0
"""How long a cancelled request may take to say so to its client."""
_STOPPING = "The proxy is stopping; ask again when it is back."


class Traffic:
    """The requests that are being answered."""

    def __init__(self) -> None:
        self.is_draining = False
        self._scopes: set[anyio.CancelScope] = set()
        self._emptied: anyio.Event | None = None

    def __len__(self) -> int:
        """The number of requests in flight."""
        return len(self._scopes)

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Count a request for the length of the block.

        Raises:
            Unavailable: the proxy is stopping, or stopped while the block ran; it was cancelled then.
        """
        if self.is_draining:
            raise Unavailable(_STOPPING)
        with anyio.CancelScope() as scope:
            self._scopes.add(scope)
            try:
                yield
            finally:
                self._scopes.discard(scope)
                if self._emptied is not None and not self._scopes:
                    self._emptied.set()
        if scope.cancelled_caught:
            raise Unavailable(_STOPPING)

    async def drain(self, *, seconds: float) -> None:
        """Admit nothing more, wait up to ``seconds`` for what is in flight, and cancel the rest."""
        self.is_draining = True
        with anyio.move_on_after(seconds):
            await self._wait_empty()
        for scope in self._scopes:
            scope.cancel()
        with anyio.move_on_after(_CUT_SECONDS):
            await self._wait_empty()

    async def _wait_empty(self) -> None:
        if self._scopes:
            self._emptied = anyio.Event()
            await self._emptied.wait()
