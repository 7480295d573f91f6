"""Sampling: what is asked of an engine, and what it answers. The ``Engine`` protocol itself is ``engines/base.py``."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from attrs import field, frozen

from areal_actors.domain.arrays import Floats, Ints, array_equality, as_floats, as_ints
from areal_actors.domain.grammar import Grammar


@frozen(kw_only=True)
class SamplingDistribution:
    """The settings that decide which distribution the tokens of a turn were sampled from.

    ``temperature``, ``top_p``, ``top_k`` and ``min_p`` are as in ``Sampling``. ``is_adjusted`` marks turns whose logits
    were changed by penalties, a bias or a grammar as well, which nothing recomputes. ``logprobs_follow_truncation``
    says whether the engine's log-probabilities are those after top-k, top-p and min-p, as ``EngineInfo`` does.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    is_adjusted: bool = False
    logprobs_follow_truncation: bool = True

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token was taken, so that nothing was drawn at all."""
        return self.temperature == 0

    @property
    def is_truncated(self) -> bool:
        """Whether tokens were cut off before one was drawn."""
        return not self.is_greedy and (self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0)

    @property
    def has_truncated_logprobs(self) -> bool:
        """Whether truncation can be repeated on the trainer's logits, and the engine's log-probabilities follow it."""
        return self.is_truncated and self.logprobs_follow_truncation and not self.is_adjusted


@frozen(kw_only=True)
class Sampling:
    """How to sample. The neutral values are the defaults: temperature 1, no truncation, no penalty.

    ``temperature`` 0 takes the most probable token. ``top_k`` 0 and ``min_p`` 0 are off. ``stop`` strings end a
    generation without changing the ids that were sampled; ``stop_token_ids`` come beside the renderer's own.
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
        """Return what training has to know about the distribution that these settings sample from."""
        penalties = (self.frequency_penalty, self.presence_penalty, self.repetition_penalty - 1.0)
        return SamplingDistribution(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            is_adjusted=has_grammar or any(penalties) or bool(self.logit_bias),
            logprobs_follow_truncation=logprobs_follow_truncation,
        )


@frozen(kw_only=True)
class SampleKey:
    """What seeds the random numbers of one generation, so that the order of arrival changes no sample.

    ``seed`` is the run's (or the request's own), ``path`` names the generation within it: problem, group member, turn,
    choice. Two generations with equal keys, prompts, weights and settings sample equal tokens.
    """

    seed: int
    path: tuple[int | str, ...] = ()


class FinishReason(StrEnum):
    """Why an engine stopped sampling."""

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
    """What an engine sampled for one prompt; all arrays have the length of ``token_ids``.

    ``logprobs`` are of the distribution that was sampled from (after temperature, penalties and truncation) and
    ``raw_logprobs`` of the plain softmax, NaN where the engine does not know them; ``versions`` are those of the
    weights that sampled each token. A stop token is included as it was sampled. ``top_logprobs`` holds a tuple per
    token where the request asked for alternatives.
    """

    token_ids: Ints = field(converter=as_ints, eq=array_equality)
    logprobs: Floats = field(converter=as_floats, eq=array_equality)
    raw_logprobs: Floats = field(converter=as_floats, eq=array_equality)
    versions: Ints = field(converter=as_ints, eq=array_equality)
    finish: FinishReason
    top_logprobs: tuple[tuple[TopLogprob, ...], ...] = ()


@frozen(kw_only=True)
class EngineRequest:
    """One generation. ``prompt`` int32 [T], T >= 1; ``id`` names it for ``abort`` and in logs, alone while it runs.

    ``key`` seeds its random numbers. ``stop_token_ids`` are the renderer's end-of-turn ids; those of ``sampling`` are
    added. With a ``grammar``, what is sampled matches it, and one of these ids ends it where it may end.
    ``routing_key`` is equal for the requests of a session, whose prompts begin alike: where there are several engines,
    they go to the same one, which has their prefix cached. Empty, the request goes anywhere.
    """

    id: str
    prompt: Ints = field(converter=as_ints, eq=False)
    sampling: Sampling = field(factory=Sampling)
    key: SampleKey
    stop_token_ids: tuple[int, ...] = ()
    grammar: Grammar | None = None
    routing_key: str = ""


@frozen(kw_only=True)
class Chunk:
    """Tokens that were sampled since the last chunk, all under one version; the last chunk carries ``finish``.

    Arrays are [n], n >= 0 (only the last may be empty). A stop token is delivered as it was sampled. A raw
    log-probability that the engine does not know is NaN.
    ``num_cached_tokens`` of the prompt came from the prefix cache (set in the first chunk).
    """

    token_ids: Ints = field(converter=as_ints, eq=False)
    logprobs: Floats = field(converter=as_floats, eq=False)
    raw_logprobs: Floats = field(converter=as_floats, eq=False)
    version: int
    finish: FinishReason | None = None
    top_logprobs: tuple[tuple[TopLogprob, ...], ...] = ()
    num_cached_tokens: int = 0


class PauseMode(StrEnum):
    """What happens to running generations when the engine pauses.

    Those run that have been given a place; those that still queue for one, and new ones, wait in every mode.
    """

    KEEP = "keep"
    """They stop where they are and go on at ``resume``, under whatever weights are loaded then."""
    WAIT = "wait"
    """They finish first."""
    ABORT = "abort"
    """They end with ``FinishReason.ABORT``."""


@frozen(kw_only=True)
class Snapshot:
    """Weights to load: in memory, as a directory of safetensors, or kept by whoever trains, to be asked for.

    ``state`` (parameter name to tensor, by the names of the model's state dict; shared, not copied) stays valid and
    unchanged until ``Engine.load`` has returned. Tied weights may be left out. With ``is_kept`` an engine asks for what
    its servers need (``messages.Weights``), as long as no newer version is published.
    """

    version: int
    state: Mapping[str, Any] | None = field(default=None, repr=False, eq=False)
    path: Path | None = None
    is_kept: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether nobody could load it."""
        return self.state is None and self.path is None and not self.is_kept


@frozen(kw_only=True)
class EngineInfo:
    """What an engine can do.

    ``context_length`` bounds prompt plus output, ``vocab_size`` bounds the ids that it accepts.

    ``logprobs_follow_truncation`` tells whether reported log-probabilities are those after top-p, top-k and min-p.
    ``knows_raw_logprobs`` tells whether it knows those of the plain softmax whatever was asked for; if not, they are
    NaN wherever a temperature other than 1, a penalty or a bias moves what is sampled from.
    ``samples_follow_keys`` tells whether equal keys, prompts and weights give equal tokens.
    ``has_grammars`` tells whether it can hold what it samples to a grammar.
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
    """Counters since the engine opened; ``running`` and ``waiting`` are of this moment."""

    running: int = 0
    waiting: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    sampled_tokens: int = 0
    aborted: int = 0
    busy_seconds: float = 0.0
