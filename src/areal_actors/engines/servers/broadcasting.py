"""Send weights from the weight store to servers: each server and the store meet in a process group of their own.

Two requests run concurrently: HTTP tells the server what it receives, and a message tells the store what to send. If
one of them fails, the other is ended, because it would wait in vain. The group is then closed, and the next publication
opens another one. A server that has received part of a version must load a version from disk before it may sample.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import anyio
import httpx
from attrs import define, field

from areal_actors.core import Message, Ref
from areal_actors.core.remote.addresses import is_loopback
from areal_actors.engines.servers.config import ServerConfig
from areal_actors.engines.servers.dialect import BroadcastDialect, ServerDialect, ServerFacts
from areal_actors.errors import ActorError, CheckpointError, ConfigError, EngineError
from areal_actors.messages import (
    CloseGroup,
    DescribeWeights,
    OpenGroup,
    SendBucket,
    TensorBucket,
    Weights,
    WriteWeights,
)

__all__ = ["Broadcasts", "FindWeights", "open_broadcasts"]

FindWeights = Callable[[], Awaitable[Ref[Weights]]]
"""Finds the weight store; called when there is something to send for the first time."""

R = TypeVar("R")

_LAST_WORDS_SECONDS = 5.0
"""How long a server may take to report an error after the store has failed to send."""
_PARTING_SECONDS = 5.0


@define(eq=False)
class Broadcasts:
    """The process groups of one engine's servers, by URL. No operation waits longer than ``timeout_seconds``."""

    dialect: BroadcastDialect
    find: FindWeights
    timeout_seconds: float
    _groups: dict[str, str] = field(factory=dict)

    async def describe(self, version: int) -> tuple[TensorBucket, ...]:
        """Return the buckets of a version. Raises ``EngineError`` if the store no longer has it, or does not answer."""
        return await self._ask(DescribeWeights(version=version))

    async def write(self, version: int) -> Path:
        """Write a version to disk and return its directory, which servers see under the same path.

        Raises ``EngineError`` if the store cannot write it, or does not answer.
        """
        return await self._ask(WriteWeights(version=version))

    async def send(
        self, url: str, client: httpx.AsyncClient, facts: ServerFacts, *, version: int, buckets: Sequence[TensorBucket]
    ) -> None:
        """Send a version to a paused server.

        Raises ``EngineError`` if the server did not receive all of it. It is then in no group, and its weights are
        undefined.
        """
        group = self._groups.pop(url, None) or await self._form(url, client, facts)
        try:
            await self.dialect.begin_update(client)
            try:
                for number, bucket in enumerate(buckets):
                    wanted = SendBucket(group=group, version=version, number=number)
                    # Only the last bucket carries the label: after a partial update, the server still reports the old
                    # one.
                    label = str(version) if number == len(buckets) - 1 else None
                    await self._pass_on(client, bucket, wanted, label)
            finally:
                with anyio.CancelScope(shield=True):
                    # A server rejects the next update while this one is open.
                    await self.dialect.end_update(client)
        except BaseException:
            await self._part(client, group)
            raise
        self._groups[url] = group

    async def part(self, url: str, client: httpx.AsyncClient) -> None:
        """Let a server leave its group, if it is in one, as if it had been restarted."""
        group = self._groups.pop(url, None)
        if group is not None:
            await self._part(client, group)

    async def _form(self, url: str, client: httpx.AsyncClient, facts: ServerFacts) -> str:
        wanted = OpenGroup(
            server=f"{url} of {socket.gethostname()}",
            machine=_machine_of(url),
            device=facts.device,
            num_ranks=facts.num_ranks,
            timeout_seconds=self.timeout_seconds,
        )
        place = await self._ask(wanted)
        try:
            await self.dialect.join_group(client, place, num_ranks=facts.num_ranks)
        except BaseException:
            await self._part(client, place.name)
            raise
        return place.name

    async def _pass_on(
        self, client: httpx.AsyncClient, bucket: TensorBucket, wanted: SendBucket, label: str | None
    ) -> None:
        """Send and receive one bucket concurrently."""
        failures: list[EngineError] = []

        async def attempt(action: Awaitable[None], patience: float) -> None:
            try:
                await action
            except EngineError as error:
                failures.append(error)
                deadline = anyio.current_time() + patience
                tasks.cancel_scope.deadline = min(tasks.cancel_scope.deadline, deadline)

        async with anyio.create_task_group() as tasks:
            receiving = self.dialect.receive(client, wanted.group, bucket, version=label)
            # If receiving fails, sending ends at once. If sending fails, the server has a moment to report its own
            # error.
            tasks.start_soon(attempt, receiving, 0.0)
            tasks.start_soon(attempt, self._ask(wanted), _LAST_WORDS_SECONDS)
        if failures:
            raise EngineError("; ".join(str(failure) for failure in failures))

    async def _part(self, client: httpx.AsyncClient, group: str) -> None:
        """Close a group on both sides. A server that waits in it is told that nothing will arrive."""

        async def attempt(action: Awaitable[None]) -> None:
            with suppress(EngineError):
                await action

        with anyio.move_on_after(_PARTING_SECONDS, shield=True):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(attempt, self._ask(CloseGroup(group=group)))
                tasks.start_soon(attempt, self.dialect.leave_group(client, group))

    async def _ask(self, message: Message[Weights, R]) -> R:
        try:
            with anyio.fail_after(self.timeout_seconds):
                keeper = await self.find()
                return await keeper.ask(message)
        except (ActorError, CheckpointError, TimeoutError) as error:
            reason = str(error) or f"no answer within {self.timeout_seconds:g} s"
            raise EngineError(f"The weight store did not provide the weights: {reason}") from error


def open_broadcasts(dialect: ServerDialect, find: FindWeights, config: ServerConfig) -> Broadcasts:
    """Create the broadcasts to servers of this kind. Raises ``ConfigError`` if they cannot receive weights."""
    if not isinstance(dialect, BroadcastDialect):
        raise ConfigError(f"trainer.publish: servers of the kind {dialect.name} cannot be sent weights; use disk")
    return Broadcasts(dialect, find, config.update_timeout_seconds)


def _machine_of(url: str) -> str:
    """Return the host name of a server as other machines know it. A loopback address is on this machine."""
    host = urlsplit(url).hostname or ""
    return socket.gethostname() if is_loopback(host) else host
