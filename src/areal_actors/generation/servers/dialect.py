"""The interface to one kind of inference server: the operations of its HTTP API, and the versions of its tokens.

A dialect is stateless and makes no decisions. ``engine`` decides for all kinds alike to which server a request goes,
how failures are handled, which version is served and when servers pause.

``Attribution`` turns the deltas of one attempt into chunks with exact versions. Some servers report versions only at
the end of a generation. If weights were loaded in the meantime, it is unknown until then which tokens they sampled.
Tokens are therefore passed on as long as no load has begun since the attempt did, because they can only be of the
version served then. From the first load on, they are held back until the server reports its spans.

A module of this package with the name of a ``Backend`` has a dialect and, as ``KIND``, how such a server is started.
"""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, Self

import httpx
import numpy as np
from attrs import Factory, define, evolve, field, frozen

from areal_actors.domain import (
    Chunk,
    EngineRequest,
    Experts,
    FinishReason,
    Floats,
    Ints,
    PauseMode,
    Sampling,
    TopLogprob,
    as_experts,
    as_floats,
    as_ints,
)
from areal_actors.errors import ConfigError, EngineError
from areal_actors.generation.servers.config import AdapterSlots
from areal_actors.generation.servers.http import Answer, address_of, as_answer, failure_of, open_events


