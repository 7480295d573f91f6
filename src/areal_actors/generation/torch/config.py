"""Settings for the embedded engine. Imports no torch."""

from __future__ import annotations

from typing import Any, Literal

from attrs import field, frozen, validators

from areal_actors.lib.settings import COMMON, constant

# ``Any``: mypy infers the field's type from its default, and would accept a validator of ``float`` only.
_positive_or_none: Any = validators.optional(validators.gt(0))


@frozen(kw_only=True)
class TorchEngineConfig:
    """Settings for the embedded engine.

    ``dtype`` "auto" selects bfloat16 where the device multiplies it fast (CUDA; CPUs with AMX or AVX512-BF16), else
    float32, or the value of the environment variable ``AREAL_AUTO_DTYPE``. ``device`` "auto" selects CUDA if it is
    available. ``max_concurrent`` generations run at once, the rest wait; idle slots keep the keys and values of ended
    generations as a prefix cache. ``max_length`` limits prompt plus output in tokens. On a GPU, keys and values of both
    limits together are allocated at once. ``num_threads`` sets torch's threads in the engine (``None``: unchanged).
    ``deterministic``: the samples of a request depend only on its prompt, key and weights, not on other requests.
    Slower: every step computes all ``max_concurrent`` slots, and prefixes are shared between identical prompts only.
    ``step_timeout_seconds``: a step or a load of weights that takes longer than this counts as hung, and the engine
    fails (``None``: it may take forever). The time to open the engine does not count.
    """

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: str = "auto"
    max_concurrent: int = field(default=64, validator=validators.ge(1), metadata=COMMON)
    max_length: int = field(default=2048, validator=validators.ge(2), metadata=COMMON)
    prefill_chunk: int | None = constant(None)
    """Prompt tokens computed between two decode steps: smaller values give running generations a steadier rate, larger
    ones start new generations sooner. ``None``: 512 on CPUs, 8192 on GPUs."""
    num_threads: int | None = field(default=None, validator=validators.optional(validators.ge(1)))
    deterministic: bool = False
    step_timeout_seconds: float | None = field(default=600.0, validator=_positive_or_none)
    return_routed_experts: bool = constant(False)
    """Record the experts of each token of a mixture of experts; on with trainer.router_replay."""
