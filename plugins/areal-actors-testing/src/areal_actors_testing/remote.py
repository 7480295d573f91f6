"""Remote actors without a network: a pair of streams in memory, with optional faults, and a simulated node.

``pretend_remote`` puts a connection in memory between a test and an actor, so that every message is encoded, framed,
decoded and fenced as between two machines, while time stays virtual.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
from anyio.abc import ByteStream
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from areal_actors.kernel import Ref
from areal_actors.kernel.remote import Limits, Listener, Peer, connect_stream, listen
from areal_actors.lib.task_groups import open_tasks

_SECRET = b"a secret between two tests"

OnSend = Callable[[bytes], bytes | Awaitable[bytes]]
"""Transforms one write."""


class MemoryStream(ByteStream):
    """One end of a pair of byte streams.

    ``on_send`` gets each write and returns the bytes to send instead, immediately or as a coroutine; raising
    ``BrokenResourceError`` cuts the pair.
    """

    def __init__(
        self,
        send: MemoryObjectSendStream[bytes],
        receive: MemoryObjectReceiveStream[bytes],
        on_send: OnSend | None = None,
    ) -> None:
        self._send, self._receive, self._on_send = send, receive, on_send
        self._left = b""

    async def send(self, item: bytes) -> None:
        """Send ``item``, at most a few writes ahead of the other end."""
        data = bytes(item)
        if self._on_send is not None:
            try:
                result = self._on_send(data)
                data = result if isinstance(result, bytes) else await result
            except anyio.BrokenResourceError:
                self.cut()
                raise
        if data:
            await self._send.send(data)

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """Return received bytes, at most ``max_bytes``."""
        if not self._left:
            self._left = await self._receive.receive()
        data, self._left = self._left[:max_bytes], self._left[max_bytes:]
        return data

    async def send_eof(self) -> None:
        """Close the sending direction."""
        self._send.close()

    async def aclose(self) -> None:
        """Close both directions."""
        self.cut()

    def cut(self) -> None:
        """Close both directions at once."""
        self._send.close()
        self._receive.close()


def memory_pair(*, on_send: tuple[OnSend | None, OnSend | None] = (None, None)) -> tuple[MemoryStream, MemoryStream]:
    """Return the two ends of a connection in memory."""
    there_send, there_receive = anyio.create_memory_object_stream[bytes](4)
    back_send, back_receive = anyio.create_memory_object_stream[bytes](4)
    return (
        MemoryStream(there_send, back_receive, on_send[0]),
        MemoryStream(back_send, there_receive, on_send[1]),
    )


@asynccontextmanager
async def pretend_remote(
    expose: Mapping[str, Ref[Any]] | None = None, *, limits: Limits | None = None
) -> AsyncIterator[tuple[Peer, Listener]]:
    """Yield a peer that is connected, through memory, to actors of this process, and its listener, to expose more."""
    near, far = memory_pair()
    listening = listen(None, secret=_SECRET, expose=expose, node="far", limits=limits)
    async with listening as listener, open_tasks() as tasks:
        tasks.start_soon(listener.serve, far)
        async with connect_stream(near, secret=_SECRET, node="near", limits=limits) as peer:
            yield peer, listener
