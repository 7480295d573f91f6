"""Sampling: requests to an engine and their results. The ``Engine`` protocol itself is in ``generation/base.py``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from attrs import cmp_using, field, frozen
from attrs.converters import optional

from areal_actors.domain.grammar import Grammar

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Experts = npt.NDArray[Any]
"""The experts of each token, uint8 or uint16 [T, layers, k]; the largest value of the type where they are unknown."""

ScalarT = TypeVar("ScalarT", bound=np.generic)

array_equality = cmp_using(eq=np.array_equal, class_name="array")
"""Value for ``field(eq=...)`` of an array."""


def as_ints(values: npt.ArrayLike) -> Ints:
    """Return ``values`` as a read-only int32 array [T], copied only if necessary."""
    return _read_only(_flat(np.asarray(values, dtype=np.int32)))


def as_floats(values: npt.ArrayLike) -> Floats:
    """Return ``values`` as a read-only float32 array [T], copied only if necessary."""
    return _read_only(_flat(np.asarray(values, dtype=np.float32)))


def as_experts(values: npt.ArrayLike) -> Experts:
    """Return ``values`` [T, layers, k] as a read-only array of the smallest type that holds 255 or 65535 experts."""
    array = np.asarray(values)
    if array.dtype not in (np.uint8, np.uint16):
        array = array.astype(np.uint8 if array.size == 0 or array.max() < np.iinfo(np.uint8).max else np.uint16)
    return _read_only(array)


def _flat(array: npt.NDArray[ScalarT]) -> npt.NDArray[ScalarT]:
    return array if array.ndim == 1 else array.reshape(-1)


def _read_only(array: npt.NDArray[ScalarT]) -> npt.NDArray[ScalarT]:
    if not array.flags.writeable:
        # A view of a read-only array would keep a chain of views alive in every evolved copy.
        return array
    view = array.view()
    view.flags.writeable = False
    return view


@frozen(kw_only=True)
class SamplingDistribution:
    """The settings that determine the distribution that a turn's tokens were sampled from.

    ``temperature``, ``top_p``, ``top_k`` and ``min_p`` are as in ``Sampling``. ``is_adjusted`` marks turns whose logits
    were also changed by penalties, a bias or a grammar, which the trainer cannot recompute.
    ``logprobs_follow_truncation`` says whether the engine's log-probabilities are those after top-k, top-p and min-p,
    as ``EngineInfo`` does.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    is_adjusted: bool = False
    logprobs_follow_truncation: bool = True

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token was taken, without drawing."""
        return self.temperature == 0

    @property
    def is_truncated(self) -> bool:
        """Whether tokens were cut off before one was drawn."""
        return not self.is_greedy and (self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0)

    @property
    def has_truncated_logprobs(self) -> bool:
        """Whether the engine's log-probabilities are after truncation, and the trainer can repeat it on its logits."""
        return self.is_truncated and self.logprobs_follow_truncation and not self.is_adjusted


@frozen(kw_only=True)
class Sampling:
    """Sampling settings. The defaults are neutral: temperature 1, no truncation, no penalty.

    ``temperature`` 0 takes the most probable token. ``top_k`` 0 and ``min_p`` 0 are off. ``stop`` strings end a
    generation without changing the sampled ids; ``stop_token_ids`` are used in addition to the renderer's.
    ``top_logprobs`` asks for that many alternatives per token.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_new_tokens: int = 512
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    top_logprobs: int = 0

    def distribution(
        self, *, has_grammar: bool = False, logprobs_follow_truncation: bool = True
    ) -> SamplingDistribution:
        """Return the facts that training needs about the distribution that these settings sample from."""
        penalties = (self.frequency_penalty, self.presence_penalty, self.repetition_penalty - 1.0)
        is_adjusted = has_grammar or any(penalties) or bool(self.logit_bias)
        return SamplingDistribution(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            is_adjusted=is_adjusted,
            logprobs_follow_truncation=logprobs_follow_truncation,
        )


@frozen(kw_only=True)
class SampleKey:
    """The seed of one generation's random numbers, so that the order of arrival does not change any sample.

    ``seed`` is that of the run or of the request; ``path`` names the generation within it: problem, group member, turn,
    choice. Two generations with equal keys, prompts, weights and settings sample equal tokens. ``num_drawn`` is the
    number of tokens that the generation has sampled elsewhere: it continues with the random numbers after theirs, and
    so with the tokens that it would have sampled there.
    """

    seed: int
    path: tuple[int | str, ...] = ()
    num_drawn: int = 0


class FinishReason(StrEnum):
    """Reasons why an engine stopped sampling."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@frozen(kw_only=True)
