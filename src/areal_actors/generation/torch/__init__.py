"""The embedded engine: transformers models in this process. Torch is loaded when ``TorchEngine`` is first accessed.

::

    engine.py      the async interface             worker.py     the thread that owns the model, and computes steps
    scheduler.py   generations, slots and queues   attention.py  attention over slots, keys and values, shared prefixes
    forward.py     models on flat batches          constraint.py sampling under a grammar
    sampler.py     from logits to ids              config.py     settings

    Models that run by their own modules:
    rows.py        rows in caches of transformers  runners.py    their steps

    On GPUs, for Llama-like models:
    graphs.py      recorded steps, one ahead       operations.py  what they need of a layer
    kernels.py     these operations in Triton
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
