"""Let a server receive weights from the weight store, in one broadcast that it shares with the other servers.

HTTP tells the server what it receives, while a stream from the store tells where it joins and whether sending
succeeded. A broadcast fails for all of its servers if one of them is lost, and is then repeated by those that answer.
A server that reports an error gets a second chance, because its connection may have been lost to one that died; after
that it has to load the version from disk before it may sample.
"""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit
from uuid import uuid4

import anyio
import httpx
from attrs import define, field

from areal_actors.errors import ActorError, CheckpointError, ConfigError, EngineError
from areal_actors.generation.servers.dialect import BroadcastDialect
from areal_actors.generation.servers.server import Server
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

FindWeights = Callable[[], Awaitable[Ref[Weights]]]
"""Finds the weight store; called when there is something to send for the first time."""

R = TypeVar("R")

_REPORT_SECONDS = 5.0
"""How long the server may take to end its request after the store has failed to send."""
_LEAVE_SECONDS = 5.0
_PROBE_SECONDS = 2.0
_MAX_ERRORS = 2
"""After so many broadcasts in which the server reported an error, it loads from disk."""
_MAX_UNEXPLAINED = 3
"""After so many broadcasts that failed although the server reported no error, it loads from disk.

A server of another engine that reports errors is left out of the third one."""


@define(eq=False)
class _Attempt:
    """One broadcast of ``version``, and its course."""

    version: int
    buckets: Sequence[TensorBucket]
    error: EngineError | None = None
    """The first error of the server before the store failed. Later ones may be caused by another server."""
    unended: EngineError | None = None
    """The error of the server at the end of the update."""
    reason: str | None = None
    """Why the store failed to send."""

    @property
    def failure(self) -> EngineError | None:
        """Why not everything was received, if so."""
        return self.error or (None if self.reason is None else EngineError(self.reason))


