"""What differs between kinds of inference servers: the words of their HTTP interfaces.

A dialect holds no state and decides nothing: which server a request goes to, what happens when one dies, which version
is served and who may pause is decided in ``engine``, for all kinds alike.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol, runtime_checkable

import httpx
from attrs import field, frozen

from areal_actors.domain import EngineRequest, FinishReason, Floats, Ints, PauseMode, TopLogprob, as_floats, as_ints
from areal_actors.messages import GroupPlace, TensorBucket

__all__ = ["BroadcastDialect", "Delta", "ServerDialect", "ServerFacts", "VersionSpan"]


@frozen(kw_only=True)
class ServerFacts:
    """What a server says of itself. ``weight_version`` is the label of its weights, as it was given to it.

    ``vocab_size`` is 0 where it does not tell. With ``has_grammars``, it takes every ``Grammar``;
    ``logprobs_follow_truncation`` is as in ``EngineInfo``. Its tensors are on ``device``, and ``num_ranks`` processes
    receive weights together; 0 where they cannot.
    """

    software: str
    """Name and version, such as ``sglang 0.5.23``."""
    model: str
    weight_version: str
    vocab_size: int
    context_length: int
    dtype: str
    max_concurrent: int
    has_grammars: bool = False
    logprobs_follow_truncation: bool = False
    device: str = "cpu"
    num_ranks: int = 0


@frozen(kw_only=True)
class VersionSpan:
    """Sampled tokens [start, end) of a request were sampled under the weights labelled ``version``."""

    version: str
    start: int
    end: int


@frozen(kw_only=True)
class Delta:
    """What a server sampled since its last word on a request.

    ``logprobs`` are of the distribution that was sampled from, as far as the server tells; ``raw_logprobs`` are those
    at temperature 1 without truncation, NaN where the server does not tell. A server that names versions at the end
    alone gives ``spans``, of the whole request, with ``finish``.

    ``server_version`` is the label of the server's weights while it said this, where it tells: not certainly that of
    the tokens, but one that was never published gives away a server that was started again.
    """

    token_ids: Ints = field(converter=as_ints, eq=False)
    logprobs: Floats = field(converter=as_floats, eq=False)
    raw_logprobs: Floats = field(converter=as_floats, eq=False)
    top_logprobs: tuple[tuple[TopLogprob, ...], ...] = ()
    finish: FinishReason | None = None
    spans: tuple[VersionSpan, ...] = ()
    num_cached_tokens: int = 0
    server_version: str | None = None


class ServerDialect(Protocol):
    """How a kind of server is spoken to. ``client`` has the server's base URL, its key and its timeouts.

    Every method raises ``EngineError`` for a server that cannot be reached or answers nonsense, with its URL and what
    it said, and ``InvalidRequest`` or ``UnsupportedParameter`` for a request that it refuses.
    """

    @property
    def name(self) -> str:
        """``sglang`` or ``vllm``."""
        ...

    async def describe(self, client: httpx.AsyncClient) -> ServerFacts:
        """Ask who it is. Raises ``EngineError`` naming the oldest version that will do, for one older than that."""
        ...

    async def is_ready(self, client: httpx.AsyncClient) -> bool:
        """Whether it lives and answers, also while it is paused; at once, and never an error."""
        ...

    def check(self, request: EngineRequest) -> None:
        """Raise ``UnsupportedParameter`` for what the server would ignore or do otherwise."""
        ...

    def generate(
        self, client: httpx.AsyncClient, request: EngineRequest, *, routing_key: str
    ) -> AbstractAsyncContextManager[AsyncIterator[Delta]]:
        """Open a generation; the last delta has ``finish``. Leaving the block hangs up.

        ``routing_key`` is equal for the requests of a session, for a gateway that keeps them at one server.
        """
        ...

    async def abort(self, client: httpx.AsyncClient, request_id: str) -> None:
        """End a generation with ``FinishReason.ABORT``; unknown ids are ignored."""
        ...

    async def pause(self, client: httpx.AsyncClient, mode: PauseMode) -> None:
        """Return when nothing is sampled until ``resume``; new requests wait."""
        ...

    async def resume(self, client: httpx.AsyncClient) -> None:
        """Go on sampling."""
        ...

    async def update_from_disk(self, client: httpx.AsyncClient, path: Path, *, version: str) -> None:
        """Load the safetensors of a directory that the server can read, and label the weights ``version``.

        The server is paused. Keys and values of the old weights are dropped. Raises ``ModelError`` if the server
        refuses the weights; it has its old ones then.
        """
        ...


@runtime_checkable
class BroadcastDialect(ServerDialect, Protocol):
    """A kind of server whose processes can join a group, and receive weights in it. The server is paused meanwhile.

    Every method raises ``EngineError`` for a server that refuses, and says why.
    """

    async def join_group(self, client: httpx.AsyncClient, place: GroupPlace, *, num_ranks: int) -> None:
        """Have its ``num_ranks`` processes meet the first rank of a group; returns when they have."""
        ...

    async def leave_group(self, client: httpx.AsyncClient, name: str) -> None:
        """Have them leave it, and fail whatever they receive there."""
        ...

    async def begin_update(self, client: httpx.AsyncClient) -> None:
        """Be ready to receive. One that was begun and not ended, by whomever, is ended first."""
        ...

    async def receive(
        self, client: httpx.AsyncClient, group: str, bucket: TensorBucket, *, version: str | None
    ) -> None:
        """Receive and load a bucket; returns when that is done. With the last one comes the label of all weights.

        Keys and values of the old weights are dropped with it. After an error, some of the weights are new.
        """
        ...

    async def end_update(self, client: httpx.AsyncClient) -> None:
        """Be ready to sample again, or to load from disk."""
        ...
