"""The embedded engine: transformers models in this process. Torch is loaded when ``TorchEngine`` is first accessed.

::

    engine.py      the async interface             worker.py     the thread that owns the model, and samples
    scheduler.py   generations, slots and queues   runners.py    logits of a step, by one of two paths
    forward.py     the choice between them         constraint.py sampling under a grammar
    sampler.py     from logits to ids              config.py     settings

    The lean path: Llama, Mistral, Qwen2 and Qwen3 on CPUs
    forward.py     the model on flat batches       attention.py  attention over slots, and shared prefixes
    All other models, by their own modules
    rows.py        rows of tokens in caches of transformers
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from areal_actors.generation.torch.config import TorchEngineConfig

if TYPE_CHECKING:
    from areal_actors.generation.torch.engine import TorchEngine

__all__ = ["TorchEngine", "TorchEngineConfig"]


def __getattr__(name: str) -> Any:
    if name == "TorchEngine":
        from areal_actors.generation.torch.engine import TorchEngine

        return TorchEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