@frozen(kw_only=True)
class ServerFacts:
    """The properties that a server reports about itself.

    ``weight_version`` is the label that its weights were given. ``vocab_size`` is 0 if the server does not report it.
    With ``has_grammars``, the server accepts every ``Grammar``; ``logprobs_follow_truncation`` is as in ``EngineInfo``.
    It loads adapters of a rank up to ``max_adapter_rank``; 0 if it loads none.
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
    max_adapter_rank: int = 0


@frozen(kw_only=True)
class VersionSpan:
    """Sampled tokens [start, end) of a request were sampled under the weights labelled ``version``."""

    version: str
    start: int
    end: int


@frozen(kw_only=True)
class Delta:
    """The tokens that a server sampled since its previous message about a request.

    ``logprobs`` are those of the distribution that was sampled from, as far as the server reports it; ``raw_logprobs``
    are those at temperature 1 without truncation, NaN if the server does not report them. A server that reports
    versions only at the end gives ``spans`` for the whole request together with ``finish``.

    ``server_version`` is the label of the server's weights when it sent this, if it reports one. It need not be the
    version of the tokens, but a label that was never published shows that the server was restarted.
    ``routed_experts`` come with ``finish`` from a server that records them, for all computed tokens (see ``Chunk``).
    """

    token_ids: Ints = field(converter=as_ints, eq=False)
    logprobs: Floats = field(converter=as_floats, eq=False)
    raw_logprobs: Floats = field(converter=as_floats, eq=False)
    top_logprobs: tuple[tuple[TopLogprob, ...], ...] = ()
    finish: FinishReason | None = None
    spans: tuple[VersionSpan, ...] = ()
    num_cached_tokens: int = 0
    server_version: str | None = None
    routed_experts: Experts | None = field(default=None, eq=False)


class ServerDialect(Protocol):
    """The HTTP operations of a kind of server. ``client`` has the server's base URL, its key and its timeouts.

    Every method raises ``EngineError`` if the server cannot be reached or its answer is malformed, with the URL and the
    answer, and ``InvalidRequest`` or ``UnsupportedParameter`` for a request that the server rejects.
    """

    @property
    def name(self) -> str:
        """Return ``sglang`` or ``vllm``."""
        ...

    @property
    def adapter_root(self) -> str | None:
        """Return the path before ``/load_lora_adapter`` and ``/unload_lora_adapter``; ``None`` without such routes."""
        ...

    async def describe(self, client: httpx.AsyncClient) -> ServerFacts:
        """Return the server's properties.

        Raises ``EngineError`` for a version that is too old, and names the oldest supported one.
        """
        ...

    async def is_ready(self, client: httpx.AsyncClient) -> bool:
        """Return whether the server answers, even while it is paused. Returns quickly, and never raises."""
        ...

    def check(self, request: EngineRequest) -> None:
        """Raise ``UnsupportedParameter`` for parameters that the server would ignore or change."""
        ...

    def generate(
        self, client: httpx.AsyncClient, request: EngineRequest, *, routing_key: str, adapter: str | None = None
    ) -> AbstractAsyncContextManager[AsyncIterator[Delta]]:
        """Open a generation, under the ``adapter`` of this name if there is one; the last delta has ``finish``.

        Leaving the block closes the connection.

        ``routing_key`` is equal for all requests of a session, so that a gateway can route them to the same server.
        """
        ...

    async def abort(self, client: httpx.AsyncClient, request_id: str) -> None:
        """End a generation with ``FinishReason.ABORT``; unknown ids are ignored."""
        ...

    async def pause(self, client: httpx.AsyncClient, mode: PauseMode) -> None:
        """Stop sampling until ``resume``; return once nothing is sampled. New requests wait."""
        ...

    async def resume(self, client: httpx.AsyncClient) -> None:
        """Continue sampling."""
        ...

    async def update_from_disk(self, client: httpx.AsyncClient, path: Path, *, version: str) -> None:
        """Load the safetensors of a directory that the server can read, and label the weights ``version``.

        The server is paused. Keys and values of the old weights are dropped. Raises ``ModelError`` if the server
        rejects the weights; it then keeps its old ones.
        """
        ...


@frozen(kw_only=True)
class ServerKind:
    """How a kind of server is started: ``python -m`` runs ``module`` with ``arguments``, unless a program is named.

    ``create`` creates the dialect, with the keyword arguments ``added_tokens`` (texts of the tokenizer's added tokens
    to ids, for grammars), ``stream_interval`` (that of ``ServerConfig``) and, for kinds with ``recording``,
    ``routed_layers``.
    """

    create: Callable[..., ServerDialect]
    oldest: tuple[int, ...]
    """The oldest version that the dialect works with."""
    module: str
    describe_place: Callable[[Path, str, int], tuple[str, ...]]
    """Returns the arguments for the model, the host and the port."""
    describe_adapters: Callable[[AdapterSlots], tuple[str, ...]]
    """Returns the arguments for adapters."""
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(factory=dict)
    """Variables in addition to those that the server is given anyway."""
    recording: tuple[str, ...] = ()
    """The arguments with which the server can report experts; empty if its experts are not read."""


_UNKNOWN = -1


@define(eq=False)
class Attribution:
    """The tokens of one attempt that began under ``version``, which the server calls ``label``."""

    version: int
    label: str = field(default=Factory(lambda self: str(self.version), takes_self=True), kw_only=True)
    num_delivered: int = 0
    _held: list[Delta] = field(factory=list)

    def take(self, delta: Delta, *, is_settled: bool) -> tuple[Chunk, ...]:
        """Add ``delta``, and return the chunks that can be passed on; after the last delta, all that remain.

        ``is_settled`` means that no load has begun since the attempt did. Raises ``EngineError`` if the server reports
        that other weights sampled, or does not report which did; chunks returned before remain correct.
        """
        if delta.finish is None:
            if is_settled:
                self._check_label(delta)
                if not len(delta.token_ids):
                    return ()
                # Nearly every delta is passed on here, which costs a third of ``_pass_on``.
                is_first, self.num_delivered = self.num_delivered == 0, self.num_delivered + len(delta.token_ids)
                return (
                    Chunk(
                        token_ids=delta.token_ids,
                        logprobs=delta.logprobs,
                        raw_logprobs=delta.raw_logprobs,
                        version=self.version,
                        top_logprobs=delta.top_logprobs,
                        num_cached_tokens=delta.num_cached_tokens if is_first else 0,
                    ),
                )
            self._held.append(delta)
            return ()
        whole = _join([*self._held, delta])
        num_all = self.num_delivered + len(whole.token_ids)
        versions = np.full(num_all, _UNKNOWN, dtype=np.int32)
        for span in delta.spans:
            # The label of the first version need not be a number: below an adapter, it is that of the base weights.
            plain = int(span.version) if span.version.isdecimal() else _UNKNOWN
            versions[max(span.start, 0) : max(span.end, 0)] = self.version if span.version == self.label else plain
        if is_settled and not delta.spans:
            self._check_label(delta)
            versions = np.full(num_all, self.version)
        # Tokens that were passed on already carry self.version, so the server's spans must agree.
        if (versions == _UNKNOWN).any() or (versions[: self.num_delivered] != self.version).any():
            raise EngineError(
                f"The server names the weights {[(s.version, s.start, s.end) for s in delta.spans]} for {num_all} "
                f"tokens, of which {self.num_delivered} were sampled by version {self.version}."
            )
        return self._pass_on(whole, versions[self.num_delivered :])

    def _check_label(self, delta: Delta) -> None:
        # A server may restart between two health checks; its tokens are then of weights that nothing published.
        if delta.server_version not in (None, self.label):
            raise EngineError(
                f"The server has weights {delta.server_version!r} where {self.label!r} was loaded; it has been "
                "started again."
            )

    def _pass_on(self, delta: Delta, versions: Ints) -> tuple[Chunk, ...]:
        """Return a chunk for each run of equal versions; the last one has the finish."""
        is_first = self.num_delivered == 0
        self.num_delivered += len(versions)
        bounds = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
        chunks = [_cut(delta, start, end, int(versions[start])) for start, end in pairwise(bounds) if start < end]
        if delta.finish is not None and not chunks:
            chunks = [_cut(delta, 0, 0, self.version)]
        return tuple(
            evolve(
                chunk,
                finish=delta.finish if chunk is chunks[-1] else None,
                num_cached_tokens=delta.num_cached_tokens if is_first and chunk is chunks[0] else 0,
                routed_experts=delta.routed_experts if chunk is chunks[-1] else None,
            )
            for chunk in chunks
        )


def _join(deltas: Sequence[Delta]) -> Delta:
    last = deltas[-1]
    return Delta(
        token_ids=np.concatenate([delta.token_ids for delta in deltas]),
        logprobs=np.concatenate([delta.logprobs for delta in deltas]),
        raw_logprobs=np.concatenate([delta.raw_logprobs for delta in deltas]),
        top_logprobs=tuple(top for delta in deltas for top in delta.top_logprobs),
        finish=last.finish,
        spans=last.spans,
        num_cached_tokens=deltas[0].num_cached_tokens,
        server_version=last.server_version,
        routed_experts=last.routed_experts,
    )


def _cut(delta: Delta, start: int, end: int, version: int) -> Chunk:
    return Chunk(
        token_ids=delta.token_ids[start:end],
        logprobs=delta.logprobs[start:end],
        raw_logprobs=delta.raw_logprobs[start:end],
        version=version,
        top_logprobs=delta.top_logprobs[start:end],
    )


# ---------------------------------------------------------------------------------------------- reading answers

LOGITS_SETTINGS = ("frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias")
"""The settings of ``Sampling`` that change the logits before a temperature is applied."""


def are_defaults(request: EngineRequest, names: Sequence[str]) -> bool:
    """Return whether the settings ``names`` of ``request`` have their default values."""
    neutral = Sampling()
    return all(getattr(request.sampling, name) == getattr(neutral, name) for name in names)


@asynccontextmanager
async def open_deltas(
    client: httpx.AsyncClient,
    path: str,
    body: Mapping[str, Any],
    parse: Callable[[Any], Delta],
    *,
    headers: Mapping[str, str] | None = None,
    software: str,
) -> AsyncIterator[AsyncIterator[Delta]]:
    """Send a request, and yield the deltas that ``parse`` makes of its events, up to the one that has a finish reason.

    Raises ``InvalidRequest`` if the server refuses the request, and ``EngineError`` if it fails, if ``parse`` raises
    because the event is not one of ``software``, or if the stream ends without a finish reason.
    """
    async with open_events(client, path, body, headers=headers) as events:
        if isinstance(events, Answer):
            raise failure_of(client, path, events)
        async with aclosing(_read_deltas(client, path, events, parse, software)) as deltas:
            yield deltas


async def _read_deltas(
    client: httpx.AsyncClient, path: str, events: AsyncIterator[Any], parse: Callable[[Any], Delta], software: str
) -> AsyncGenerator[Delta]:
    async for event in events:
        try:
            if event.get("error"):
                raise failure_of(client, path, as_answer(event))
            delta = parse(event)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise EngineError(f"{address_of(client, path)} streams what {software} does not: {error!r}") from error
        yield delta
        if delta.finish is not None:
            # Read the stream to its end, so that the connection can be reused.
            with suppress(EngineError):
                await anext(events, None)
            return
    raise EngineError(f"{address_of(client, path)} ended its stream without a reason.")


@frozen(kw_only=True)
class RoutedLayers:
    """Each token takes ``num_chosen`` experts in each of the layers ``sparse``, of ``num_layers``; others are dense."""

    num_chosen: int
    num_layers: int
    sparse: tuple[int, ...]

    @classmethod
    def of(cls, directory: Path) -> Self:
        """Read them from the configuration of the model in ``directory``.

        Raises ``ConfigError`` if it is not a mixture of experts.
        """
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        text = config.get("text_config", config)
        num_chosen = text.get("num_experts_per_tok")
        if not num_chosen:
            raise ConfigError(f"trainer.router_replay: {directory} is not a mixture of experts; leave it out.")
        # Qwen's names; other models that can be replayed have experts in each layer.
        dense, step = text.get("mlp_only_layers") or (), text.get("decoder_sparse_step") or 1
        num_layers = int(text["num_hidden_layers"])
        sparse = tuple(i for i in range(num_layers) if i not in dense and (i + 1) % step == 0)
        return cls(num_chosen=int(num_chosen), num_layers=num_layers, sparse=sparse)

    def decode(self, encoded: Any, *, num_tokens: int) -> Experts:
        """Return the experts [``num_tokens``, sparse layers, chosen] of base64-encoded int32 of all layers.

        Raises ``ValueError`` for another number of them.
        """
        flat = np.frombuffer(b64decode(encoded), dtype=np.int32)
        if flat.size != num_tokens * self.num_layers * self.num_chosen:
            raise ValueError(
                f"{flat.size} experts for {num_tokens} tokens of {self.num_layers} layers with {self.num_chosen} each"
            )
        return as_experts(flat.reshape(num_tokens, self.num_layers, self.num_chosen)[:, list(self.sparse)])
