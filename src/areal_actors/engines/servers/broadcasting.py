"""Weights that somebody keeps, on their way to servers: each meets whoever keeps them in a group of its own.

Two things happen at the same time: a server is told by HTTP what it receives, and the keeper by a message what to send.
If one of them fails, the other has nobody to wait for, and is ended; then the group is over, and the next publication
opens another one. A server that has got a part of a version has to be given one from disk before it may sample.
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
"""Who keeps the weights; asked when there are some for the first time."""

R = TypeVar("R")

_LAST_WORDS_SECONDS = 5.0
"""How long a server may take to say why, where it was not sent what it waits for."""
_PARTING_SECONDS = 5.0


@define(eq=False)
class Broadcasts:
    """The groups of one engine's servers, by their URLs. No wait is longer than ``timeout_seconds``."""

    dialect: BroadcastDialect
    find: FindWeights
    timeout_seconds: float
    _groups: dict[str, str] = field(factory=dict)

    async def describe(self, version: int) -> tuple[TensorBucket, ...]:
        """What a version consists of. Raises ``EngineError`` if it is kept no longer, or nobody answers."""
        return await self._ask(DescribeWeights(version=version))

    async def write(self, version: int) -> Path:
        """Its directory, which servers see by the same path. Raises ``EngineError`` if it cannot be had."""
        return await self._ask(WriteWeights(version=version))

    async def send(
        self, url: str, client: httpx.AsyncClient, facts: ServerFacts, *, version: int, buckets: Sequence[TensorBucket]
    ) -> None:
        """Have a server, which is paused, receive a version.

        Raises ``EngineError`` if it has not got all of it; it is in no group then, and may have any weights.
        """
        group = self._groups.pop(url, None) or await self._form(url, client, facts)
        try:
            await self.dialect.begin_update(client)
            try:
                for number, bucket in enumerate(buckets):
                    wanted = SendBucket(group=group, version=version, number=number)
                    label = str(version) if number == len(buckets) - 1 else None
                    await self._pass_on(client, bucket, wanted, label)
            finally:
                with anyio.CancelScope(shield=True):
                    await self.dialect.end_update(client)
        except BaseException:
            await self._part(client, group)
            raise
        self._groups[url] = group

    async def part(self, url: str, client: httpx.AsyncClient) -> None:
        """Have a server be in no group, as one that was started anew."""
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
        """Send and receive one bucket, at the same time."""
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
            tasks.start_soon(attempt, receiving, 0.0)
            tasks.start_soon(attempt, self._ask(wanted), _LAST_WORDS_SECONDS)
        if failures:
            raise EngineError("; ".join(str(failure) for failure in failures))

    async def _part(self, client: httpx.AsyncClient, group: str) -> None:
        """Both sides forget a group; a server that sits in it learns so that there is nothing to come."""

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
            raise EngineError(f"Whoever keeps the weights did not give them: {reason}") from error


def open_broadcasts(dialect: ServerDialect, find: FindWeights, config: ServerConfig) -> Broadcasts:
    """Broadcasts to servers of this kind. Raises ``ConfigError`` if they cannot be sent weights."""
    if not isinstance(dialect, BroadcastDialect):
        raise ConfigError(f"trainer.publish: servers of the kind {dialect.name} cannot be sent weights; use disk")
    return Broadcasts(dialect, find, config.update_timeout_seconds)


def _machine_of(url: str) -> str:
    """Where a server runs, as other machines know it: one that only this machine reaches is here."""
    host = urlsplit(url).hostname or ""
    return socket.gethostname() if is_loopback(host) else host