@define(eq=False)
class WeightReceiver:
    """One server as a receiver of broadcasts.

    No operation waits longer than ``update_timeout_seconds`` of its settings without progress.
    """

    server: Server
    _dialect: BroadcastDialect
    _find: FindWeights
    _name: str = field(factory=lambda: f"{socket.gethostname()}-{os.getpid()}-{uuid4().hex[:8]}", init=False)
    """The name of the server's engine in the weight store."""
    _num_incarnations: int = field(default=0, init=False)
    _group: str | None = field(default=None, init=False)
    """The group that the server's processes have joined."""

    async def describe(self, version: int) -> tuple[TensorBucket, ...]:
        """Return the buckets of a version. Raises ``EngineError`` if the store no longer has it, or does not answer.

        If the server is ready, this announces a broadcast, for which those of other engines wait. One that comes back
        loads from disk: it is in no group, and others must not wait for one to form.
        """
        return await self._ask(DescribeWeights(version=version, engine=self._name if self.server.is_ready else ""))

    async def write(self, version: int) -> Path:
        """Write a version to disk and return its directory, which the server sees under the same path.

        No broadcast of it waits for this server any more.

        Raises ``EngineError`` if the store cannot write it, or does not answer.
        """
        return await self._ask(WriteWeights(version=version, engine=self._name))

    async def receive(self, version: int, buckets: Sequence[TensorBucket]) -> EngineError | None:
        """Have the paused server receive a version; return why it did not receive all of it, or ``None`` if it did.

        After an error, it is in no group, and its weights are undefined.
        """
        num_errors = num_unexplained = 0
        while True:
            attempt = _Attempt(version, buckets)
            await self._try(attempt)
            if attempt.failure is None:
                return attempt.unended
            num_errors += attempt.error is not None
            num_unexplained += attempt.error is None
            is_silent = attempt.error is not None and isinstance(attempt.error.__cause__, httpx.TimeoutException)
            if is_silent or num_errors == _MAX_ERRORS or num_unexplained == _MAX_UNEXPLAINED:
                return attempt.failure
            answers = False
            with anyio.move_on_after(_PROBE_SECONDS):
                answers = await self._dialect.is_ready(self.server.control)
            if not answers:
                return attempt.failure

    async def forget(self) -> None:
        """Let the server leave its group, if it is in one, because it was or may have been restarted."""
        self._num_incarnations += 1
        await self._leave()

    # ---------------------------------------------------------------------------------------------- one attempt

    async def _try(self, attempt: _Attempt) -> None:
        client = self.server.control
        try:
            try:
                # Before others depend on it: this shows whether the server answers.
                await self._dialect.begin_update(client)
            except EngineError as error:
                attempt.error = error
            else:
                await self._follow(attempt)
        finally:
            with anyio.CancelScope(shield=True):
                if attempt.failure is not None:
                    # The group is of no use any more, although the store may believe that it is whole.
                    await self.forget()
                with anyio.move_on_after(_LEAVE_SECONDS):
                    try:
                        # A server rejects the next update, or samples nothing, while this one is open.
                        await self._dialect.end_update(client)
                    except EngineError as error:
                        attempt.unended = error

    async def _follow(self, attempt: _Attempt) -> None:
        """Ask the store to send, and let the server receive."""
        seconds, facts = self.server.config.update_timeout_seconds, self.server.facts
        assert facts is not None
        host = urlsplit(self.server.url).hostname or ""
        wanted = SendWeights(
            engine=self._name,
            version=attempt.version,
            receiver=Receiver(
                name=f"{self.server.url} of {socket.gethostname()}, {self._num_incarnations}",
                # Other machines know a server at a loopback address by the name of this one.
                machine=socket.gethostname() if is_loopback(host) else host,
                device=facts.device,
                num_ranks=facts.num_ranks,
            ),
            timeout_seconds=seconds,
        )
        try:
            with anyio.fail_after(seconds) as waiting:
                store = await self._find()
                async with store.stream(wanted) as places:
                    place = await anext(aiter(places))
                    waiting.deadline = float("inf")
                    await self._receive_at(place, places, attempt)
        except (ActorError, EngineError, StopAsyncIteration, TimeoutError) as error:
            attempt.reason = attempt.reason or str(error) or f"no answer within {seconds:g} s"

    async def _receive_at(self, place: GroupPlace, places: AsyncIterator[GroupPlace], attempt: _Attempt) -> None:
        """Let the server join the group at ``place`` and receive all buckets, while the store sends them."""
        client = self.server.control

        async def receive() -> None:
            try:
                if self._group != place.name:
                    await self._leave()
                    self._group = place.name
                    await self._dialect.join_group(client, place)
                for number, bucket in enumerate(attempt.buckets):
                    # Only the last bucket carries the label: after a partial update, the server still reports the old
                    # one.
                    label = str(attempt.version) if number == len(attempt.buckets) - 1 else None
                    await self._dialect.receive(client, place.name, bucket, version=label)
            except EngineError as error:
                if attempt.reason is None:
                    attempt.error = error
                tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(receive)
            try:
                async for _ in places:
                    pass
            except (ActorError, EngineError) as error:
                attempt.reason = str(error)
                tasks.cancel_scope.deadline = anyio.current_time() + _REPORT_SECONDS

    async def _leave(self) -> None:
        """Let the server leave its group; if it waits in it, it is told that nothing will arrive."""
        group, self._group = self._group, None
        if group is not None:
            with anyio.move_on_after(_LEAVE_SECONDS, shield=True), suppress(EngineError):
                await self._dialect.leave_group(self.server.control, group)

    async def _ask(self, message: Message[Weights, R]) -> R:
        seconds = self.server.config.update_timeout_seconds
        try:
            with anyio.fail_after(seconds):
                store = await self._find()
                return await store.ask(message)
        except (ActorError, CheckpointError, TimeoutError) as error:
            reason = str(error) or f"no answer within {seconds:g} s"
            raise EngineError(f"The weight store did not provide the weights: {reason}") from error


def create_weight_receiver(server: Server, find: FindWeights) -> WeightReceiver:
    """Create the receiver of broadcasts for a server. Raises ``ConfigError`` if servers of its kind cannot be one."""
    dialect = server.dialect
    if not isinstance(dialect, BroadcastDialect):
        raise ConfigError(f"trainer.publish: servers of the kind {dialect.name} cannot be sent weights; use disk")
    return WeightReceiver(server, dialect, find)
