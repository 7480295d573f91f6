"""Requests of rollout workflows for tokens: generation settings, and one request.

Answers are in ``interactions``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Self
from uuid import uuid4

from attrs import evolve, field, frozen
from attrs.validators import ge, gt, le

from areal_actors.domain import Ints, Sampling, as_ints
from areal_actors.errors import InvalidRequest

__all__ = ["GenerationConfig", "GenerationHyperparameters", "ModelRequest"]


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
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = field(default=1.0, validator=gt(0.0))

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
