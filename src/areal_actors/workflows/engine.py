"""The engine as a rollout workflow uses it: tokens in, tokens out, under the sample key of the episode.

It uses the generation actor like all other callers: it waits while weights are loaded, cancelling the caller aborts its
request, and each token records which weights sampled it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any, Self
from uuid import uuid4

import numpy as np
from attrs import evolve, field, frozen
from attrs.validators import ge, gt, le

from areal_actors.cache.interactions import ModelResponse
from areal_actors.cache.limits import EpisodeBudget
from areal_actors.domain import (
    Chunk,
    EngineInfo,
    EngineRequest,
    EpisodeLimits,
    FinishReason,
    Ints,
    SampleKey,
    Sampling,
    SamplingDistribution,
    as_ints,
)
from areal_actors.errors import ContextLengthExceeded, ExportError, InvalidRequest, Unavailable
from areal_actors.kernel import Ref
from areal_actors.lib.settings import constant
from areal_actors.messages import DescribeEngine, Generate, Generation
from areal_actors.rendering import Renderer


class EpisodeEngine:
    """The engine passed to ``arun_episode``. Direct clients take it as their engine: ``ArealOpenAI(engine=engine)``.

    ``renderer`` converts messages and texts to ids, and ids to texts. ``gconfig`` are the settings of the run, ``key``
    seeds the sampling. No answer has more than ``max_tokens``, and all together stay within ``limits``. Two requests
    with the same prompt are two samples; the order of an episode's requests does not change their samples.
    """

    def __init__(
        self,
        generation: Ref[Generation],
        renderer: Renderer,
        *,
        gconfig: GenerationConfig | None = None,
        key: SampleKey | None = None,
        max_tokens: int | None = None,
        limits: EpisodeLimits | None = None,
    ) -> None:
        self.generation = generation
        self.renderer = renderer
        self.gconfig = gconfig or GenerationConfig()
        self.key = key or SampleKey(seed=0)
        self.max_tokens = max_tokens
        self.budget = EpisodeBudget(limits=limits or EpisodeLimits())
        self._num_turns = 0
        self._num_tokens = 0
        self._asked: Counter[str] = Counter()
        self._num_clients = 0
        self._versions: list[int] = []
        self._samplings: dict[bytes, set[SamplingDistribution]] = {}
        self._info: EngineInfo | None = None

    @property
    def oldest_version(self) -> int | None:
        """The oldest weights that sampled for ``agenerate`` so far; ``None`` before the first call."""
        return min(self._versions, default=None)

    def sampling_of(self, output_tokens: Ints) -> SamplingDistribution | None:
        """Return how ``agenerate`` sampled an output of these ids (int32 [n]) in this episode; ``None`` before a call.

        Raises ``ExportError`` if it used several settings and the output belongs to none of them, or to more than one.
        """
        ways = set().union(*self._samplings.values())
        if len(ways) > 1:
            ways = self._samplings.get(output_tokens.tobytes(), set())
            if len(ways) != 1:
                raise ExportError(
                    "The episode sampled at different settings, and a row does not tell which of them a turn had; add "
                    "temperatures (and top_ps, top_ks, min_ps) to the tensors, from the sampling of each ModelResponse."
                )
        return next(iter(ways), None)

    def for_episode(
        self,
        *path: int | str,
        key: SampleKey | None = None,
        max_tokens: int | None = None,
        limits: EpisodeLimits | None = None,
    ) -> EpisodeEngine:
        """Return the same engine under another sample key: ``key``, or this one's with ``path`` appended.

        With ``max_tokens``, no answer is longer, whatever a request asks for. Its requests count anew for ``limits``,
        which are this one's by default.
        """
        key = key or evolve(self.key, path=(*self.key.path, *path))
        limit = self.max_tokens if max_tokens is None else max_tokens
        limits = limits or self.budget.limits
        return EpisodeEngine(
            self.generation, self.renderer, gconfig=self.gconfig, key=key, max_tokens=limit, limits=limits
        )

    def next_client_key(self) -> SampleKey:
        """Return a new sample key for each client that an episode creates."""
        self._num_clients += 1
        return evolve(self.key, path=(*self.key.path, "client", self._num_clients))

    async def describe(self) -> EngineInfo:
        """Return the properties of the engine, such as its ``context_length`` and ``vocab_size``."""
        if self._info is None:
            self._info = (await self.generation.ask(DescribeEngine())).info
        return self._info

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """Continue the ids of ``request``; the answer ends with the stop token if one was sampled.

        Cancelling aborts the generation.

        Raises:
            InvalidRequest: there are no ids, one is outside the vocabulary, or several samples are requested at once.
            ContextLengthExceeded: the prompt leaves no room for a token.
            EpisodeLimitReached: the episode has had all the answers or tokens that its limits allow.
            Unavailable: the generation was aborted.
            EngineError: the engine failed.
        """
        gconfig = self.gconfig if request.gconfig is None else request.gconfig
        if gconfig.n_samples != 1:
            raise InvalidRequest(
                f"agenerate answers one sample, and gconfig.n_samples is {gconfig.n_samples}; "
                "pass gconfig.new(n_samples=1), once for each sample.",
                param="gconfig",
            )
        if not len(request.input_ids):
            raise InvalidRequest("The request has no input_ids; a prompt has at least one token.", param="input_ids")
        engine_request = await self._create_request(request, gconfig.sampling)
        chunks: list[Chunk] = []
        self._num_turns += 1
        async with self.generation.stream(Generate(request=engine_request)) as arriving:
            async for chunk in arriving:
                chunks.append(chunk)
                self._num_tokens += len(chunk.token_ids)
        info = await self.describe()
        sampling = gconfig.sampling.distribution(logprobs_follow_truncation=info.logprobs_follow_truncation)
        finish = chunks[-1].finish if chunks else None
        if finish is None or finish is FinishReason.ABORT:
            raise Unavailable(
                f"Generation {request.rid} was aborted before it was complete; it may be asked for again."
            )
        response = ModelResponse(
            input_tokens=request.input_ids.tolist(),
            output_tokens=np.concatenate([chunk.token_ids for chunk in chunks]).tolist(),
            output_logprobs=np.concatenate([chunk.logprobs for chunk in chunks]).tolist(),
            output_versions=[chunk.version for chunk in chunks for _ in chunk.token_ids],
            stop_reason=finish,
            sampling=sampling,
        )
        self._versions += response.output_versions
        self._samplings.setdefault(as_ints(response.output_tokens).tobytes(), set()).add(sampling)
        return response

    async def _create_request(self, request: ModelRequest, sampling: Sampling) -> EngineRequest:
        info = await self.describe()
        room = info.context_length - len(request.input_ids)
        if room < 1:
            wanted = len(request.input_ids) + sampling.max_new_tokens
            raise ContextLengthExceeded(num_tokens=wanted, max_tokens=info.context_length)
        left = self.budget.admit(num_turns=self._num_turns, num_tokens=self._num_tokens)
        max_tokens = min(limit for limit in (sampling.max_new_tokens, room, self.max_tokens, left) if limit is not None)
        # Derived from the prompt and how often it was requested before, so that the order of arrival does not matter.
        digest = blake2b(request.input_ids.tobytes(), digest_size=8).hexdigest()
        count = self._asked[digest]
        self._asked[digest] += 1
        return EngineRequest(
            id=f"{request.rid}-{uuid4().hex[:8]}",  # members of a group may all use the problem's name
            prompt=request.input_ids,
            sampling=evolve(sampling, max_new_tokens=max_tokens),
            key=evolve(self.key, path=(*self.key.path, digest, count)),
            stop_token_ids=self.renderer.stop_token_ids,
            routing_key="/".join(map(str, self.key.path)),  # empty outside of episodes
            is_streamed=False,
        )


def _texts(value: str | Iterable[str] | None) -> tuple[str, ...]:
    return () if value is None else (value,) if isinstance(value, str) else tuple(value)


@frozen(kw_only=True)
class GenerationConfig:
    """Default sampling settings of rollout workflows. The defaults are neutral."""

    n_samples: int = field(default=1, validator=ge(1))
    """Samples that a workflow draws for a prompt. One call returns one sample; a workflow makes this many calls."""
    max_new_tokens: int = field(default=512, validator=ge(1))
    greedy: bool = False
    """Take the most probable token at any temperature."""
    temperature: float = field(default=1.0, validator=ge(0.0))
    top_p: float = field(default=1.0, validator=[gt(0.0), le(1.0)])
    top_k: int = field(default=0, validator=ge(0))
    """0 disables it."""
    min_p: float = field(default=0.0, validator=[ge(0.0), le(1.0)])
    stop: tuple[str, ...] = field(default=(), converter=_texts)
    """Texts that end a generation."""
    stop_token_ids: tuple[int, ...] = field(default=(), converter=tuple)
    """Ids that end a generation, in addition to those that end an answer of the model."""
    frequency_penalty: float = constant(0.0)
    presence_penalty: float = constant(0.0)
    repetition_penalty: float = constant(1.0)

    def new(self, **changes: Any) -> Self:
        """Return these settings with ``changes``. Raises ``TypeError`` for a setting that does not exist."""
        return evolve(self, **changes)

    @property
    def sampling(self) -> Sampling:
        """The sampling parameters to request from an engine."""
        return Sampling(
            temperature=0.0 if self.greedy else self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            max_new_tokens=self.max_new_tokens,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            repetition_penalty=self.repetition_penalty,
        )


GenerationHyperparameters = GenerationConfig
"""Alias used by workflows of other systems."""


def _settings(value: GenerationConfig | Mapping[str, Any] | None) -> GenerationConfig | None:
    """Convert settings, which may be a mapping from a configuration file, given as an argument of a workflow."""
    if value is None or isinstance(value, GenerationConfig):
        return value
    try:
        return GenerationConfig(**value)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"gconfig {value!r} does not fit: {error}", param="gconfig") from error


@frozen(kw_only=True)
class ModelRequest:
    """One generation requested by a workflow: the ids to continue (a list or an array of T of them), and its settings.

    Without a ``gconfig``, the engine's applies. ``rid`` names the request in logs. ``tokenizer`` is accepted for
    compatibility with workflows that pass it; the engine uses its own.
    """

    rid: str = field(factory=lambda: uuid4().hex)
    input_ids: Ints = field(converter=as_ints, eq=False)
    gconfig: GenerationConfig | None = field(default=None, converter=_settings)
    tokenizer: Any = field(default=None, repr=False, eq=False)
