"""The routers of a mixture of experts, as modules of transformers models. Imports no torch."""

from __future__ import annotations

from typing import Any


def find_routers(model: Any) -> tuple[Any, ...]:
    """Return the routers of ``model`` in the order of its layers; none for a dense model.

    Their output is logits, weights [N, k] and indices [N, k] of the chosen experts.
    """
    # Of all bases, since ``fully_shard`` puts a class in front of the module's own.
    return tuple(
        part for part in model.modules() if any(base.__name__.endswith("TopKRouter") for base in type(part).__mro__)
    )
