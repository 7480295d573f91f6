"""Checks that the trainer's shortcuts are exact for a model, made on a few tokens before any training.

The trainer applies the output head itself, and packs rows with its own masks and positions. Architectures that would
silently compute something else are rejected here, with advice on what to change.
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

__all__ = ["attention_window", "require_plain_head", "require_tree_support"]

_TOLERANCE = 1e-3
"""Log-probabilities of a float32 model agree to 1e-5; a wrong mask or position is off by more than this."""
_NUM_TRIED = 48
"""Length of the test rows: a window that no setting names is detected if it is shorter."""


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


def attention_window(config: Any) -> int | None:
    """Return how many tokens back the attention of a transformers configuration reaches; ``None`` means all of them.

    Phi-3, Mixtral, Starcoder2 and Mistral 7B v0.1 have a window in every layer and no ``layer_types``.
    """
    window = getattr(config.get_text_config(), "sliding_window", None)
    return int(window) if window else None


def require_tree_support(model: Any, *, max_length: int | None = None) -> None:
    """Check that the model scores two rows in one trie as it scores them separately.

    Rows have up to ``max_length`` tokens; ``None`` means the context length of the model. Raises ``ConfigError`` if the
    attention accepts no mask, if its window is shorter than such rows, or if a layer has no attention.
    """
    config = model.config
    takes_mask = config._attn_implementation in ("sdpa", "eager", TREE_ATTENTION)  # noqa: SLF001
    window = attention_window(config)
    longest = max_length or getattr(config.get_text_config(), "max_position_embeddings", None)
    if window is not None and (longest is None or longest > window):
        raise ConfigError(
            f"layout: tree computes full attention, and {type(model).__name__} attends to the last {window} tokens "
            f"only, while rows may have {longest or 'any number of'} tokens; use layout=flat, or bound them by "
            f"engine.max_length={window}."
        )
    kinds = getattr(config, "layer_types", None) or ()
    is_full = all(kind == "full_attention" or (kind == "sliding_attention" and window) for kind in kinds)
    if not (takes_mask and is_full and _agrees(model, longest or _NUM_TRIED)):
        raise ConfigError(
            f"layout: tree needs full attention with sdpa or eager in every layer, which {type(model).__name__} does "
            "not have; use layout=flat."
        )


@torch.no_grad()
def _agrees(model: Any, max_length: int) -> bool:
    length = min(_NUM_TRIED, max_length)
    shared, size = length - 1, model.config.get_text_config().vocab_size
    ids, positions = np.arange(length + 1) % size, np.arange(length)
    tree = Pack(
        input_ids=ids[None],
        position_ids=np.append(positions, shared)[None],
        segments=(
            Segment(start=0, stop=length, ancestors=np.zeros(0, dtype=np.int64)),
            Segment(start=length, stop=length + 1, ancestors=np.arange(shared)),
        ),
        rows=(0, 1),
        sources=np.array([length - 1, length]),
        targets=np.zeros(2, dtype=np.int64),
        num_tokens=length + 1,
    )
    flat = evolve(
        tree,
        input_ids=np.stack([ids[:length], np.append(ids[:shared], ids[length])]),
        position_ids=np.stack([positions, positions]),
        segments=None,
        sources=np.array([length - 1, 2 * length - 1]),
    )
    found, expected = score_pack(model, tree).logprobs, score_pack(model, flat).logprobs
    return torch.allclose(found, expected, rtol=0, atol=_TOLERANCE)
