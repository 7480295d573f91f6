"""The directory of a run whose parts live in several processes: who is expected, who serves, who has been heard of.

Workers come and go; each start of a worker is another life, and only the latest is believed. A worker gives signs of
life. One that has not been heard of for longer than its lease has ended itself; ``run.upkeep`` makes sure of that
before it starts another one. That it was heard of says nothing of its work: whose actors do not answer is known by
those who ask them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import anyio
from attrs import define

from areal_actors.core import Actor
from areal_actors.errors import Conflict, NotFound
from areal_actors.messages import (
    AwaitEndpoint,
    AwaitGang,
    AwaitLapse,
    AwaitReady,
    AwaitWeights,
    Directory,
    DismissWorker,
    Endpoint,
    EndpointChanged,
    ExpectWorker,
    FetchOrder,
    KeepLease,
    Order,
    Report,
    ReportFailure,
    ReportGang,
    ReportReady,
    TakeFailure,
    WeightsPublished,
)

__all__ = ["DirectoryActor"]

_MANY = 4096
_PATIENCE = 1.25
"""Home waits for so many leases before it gives a worker up, which has ended itself by then."""


@define(kw_only=True)
class _Entry:
    """What is known of a worker's present life."""

    life: int
    order: Order
    heard_at: float | None = None
    report: Report | None = None
    failure: Mapping[str, Any] | None = None
    gang: str | None = None
    """Where the other processes of its gang join it."""
    is_replaced: bool = False


class DirectoryActor(Actor[Directory]):
    """Knows the workers of one run."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._own_endpoint: Endpoint | None = None
        self._published_attempt = 0
        self._changed = anyio.Event()

    @ExpectWorker.handler
    async def expect(self, message: ExpectWorker) -> None:
        """Take the place of earlier lives."""
        known = self._entries.get(message.worker)
        if known is not None and message.life <= known.life:
            raise Conflict(f"{message.worker} lives its life {known.life} already; give the next one a higher number.")
        self._entries[message.worker] = _Entry(life=message.life, order=message.order)
        self._announce()

    @FetchOrder.handler
    async def fetch(self, message: FetchOrder) -> Order:
        """Say what to be."""
        find = self._find if message.rank else self._hear
        return find(message.worker, message.life).order

    @ReportReady.handler
    async def note_ready(self, message: ReportReady) -> None:
        """It can be found from now on."""
        entry = self._hear(message.worker, message.life)
        entry.report = message.report
        self._announce()

    @ReportGang.handler
    async def note_gang(self, message: ReportGang) -> None:
        """Tell those who wait to join."""
        self._hear(message.worker, message.life).gang = message.address
        self._announce()

    @AwaitGang.handler(concurrency=_MANY)
    async def await_gang(self, message: AwaitGang) -> str:
        """Wait until its first process has opened."""
        while (address := self._find(message.worker, message.life).gang) is None:
            await self._changed.wait()
        return address

    @ReportFailure.handler
    async def note_failure(self, message: ReportFailure) -> None:
        """Keep its last words for whoever sees it end; of several processes, the others may suffer from the first."""
        entry = self._hear(message.worker, message.life)
        entry.failure = entry.failure or message.error

    @KeepLease.handler
    async def keep_lease(self, message: KeepLease) -> None:
        """It lives."""
        self._hear(message.worker, message.life)

    @AwaitReady.handler(concurrency=_MANY)
    async def await_ready(self, message: AwaitReady) -> Report:
        """Wait for its report."""
        while True:
            entry = self._entries.get(message.worker)
            if entry is not None and entry.life >= message.life and entry.report is not None:
                return entry.report
            await self._changed.wait()

    @AwaitLapse.handler(concurrency=_MANY)
    async def await_lapse(self, message: AwaitLapse) -> str:
        """Wait until its lease is long over; before its first sign of life, it has none."""
        while True:
            entry = self._entries.get(message.worker)
            is_known = entry is not None and (entry.heard_at is not None or entry.is_replaced)
            if entry is None or not is_known:
                await self._changed.wait()
                continue
            if entry.is_replaced:
                return "The cluster has started it again by itself, and it knows nothing of what it did."
            lease = entry.order.lease_seconds
            left = (entry.heard_at or 0.0) + _PATIENCE * lease - anyio.current_time()
            if left <= 0:
                return f"It has not been heard of for longer than its lease of {lease:g} s."
            await anyio.sleep(left)

    @TakeFailure.handler
    async def take_failure(self, message: TakeFailure) -> Mapping[str, Any] | None:
        """Its last words."""
        entry = self._entries.get(message.worker)
        return entry.failure if entry is not None and entry.life >= message.life else None

    @DismissWorker.handler
    async def dismiss(self, message: DismissWorker) -> None:
        """Whoever looks for it waits for the next life."""
        entry = self._entries.get(message.worker)
        if entry is not None and entry.life <= message.life:
            entry.report = None

    @AwaitEndpoint.handler(concurrency=_MANY)
    async def await_endpoint(self, message: AwaitEndpoint) -> Endpoint:  # noqa: ARG002 - the message says it all
        """Wait for a proxy that serves at present; an earlier life of it listened somewhere else."""
        while (endpoint := self._find_endpoint()) is None:
            await self._changed.wait()
        return endpoint

    def _find_endpoint(self) -> Endpoint | None:
        reports = [entry.report for entry in self._entries.values() if not entry.is_replaced]
        endpoints = [report.endpoint for report in reports if report is not None and report.endpoint is not None]
        return endpoints[0] if endpoints else self._own_endpoint

    @EndpointChanged.handler
    async def note_endpoint(self, message: EndpointChanged) -> None:
        """Of a proxy at home."""
        self._own_endpoint = message.endpoint
        self._announce()

    @WeightsPublished.handler
    async def note_published(self, message: WeightsPublished) -> None:
        """The engines have the weights of this attempt."""
        self._published_attempt = max(self._published_attempt, message.attempt)
        self._announce()

    @AwaitWeights.handler(concurrency=_MANY)
    async def await_weights(self, message: AwaitWeights) -> None:
        """Wait for them."""
        while self._published_attempt < message.attempt:
            await self._changed.wait()

    def _hear(self, worker: str, life: int) -> _Entry:
        """What is known of whoever speaks, which is a sign of life. Raises as ``_find``."""
        entry = self._find(worker, life)
        is_first = entry.heard_at is None
        entry.heard_at = anyio.current_time()
        if is_first:
            self._announce()
        return entry

    def _find(self, worker: str, life: int) -> _Entry:
        """What is known of a life.

        One that nobody here has begun was begun by the cluster itself. It takes over the order, if the worker is one
        that is replaced alone.

        Raises:
            Conflict: a later life has begun, or others depend on what an earlier one knew.
            NotFound: nobody expects such a worker.
        """
        entry = self._entries.get(worker)
        if entry is None:
            raise NotFound(f"Nobody here expects a worker {worker}; it belongs to another run, or to none any more.")
        if life < entry.life:
            raise Conflict(f"Life {life} of {worker} is over; its life {entry.life} has begun.")
        if life > entry.life and not entry.order.is_replaced_alone:
            entry.is_replaced = True
            self._announce()
            raise Conflict(f"{worker} cannot be replaced alone: the run begins anew from its latest checkpoint.")
        if life > entry.life:
            entry = self._entries[worker] = _Entry(life=life, order=entry.order)
        return entry

    def _announce(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
