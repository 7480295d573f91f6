"""Requests in flight: counted, and cancelled when the proxy stops."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import anyio

from areal_actors.errors import Unavailable
from areal_actors.proxy.exchange import Exchange

__all__ = ["Traffic"]

_CUT_SECONDS = 1.0
"""How long a cancelled request may take to send its client an error."""
_STOPPING = "The proxy is stopping; ask again when it is back."


class Traffic:
    """The requests that are being answered."""

    def __init__(self) -> None:
        self.is_draining = False
        self._exchanges: set[Exchange] = set()
        self._emptied: anyio.Event | None = None

    def __len__(self) -> int:
        """Return the number of requests in flight."""
        return len(self._exchanges)

    @contextmanager
    def admitted(self, exchange: Exchange) -> Iterator[None]:
        """Count a request for the duration of the block, which runs in the request's ``lifetime`` scope.

        Raises:
            Unavailable: the proxy is stopping, or it stopped while the block ran, which cancelled the request.
            Exception: any other reason for which the request was cut.
        """
        if self.is_draining:
            raise Unavailable(_STOPPING)
        with exchange.lifetime:
            self._exchanges.add(exchange)
            try:
                yield
            finally:
                self._exchanges.discard(exchange)
                if self._emptied is not None and not self._exchanges:
                    self._emptied.set()
        # Only the body timeout and ``cut`` cancel this scope, and both set a reason.
        if exchange.lifetime.cancelled_caught and exchange.reason is not None:
            raise exchange.reason

    async def drain(self, *, seconds: float) -> None:
        """Refuse new requests, wait up to ``seconds`` for those in flight, and cancel the rest."""
        self.is_draining = True
        with anyio.move_on_after(seconds):
            await self._wait_empty()
        for exchange in self._exchanges:
            exchange.cut(Unavailable(_STOPPING))
        with anyio.move_on_after(_CUT_SECONDS):
            await self._wait_empty()

    async def _wait_empty(self) -> None:
        if self._exchanges:
            self._emptied = anyio.Event()
            await self._emptied.wait()
