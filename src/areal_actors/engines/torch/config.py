"""Settings of the embedded engine. Imports no torch."""

from __future__ import annotations

from typing import Literal

from attrs import field, frozen, validators

__all__ = ["TorchEngineConfig"]


@frozen(kw_only=True)
class TorchEngineConfig:
    """How the embedded engine runs.

    ``dtype`` "auto" takes bfloat16 where the device multiplies it fast (CUDA; CPUs with AMX or AVX512-BF16), else
    float32, or what the environment variable ``AREAL_AUTO_DTYPE`` says. ``device`` "auto" takes CUDA where there is
    one. ``max_concurrent`` generations run at once, the rest wait; idle places keep the keys and values of ended
    generations as a prefix cache. ``max_length`` bounds prompt plus output in tokens. ``prefill_chunk`` is how many
    prompt tokens are computed between two decode steps: smaller is smoother for those that decode, larger is faster for
    those that arrive. ``num_threads`` sets torch's threads in the engine (``None``: leave them). ``deterministic``:
    what a request samples depends on its prompt, key and weights alone, not on its company. Slower: every step computes
    all ``max_concurrent`` places, and prefixes are shared between identical prompts only.
    """

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: str = "auto"
    max_concurrent: int = field(default=64, validator=validators.ge(1))
    max_length: int = field(default=2048, validator=validators.ge(2))
    prefill_chunk: int = field(default=512, validator=validators.ge(1))
    num_threads: int | None = field(default=None, validator=validators.optional(validators.ge(1)))
    deterministic: bool = False
