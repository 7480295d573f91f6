"""Let servers receive weights from the weight store, in one broadcast that they share with those of other engines.

HTTP tells the servers what they receive, while a stream from the store tells where they join and whether sending
succeeded. A broadcast fails for all of its servers if one of them is lost. It is then repeated without the lost one,
which has to load the version from disk before it may sample. A server that reports an error gets a second chance.
"""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit
from uuid import uuid4

import anyio
import httpx
from attrs import define, field

from areal_actors.errors import ActorError, CheckpointError, ConfigError, EngineError
from areal_actors.generation.servers.config import ServerConfig
from areal_actors.generation.servers.dialect import BroadcastDialect, ServerDialect, ServerFacts
from areal_actors.kernel import Message, Ref
from areal_actors.kernel.remote.sockets import is_loopback
from areal_actors.messages import (
    DescribeWeights,
    GroupPlace,
    Receiver,
    SendWeights,
    TensorBucket,
    Weights,
    WriteWeights,
)

__all__ = ["Broadcasts", "FindWeights", "Target", "open_broadcasts"]

FindWeights = Callable[[], Awaitable[Ref[Weights]]]
"""Finds the weight store; called when there is something to send for the first time."""

R = TypeVar("R")

_REPORT_SECONDS = 5.0
"""How long servers may take to report an error after the store has failed to send."""
_COLLECT_SECONDS = 0.2
"""How long the errors of other servers are collected after the first one."""
_LEAVE_SECONDS = 5.0
_PROBE_SECONDS = 2.0
_MAX_UNEXPLAINED = 3
"""After so many broadcasts that failed for a reason that no server is to blame for, all servers load from disk.

A server of another engine that reports errors is left out of the third one."""


@define(eq=False)
class Target:
    """A server as a receiver of broadcasts. ``group`` is the one that its processes have joined."""

    url: str
    client: httpx.AsyncClient
    num_incarnations: int = 0
    group: str | None = None

    def describe(self, facts: ServerFacts) -> Receiver:
        """Return the server as the store knows it."""
        host = urlsplit(self.url).hostname or ""
        # Other machines know a server at a loopback address by the name of this one.
        machine = socket.gethostname() if is_loopback(host) else host
        return Receiver(
            name=f"{self.url} of {socket.gethostname()}, {self.num_incarnations}",
            machine=machine,
            device=facts.device,
            num_ranks=facts.num_ranks,
        )


@define(eq=False)
class _Attempt:
    """One broadcast of ``version`` to ``targets``, and its course, by URL."""

    version: int
    buckets: Sequence[TensorBucket]
    targets: Sequence[tuple[Target, ServerFacts]]
    num_received: dict[str, int] = field(factory=dict)
    """Buckets that each server has loaded."""
    failures: dict[str, EngineError] = field(factory=dict)
    """Errors of servers, in their order, up to the failure of the store."""
    consequences: dict[str, EngineError] = field(factory=dict)
    """Errors of servers after the store has failed, which may be caused by another server."""
    unended: dict[str, EngineError] = field(factory=dict)
    """Errors of servers at the end of the update."""
    reason: str | None = None
    """Why the store failed to send."""

    def __attrs_post_init__(self) -> None:
        self.num_received = {target.url: 0 for target, _ in self.targets}

    @property
    def has_failed(self) -> bool:
        """Whether not everything was received."""
        return self.reason is not None or bool(self.failures)

    def note(self, url: str, error: EngineError) -> None:
        """Store the error of a server."""
        (self.failures if self.reason is None else self.consequences).setdefault(url, error)

    def find_lost(self, dead: Collection[str], suspected: Collection[str]) -> dict[str, EngineError]:
        """Return the servers to be left out from now on, with reasons; none if no server is surely to blame.

        ``dead`` are those that do not answer any more. A server that reported an error may have lost its connection to
        one that died in another engine, so it is left out only if it was ``suspected`` before.
        """
        said = self.failures | self.consequences
        because = EngineError(self.reason or "it does not answer")
        silent = [url for url, error in self.failures.items() if isinstance(error.__cause__, httpx.TimeoutException)]
        if lost := dead or silent[:1]:
            return {url: said.get(url, because) for url in lost}
        if self.failures:
            return {url: error for url, error in self.failures.items() if url in suspected}
        least = min(self.num_received.values(), default=0)
        if least == max(self.num_received.values(), default=0):
            return {}
        return {url: said.get(url, because) for url, number in self.num_received.items() if number == least}