class TopLogprob:
    """An alternative at one position."""

    token_id: int
    logprob: float


@frozen(kw_only=True)
class Completion:
    """The result of one generation; all arrays have the length of ``token_ids``.

    ``logprobs`` are of the distribution that was sampled from (after temperature, penalties and truncation) and
    ``raw_logprobs`` of the plain softmax, NaN where the engine does not know them; ``versions`` are those of the
    weights that sampled each token. A stop token is included if it was sampled. ``top_logprobs`` holds a tuple per
    token if the request asked for alternatives. ``routed_experts`` [m, layers, k], if the engine records them, are the
    experts of the m tokens before the last one, including those of the prompt: the last token was not computed.
    """

    token_ids: Ints = field(converter=as_ints, eq=array_equality)
    logprobs: Floats = field(converter=as_floats, eq=array_equality)
    raw_logprobs: Floats = field(converter=as_floats, eq=array_equality)
    versions: Ints = field(converter=as_ints, eq=array_equality)
    finish: FinishReason
    top_logprobs: tuple[tuple[TopLogprob, ...], ...] = ()
    routed_experts: Experts | None = field(default=None, converter=optional(as_experts), eq=array_equality, repr=False)


@frozen(kw_only=True)
class EngineRequest:
    """One generation.

    ``prompt`` int32 [T], T >= 1; ``id`` names it for ``abort`` and in logs, and is unique while it runs.

    ``key`` seeds its random numbers. ``stop_token_ids`` are the renderer's end-of-turn ids; those of ``sampling`` are
    added. With a ``grammar``, the sampled text matches it, and one of these ids ends it where the grammar allows.
    ``routing_key`` is equal for all requests of a session, whose prompts begin alike: with several engines, they go to
    the same one, which has their prefix cached. If it is empty, the request goes to any engine. ``is_streamed`` is
    false if no client reads the tokens as they are sampled; an engine may then deliver many of them at a time.
    """

    id: str
    prompt: Ints = field(converter=as_ints, eq=False)
    sampling: Sampling = field(factory=Sampling)
    key: SampleKey
    stop_token_ids: tuple[int, ...] = ()
    grammar: Grammar | None = None
    routing_key: str = ""
    is_streamed: bool = True


@frozen(kw_only=True)
class Chunk:
    """Tokens sampled since the last chunk, all under one version; the last chunk carries ``finish``.

    Arrays are [n], n >= 0 (only the last may be empty). A stop token is delivered if it was sampled. A raw
    log-probability that the engine does not know is NaN. ``num_cached_tokens`` of the prompt came from the prefix cache
    (set in the first chunk). ``routed_experts`` (set in the last chunk of an engine that records them) are those of all
    tokens of prompt and output but the last, as in ``Completion``.
    """

    token_ids: Ints = field(converter=as_ints, eq=False)
    logprobs: Floats = field(converter=as_floats, eq=False)
    raw_logprobs: Floats = field(converter=as_floats, eq=False)
    version: int
    finish: FinishReason | None = None
    top_logprobs: tuple[tuple[TopLogprob, ...], ...] = ()
    num_cached_tokens: int = 0
    routed_experts: Experts | None = field(default=None, converter=optional(as_experts), eq=False, repr=False)


