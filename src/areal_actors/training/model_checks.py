"""Checks that the trainer's shortcuts are exact for a model, made on a few tokens before any training.

The trainer applies the output head itself, and packs rows with its own masks and positions. Architectures that would
silently compute something else are rejected here, with advice on what to change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from attrs import evolve

from areal_actors.errors import ArealError, ModelError
from areal_actors.lib.telemetry import get_logger
from areal_actors.models import model_shape, require_fixed_rotation
from areal_actors.training.config import Layout, TrainerConfig
from areal_actors.training.forward import score_pack
from areal_actors.training.layers import decoder_layers, decoder_of
from areal_actors.training.packing import Pack, Segment
from areal_actors.training.router_replay import require_replayable
from areal_actors.training.tree_attention import PackMask, has_planned_attention, planned_attention

_log = get_logger(__name__)

_TOLERANCE = 1e-3
"""Log-probabilities of a float32 model agree to 1e-5; a wrong mask or position is off by more than this."""
_NUM_TRIED = 48
"""Length of the test rows: a window that no setting names is detected if it is shorter."""


def require_supported(model: Any, configs: Sequence[TrainerConfig], *, max_length: int | None) -> int | None:
    """Check that ``model`` can be trained with ``configs``, those of all phases; make it attend by plan if it can.

    Returns the length of rows beyond which their log-probabilities would depend on other rows; ``None`` without one.
    A model on the meta device is not checked: it belongs to a rank that gets its weights from the first one, which
    checks them. Raises ``ConfigError`` and ``ModelError`` as the functions below.
    """
    if model.device.type == "meta":
        return None
    try:
        require_plain_head(model)
        limit = require_fixed_rotation(model.config, max_length=max_length)
        if not plan_attention(model) and any(config.layout is Layout.TREE for config in configs):
            attention = model.config._attn_implementation  # noqa: SLF001 - transformers has no public name for it
            _log.warning("rows_padded", model=type(model).__name__, attention=attention)  # slower, with the same loss
        if any(config.router_replay for config in configs):
            require_replayable(model)
    except ArealError:
        raise
    except Exception as error:
        # Models of transformers fail in many ways on a plain pass over a few tokens.
        raise ModelError(
            f"{type(model).__name__} cannot be trained: a pass over a few tokens failed with {type(error).__name__}: "
            f"{error}"
        ) from error
    return limit


def require_plain_head(model: Any) -> None:
    """Check that the model's logits are its head applied to its decoder's output, which no later token changes.

    Raises ``ModelError`` for models that scale or cap their logits afterwards, and for those that see later tokens.
    """
    decoder, head = decoder_of(model), model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear) or not list(decoder_layers(model)):
        raise ModelError(
            f"{type(model).__name__} has no linear output head over decoder layers; training it is not supported."
        )
    input_ids = torch.tensor([[0, 1]], device=model.device)
    with torch.no_grad():
        hidden = decoder(input_ids=input_ids, use_cache=False).last_hidden_state
        first = decoder(input_ids=input_ids[:, :1], use_cache=False).last_hidden_state
        expected = model(input_ids=input_ids, use_cache=False).logits
    if not torch.allclose(hidden[:, :1], first, rtol=_TOLERANCE, atol=_TOLERANCE):
        raise ModelError(
            f"{type(model).__name__} attends to later tokens, so that it predicts none; set is_decoder in its "
            "configuration if it can be a decoder."
        )
    if not torch.allclose(model.get_output_embeddings()(hidden), expected, rtol=_TOLERANCE, atol=_TOLERANCE):
        raise ModelError(
            f"{type(model).__name__} changes its logits after the output head; training such a model is not supported."
        )


def plan_attention(model: Any) -> bool:
    """Make ``model`` attend by plan, if it then scores packed rows as it scores them separately; return whether.

    Otherwise its attention stays as it was, and it computes padded rows.
    """
    before, planned = model.config._attn_implementation, planned_attention(model)  # noqa: SLF001
    if has_planned_attention(model):
        return True
    if planned is None or not _has_only_attention(model.config):
        return False
    model.set_attn_implementation(planned)
    try:
        if _agrees(model):
            return True
    except Exception as error:  # noqa: BLE001 - models fail in many ways on a mask that is not a tensor, and torch to compile
        reason = f"{type(error).__name__}: {error}".split("\n")[0]
        _log.warning("planned_attention_failed", model=type(model).__name__, attention=planned, reason=reason)
    model.set_attn_implementation(before)
    return False


def _has_only_attention(config: Any) -> bool:
    kinds, window = model_shape(config).layer_types, model_shape(config).window
    return all(kind == "full_attention" or (kind == "sliding_attention" and window) for kind in kinds)


@torch.no_grad()
def _agrees(model: Any) -> bool:
    """Whether rows in one pack have the same scores as rows in a batch, and layers attend with their windows.

    The pack has two rows that share all but their last token, and a third that shares nothing.
    """
    length, shared, size = _NUM_TRIED, _NUM_TRIED - 1, model_shape(model.config).vocab_size
    ids, positions = np.arange(length + 1) % size, np.arange(length)
    none = np.zeros(0, dtype=np.int64)
    tree = Pack(
        input_ids=np.concatenate([ids, ids[:length][::-1]])[None],
        position_ids=np.concatenate([positions, [shared], positions])[None],
        segments=(
            Segment(start=0, stop=length, ancestors=none),
            Segment(start=length, stop=length + 1, ancestors=np.arange(shared)),
            Segment(start=length + 1, stop=2 * length + 1, ancestors=none),
        ),
        rows=(0, 1, 2),
        sources=np.array([length - 1, length, 2 * length]),
        targets=np.zeros(3, dtype=np.int64),
        num_tokens=2 * length + 1,
    )
    flat = evolve(
        tree,
        input_ids=np.stack([ids[:length], np.append(ids[:shared], ids[length]), ids[:length][::-1]]),
        position_ids=np.stack([positions] * 3),
        segments=None,
        sources=np.array([1, 2, 3]) * length - 1,
    )
    mask = PackMask(tree.segments or (), model.device)
    found, expected = score_pack(model, tree, mask=mask).logprobs, score_pack(model, flat).logprobs
    # A window is usually longer than these rows, so that only its name in the call shows that a plan respects it.
    model_sizes = model_shape(model.config)
    window = model_sizes.window
    windows = [window if kind == "sliding_attention" else None for kind in model_sizes.layer_types]
    windows = windows or [window] * model_sizes.num_layers
    return mask.windows == windows and torch.allclose(found, expected, rtol=0, atol=_TOLERANCE)