@define(eq=False)
class Broadcasts:
    """Broadcasts to the servers of one engine. No operation waits longer than ``timeout_seconds`` without progress."""

    dialect: BroadcastDialect
    find: FindWeights
    timeout_seconds: float
    name: str = field(factory=lambda: f"{socket.gethostname()}-{os.getpid()}-{uuid4().hex[:8]}", init=False)
    """The name of the engine in the weight store."""
    _targets: dict[str, Target] = field(factory=dict, init=False)

    async def describe(self, version: int, *, is_receiving: bool) -> tuple[TensorBucket, ...]:
        """Return the buckets of a version. Raises ``EngineError`` if the store no longer has it, or does not answer.

        ``is_receiving`` announces a broadcast, for which those of other engines wait.
        """
        return await self._ask(DescribeWeights(version=version, engine=self.name if is_receiving else ""))

    async def write(self, version: int) -> Path:
        """Write a version to disk and return its directory, which servers see under the same path.

        No broadcast of it waits for this engine any more.

        Raises ``EngineError`` if the store cannot write it, or does not answer.
        """
        return await self._ask(WriteWeights(version=version, engine=self.name))

    async def send(
        self,
        servers: Sequence[tuple[str, httpx.AsyncClient, ServerFacts]],
        *,
        version: int,
        buckets: Sequence[TensorBucket],
    ) -> dict[str, EngineError]:
        """Send a version to paused servers, given by URL, client and facts.

        Returns the servers that did not receive all of it, with reasons, by URL. They are in no group then, and their
        weights are undefined.
        """
        left = {url: (self._targets.setdefault(url, Target(url, client)), facts) for url, client, facts in servers}
        lost: dict[str, EngineError] = {}
        suspected: set[str] = set()
        num_unexplained = 0
        while left:
            attempt = _Attempt(version, buckets, tuple(left.values()))
            await self._try(attempt)
            if not attempt.has_failed:
                return lost | attempt.unended
            found = attempt.find_lost(await self._find_dead([target for target, _ in left.values()]), suspected)
            num_unexplained += not (found or attempt.failures)
            suspected |= attempt.failures.keys()
            if num_unexplained == _MAX_UNEXPLAINED:
                found = {url: EngineError(attempt.reason or "the broadcast failed") for url in left}
            lost |= found
            left = {url: entry for url, entry in left.items() if url not in lost}
        return lost

    async def forget(self, url: str, client: httpx.AsyncClient) -> None:
        """Let a server leave its group, if it is in one, because it was or may have been restarted."""
        target = self._targets.setdefault(url, Target(url, client))
        target.num_incarnations += 1
        await self._leave(target)

    # ---------------------------------------------------------------------------------------------- one attempt

    async def _try(self, attempt: _Attempt) -> None:
        async def begin(target: Target) -> None:
            try:
                await self.dialect.begin_update(target.client)
            except EngineError as error:
                attempt.note(target.url, error)

        try:
            # Before others depend on it: this shows which servers answer.
            async with anyio.create_task_group() as tasks:
                for target, _ in attempt.targets:
                    tasks.start_soon(begin, target)
            if not attempt.has_failed:
                await self._receive(attempt)
        finally:
            with anyio.CancelScope(shield=True):
                async with anyio.create_task_group() as tasks:
                    for target, _ in attempt.targets:
                        tasks.start_soon(self._end, target, attempt)

    async def _receive(self, attempt: _Attempt) -> None:
        """Ask the store to send, and let the servers receive."""
        wanted = SendWeights(
            engine=self.name,
            version=attempt.version,
            receivers=tuple(target.describe(facts) for target, facts in attempt.targets),
            timeout_seconds=self.timeout_seconds,
        )
        try:
            with anyio.fail_after(self.timeout_seconds) as waiting:
                store = await self.find()
                async with store.stream(wanted) as places:
                    place = await anext(aiter(places))
                    waiting.deadline = float("inf")
                    await self._receive_at(place, places, attempt)
        except (ActorError, EngineError, StopAsyncIteration, TimeoutError) as error:
            attempt.reason = attempt.reason or str(error) or f"no answer within {self.timeout_seconds:g} s"

    async def _receive_at(self, place: GroupPlace, places: AsyncIterator[GroupPlace], attempt: _Attempt) -> None:
        """Let servers join the group at ``place`` and receive all buckets, while the store sends them."""

        def end_after(seconds: float) -> None:
            scope = tasks.cancel_scope
            scope.deadline = min(scope.deadline, anyio.current_time() + seconds)

        async def receive(target: Target, offset: int) -> None:
            try:
                if target.group != place.name:
                    await self._leave(target)
                    target.group = place.name
                    await self.dialect.join_group(target.client, place, offset=offset)
                for number, bucket in enumerate(attempt.buckets):
                    # Only the last bucket carries the label: after a partial update, the server still reports the old
                    # one.
                    label = str(attempt.version) if number == len(attempt.buckets) - 1 else None
                    await self.dialect.receive(target.client, place.name, bucket, version=label)
                    attempt.num_received[target.url] += 1
            except EngineError as error:
                attempt.note(target.url, error)
                end_after(_COLLECT_SECONDS)

        async def follow() -> None:
            try:
                async for _ in places:
                    pass
            except (ActorError, EngineError) as error:
                attempt.reason = str(error)
                end_after(_REPORT_SECONDS)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(follow)
            for (target, _), offset in zip(attempt.targets, place.offsets, strict=True):
                tasks.start_soon(receive, target, offset)

    async def _end(self, target: Target, attempt: _Attempt) -> None:
        """End an update. After a failure the group is of no use any more."""
        if attempt.has_failed:
            target.num_incarnations += 1  # the store may believe that the group is whole
            await self._leave(target)
        with anyio.move_on_after(_LEAVE_SECONDS):
            try:
                # A server rejects the next update, or samples nothing, while this one is open.
                await self.dialect.end_update(target.client)
            except EngineError as error:
                attempt.unended[target.url] = error

    async def _leave(self, target: Target) -> None:
        """Let a server leave its group; if it waits in it, it is told that nothing will arrive."""
        group, target.group = target.group, None
        if group is None:
            return
        with anyio.move_on_after(_LEAVE_SECONDS, shield=True), suppress(EngineError):
            await self.dialect.leave_group(target.client, group)

    async def _find_dead(self, targets: Sequence[Target]) -> list[str]:
        dead = []

        async def probe(target: Target) -> None:
            is_ready = False
            with anyio.move_on_after(_PROBE_SECONDS):
                is_ready = await self.dialect.is_ready(target.client)
            if not is_ready:
                dead.append(target.url)

        async with anyio.create_task_group() as tasks:
            for target in targets:
                tasks.start_soon(probe, target)
        return dead

    async def _ask(self, message: Message[Weights, R]) -> R:
        try:
            with anyio.fail_after(self.timeout_seconds):
                store = await self.find()
                return await store.ask(message)
        except (ActorError, CheckpointError, TimeoutError) as error:
            reason = str(error) or f"no answer within {self.timeout_seconds:g} s"
            raise EngineError(f"The weight store did not provide the weights: {reason}") from error


def open_broadcasts(dialect: ServerDialect, find: FindWeights, config: ServerConfig) -> Broadcasts:
    """Create the broadcasts to servers of this kind. Raises ``ConfigError`` if they cannot receive weights."""
    if not isinstance(dialect, BroadcastDialect):
        raise ConfigError(f"trainer.publish: servers of the kind {dialect.name} cannot be sent weights; use disk")
    return Broadcasts(dialect, find, config.update_timeout_seconds)