def join_chunks(chunks: Sequence[Chunk]) -> Completion:
    """Return the completion that arrived in ``chunks``, of which there is at least one."""
    counts = [len(chunk.token_ids) for chunk in chunks]
    return Completion(
        token_ids=np.concatenate([chunk.token_ids for chunk in chunks]),
        logprobs=np.concatenate([chunk.logprobs for chunk in chunks]),
        raw_logprobs=np.concatenate([chunk.raw_logprobs for chunk in chunks]),
        versions=np.array([chunk.version for chunk in chunks], dtype=np.int32).repeat(counts),
        finish=chunks[-1].finish or FinishReason.ABORT,
        top_logprobs=tuple(top for chunk in chunks for top in chunk.top_logprobs),
        routed_experts=chunks[-1].routed_experts,
    )


def split_completion(completion: Completion, *, num_cached_tokens: int = 0) -> tuple[Chunk, ...]:
    """Return ``completion`` as an engine would deliver it: a chunk for each run of tokens of one version."""
    versions = completion.versions
    bounds = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    return tuple(
        Chunk(
            token_ids=completion.token_ids[start:end],
            logprobs=completion.logprobs[start:end],
            raw_logprobs=completion.raw_logprobs[start:end],
            version=int(versions[start]) if len(versions) else 0,
            finish=completion.finish if end == len(versions) else None,
            top_logprobs=completion.top_logprobs[start:end],
            num_cached_tokens=num_cached_tokens if start == 0 else 0,
            routed_experts=completion.routed_experts if end == len(versions) else None,
        )
        for start, end in pairwise(bounds)
    )


class PauseMode(StrEnum):
    """Effect of a pause on running generations.

    A generation runs once it was given a place. Generations that queue for a place, and new ones, wait in every mode.
    """

    KEEP = "keep"
    """They stop where they are and continue at ``resume``, under the weights loaded by then."""
    WAIT = "wait"
    """They finish first."""
    ABORT = "abort"
    """They end with ``FinishReason.ABORT``."""


@frozen(kw_only=True)
class Snapshot:
    """Weights to load: in memory, or as a directory of safetensors.

    ``state`` (parameter name to tensor, with the names of the model's state dict; shared, not copied) stays valid and
    unchanged until ``Engine.load`` has returned. Tied weights may be omitted. An ``adapter`` is a directory that peft
    can load, of low-rank changes to the weights in ``path``.
    """

    version: int
    state: Mapping[str, Any] | None = field(default=None, repr=False, eq=False)
    path: Path | None = None
    adapter: Path | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to load."""
        return self.state is None and self.path is None


@frozen(kw_only=True)
class EngineInfo:
    """The capabilities of an engine.

    ``context_length`` limits prompt plus output; ``vocab_size`` limits the ids that it accepts.

    ``logprobs_follow_truncation`` says whether reported log-probabilities are those after top-p, top-k and min-p.
    ``knows_raw_logprobs`` says whether it always knows those of the plain softmax; if not, they are NaN wherever a
    temperature other than 1, a penalty or a bias changes the sampled distribution. ``samples_follow_keys`` says whether
    equal keys, prompts and weights give equal tokens. ``has_grammars`` says whether it can constrain samples to a
    grammar.
    """

    name: str
    model: str
    vocab_size: int
    context_length: int
    dtype: str
    device: str
    max_concurrent: int
    logprobs_follow_truncation: bool = True
    knows_raw_logprobs: bool = True
    samples_follow_keys: bool = True
    has_grammars: bool = False


@frozen(kw_only=True)
class EngineStatistics:
    """Counters since the engine opened; ``running`` and ``waiting`` are current values."""

    running: int = 0
    waiting: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    sampled_tokens: int = 0
    aborted: int = 0
    busy_seconds: float = 0.0
