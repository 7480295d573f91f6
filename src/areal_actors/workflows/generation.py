"""How a rollout workflow asks for tokens: the settings of a generation, and one request.

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
    """How rollout workflows sample, where they do not say otherwise. The neutral values are the defaults."""

    n_samples: int = field(default=1, validator=ge(1))
    """Samples that a workflow draws of a prompt. One call answers one: a workflow with more calls as often."""
    max_new_tokens: int = field(default=512, validator=ge(1))
    greedy: bool = False
    """Take the most probable token, whatever the temperature."""
    temperature: float = field(default=1.0, validator=ge(0.0))
    top_p: float = field(default=1.0, validator=[gt(0.0), le(1.0)])
    top_k: int = field(default=0, validator=ge(0))
    """0 is off."""
    min_p: float = field(default=0.0, validator=[ge(0.0), le(1.0)])
    stop: tuple[str, ...] = field(default=(), converter=_texts)
    """Texts that end a generation."""
    stop_token_ids: tuple[int, ...] = field(default=(), converter=tuple)
    """Ids that end a generation, besides those that end an answer of the model."""
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = field(default=1.0, validator=gt(0.0))

    def new(self, **changes: Any) -> Self:
        """The same settings but for ``changes``. Raises ``TypeError`` for a setting that there is not."""
        return evolve(self, **changes)

    @property
    def sampling(self) -> Sampling:
        """What an engine is asked for."""
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
"""The name by which workflows of other systems know these settings."""


def _settings(value: GenerationConfig | Mapping[str, Any] | None) -> GenerationConfig | None:
    """Settings, also as the mapping that a configuration file gives as an argument of a workflow."""
    if value is None or isinstance(value, GenerationConfig):
        return value
    try:
        return GenerationConfig(**value)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"gconfig {value!r} does not fit: {error}", param="gconfig") from error


@frozen(kw_only=True)
class ModelRequest:
    """One generation that a workflow asks for: the ids to be continued (a list or an array of T of them), and how.

    Without a ``gconfig``, that of the engine counts. ``rid`` names the request in logs. ``tokenizer`` is accepted for
    the sake of workflows that pass it; the engine has its own.
    """

    rid: str = field(factory=lambda: uuid4().hex)
    input_ids: Ints = field(converter=as_ints, eq=False)
    gconfig: GenerationConfig | None = field(default=None, converter=_settings)
    tokenizer: Any = field(default=None, repr=False, eq=False)
