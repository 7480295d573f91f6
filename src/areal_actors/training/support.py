"""What a model must be so that the trainer's short cuts are exact: tried out on a few tokens before any training.

The trainer applies the output head itself, and it packs rows with masks and positions of its own. Architectures that
would quietly compute something else are refused here, with what to change.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from attrs import evolve

from areal_actors.errors import ConfigError, ModelError
from areal_actors.training.forward import score_pack
from areal_actors.training.packing import Pack, Segment
from areal_actors.training.tree_attention import TREE_ATTENTION

__all__ = ["require_plain_head", "require_tree_support"]

_TOLERANCE = 1e-3
"""Log-probabilities of a float32 model agree to 1e-5; a wrong mask or position is off by more than this."""


def require_plain_head(model: Any) -> None:
    """Check that the model's logits are its head applied to its decoder's output.

    Raises ``ModelError`` for models that scale or cap their logits afterwards.
    """
    input_ids = torch.tensor([[0, 1]], device=model.device)
    with torch.no_grad():
        hidden = model.get_decoder()(input_ids=input_ids, use_cache=False).last_hidden_state
        expected = model(input_ids=input_ids, use_cache=False).logits
    if not torch.allclose(model.get_output_embeddings()(hidden), expected, rtol=_TOLERANCE, atol=_TOLERANCE):
        raise ModelError(
            f"{type(model).__name__} changes its logits after the output head; training such a model is not supported."
        )


def require_tree_support(model: Any) -> None:
    """Check that the model scores two rows in one trie as it scores them apart.

    Raises ``ConfigError`` for attention that takes no mask, sees only a window, or is none.
    """
    config = model.config
    takes_mask = config._attn_implementation in ("sdpa", "eager", TREE_ATTENTION)  # noqa: SLF001
    is_full = all(kind == "full_attention" for kind in getattr(config, "layer_types", None) or ())
    if not (takes_mask and is_full and _agrees(model)):
        raise ConfigError(
            f"layout: tree needs full attention with sdpa or eager in every layer, which {type(model).__name__} does "
            "not have; use layout=flat."
        )


@torch.no_grad()
def _agrees(model: Any) -> bool:
    tree = Pack(
        input_ids=np.array([[0, 1, 2, 3]]),
        position_ids=np.array([[0, 1, 2, 2]]),
        segments=(
            Segment(start=0, stop=3, ancestors=np.zeros(0, dtype=np.int64)),
            Segment(start=3, stop=4, ancestors=np.array([0, 1])),
        ),
        rows=(0, 1),
        sources=np.array([2, 3]),
        targets=np.zeros(2, dtype=np.int64),
        num_tokens=4,
    )
    flat = evolve(
        tree,
        input_ids=np.array([[0, 1, 2], [0, 1, 3]]),
        position_ids=np.array([[0, 1, 2], [0, 1, 2]]),
        segments=None,
        sources=np.array([2, 5]),
    )
    found, expected = score_pack(model, tree).logprobs, score_pack(model, flat).logprobs
    return torch.allclose(found, expected, rtol=0, atol=_TOLERANCE)
