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

from areal_actors.errors import ArealError, ConfigError, ModelError
from areal_actors.lib.telemetry import get_logger
from areal_actors.models import model_shape, require_fixed_rotation
from areal_actors.training.config import Layout, TrainerConfig
from areal_actors.training.forward import run_decoder, score_hidden
from areal_actors.training.layers import decoder_layers, decoder_of
from areal_actors.training.packing import Pack, Segment
from areal_actors.training.router_replay import explain_unreplayable
from areal_actors.training.tree_attention import PackMask, has_planned_attention, planned_attention

_log = get_logger(__name__)

_TOLERANCE = 1e-3
"""Results of a float32 model agree to 1e-5; a wrong mask or position is off by more than this."""
_PROBED_LOGIT = 50.0
"""The largest logit in the check of the head: more than the bounds of known models."""
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
        name, layouts = type(model).__name__, {config.layout for config in configs}
        if plan_attention(model):
            if Layout.AUTO in layouts:
                _log.info("layout", model=name, layout="tree")
        else:  # slower, with the same loss
            attention = model.config._attn_implementation  # noqa: SLF001 - transformers has no public name for it
            log = _log.warning if Layout.TREE in layouts else _log.info
            log("layout", model=name, layout="flat", are_rows_padded=True, attention=attention)
    except ArealError:
        raise
    except Exception as error:
        # Models of transformers fail in many ways on a plain pass over a few tokens.
        raise ModelError(
            f"{type(model).__name__} cannot be trained: a pass over a few tokens failed with {type(error).__name__}: "
            f"{error}"
        ) from error
    return limit


def can_replay(model: Any, configs: Sequence[TrainerConfig]) -> bool:
    """Return whether recorded experts can be replayed. Raises ``ConfigError`` if not, and one of ``configs`` says so.

    A rank whose model is on the meta device learns it from the first one.
    """
    if model.device.type == "meta":
        return False
    reason = explain_unreplayable(model)
    if reason is not None and any(config.router_replay for config in configs):
        raise ConfigError(f"router_replay: {reason}; leave router_replay out.")
    return reason is None


@torch.no_grad()
def require_plain_head(model: Any) -> None:
    """Check that the trainer's scores are those of the model's own logits, which no later token changes.

    Raises ``ModelError`` for models that see later tokens, and for those whose logits are not their head applied to
    their decoder's output, with the scale and the bound of ``ModelShape``.
    """
    name, decoder, head = type(model).__name__, decoder_of(model), model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear) or not list(decoder_layers(model)):
        raise ModelError(f"{name} has no linear output head over decoder layers; training it is not supported.")
    # Some tokens, since routers of experts that rank them all (Doge) agree on two.
    input_ids = torch.arange(16, device=model.device)[None] % model_shape(model.config).vocab_size
    hidden = decoder(input_ids=input_ids, use_cache=False).last_hidden_state
    first = decoder(input_ids=input_ids[:, :8], use_cache=False).last_hidden_state
    if not torch.allclose(hidden[:, :8], first, rtol=_TOLERANCE, atol=_TOLERANCE):
        raise ModelError(
            f"{name} attends to later tokens, so that it predicts none; set is_decoder in its configuration if it can "
            "be a decoder."
        )
    # Logits of a model that is not trained yet are near 0, where a bound changes nothing.
    factor = _PROBED_LOGIT / head(hidden).abs().max().clamp(min=torch.finfo(hidden.dtype).tiny)

    def magnify(_module: Any, _args: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state * factor
        return output

    hook = decoder.register_forward_hook(magnify)
    try:
        logits = model(input_ids=input_ids, use_cache=False).logits[0].float()
    finally:
        hook.remove()
    extremes = torch.stack([logits.argmin(-1), logits.argmax(-1)])
    expected = logits.log_softmax(-1).gather(-1, extremes.T).T
    found = torch.stack([score_hidden(model, hidden[0] * factor, targets).logprobs for targets in extremes])
    if not torch.allclose(found, expected, rtol=_TOLERANCE, atol=_TOLERANCE):
        raise ModelError(
            f"{name} changes its logits after the output head, in a way that no setting of its configuration tells; "
            "training such a model is not supported."
        )


def plan_attention(model: Any) -> bool:
    """Make ``model`` attend by plan, if it then computes packed rows as it computes them separately; return whether.

    Otherwise its attention stays as it was, and it computes padded rows.
    """
    before, planned = model.config._attn_implementation, planned_attention(model)  # noqa: SLF001
    if has_planned_attention(model):
        return True
    if planned is None or not _has_only_attention(model.config):
        return False
    packed, separate = _trial_packs(model)
    with torch.no_grad():
        expected = run_decoder(model, separate)
    model.set_attn_implementation(planned)
    try:
        if _agrees(model, packed, expected):
            return True
    except Exception as error:  # noqa: BLE001 - models fail in many ways on a mask that is not a tensor, and torch to compile
        reason = f"{type(error).__name__}: {error}".split("\n")[0]
        _log.warning("planned_attention_failed", model=type(model).__name__, attention=planned, reason=reason)
    model.set_attn_implementation(before)
    return False


def _has_only_attention(config: Any) -> bool:
    kinds, window = model_shape(config).layer_types, model_shape(config).window
    return all(kind == "full_attention" or (kind == "sliding_attention" and window) for kind in kinds)


def _trial_packs(model: Any) -> tuple[Pack, Pack]:
    """Return three rows in one pack and in a batch: two that share all but their last token, and one that shares none.

    All tokens of the third row are compared: it would see those before it if anything but attention mixed tokens.
    """
    length, shared, size = _NUM_TRIED, _NUM_TRIED - 1, model_shape(model.config).vocab_size
    ids, positions = np.arange(length + 1) % size, np.arange(length)
    none, behind = np.zeros(0, dtype=np.int64), length + 1 + positions
    packed = Pack(
        input_ids=np.concatenate([ids, ids[:length][::-1]])[None],
        position_ids=np.concatenate([positions, [shared], positions])[None],
        segments=(
            Segment(start=0, stop=length, ancestors=none),
            Segment(start=length, stop=length + 1, ancestors=np.arange(shared)),
            Segment(start=length + 1, stop=2 * length + 1, ancestors=none),
        ),
        rows=(0, 1, 2),
        sources=np.concatenate([[length - 1, length], behind]),
        targets=np.zeros(2 + length, dtype=np.int64),
        num_tokens=2 * length + 1,
    )
    separate = evolve(
        packed,
        input_ids=np.stack([ids[:length], np.append(ids[:shared], ids[length]), ids[:length][::-1]]),
        position_ids=np.stack([positions] * 3),
        segments=None,
        sources=np.concatenate([[length - 1, 2 * length - 1], 2 * length + positions]),
    )
    return packed, separate


@torch.no_grad()
def _agrees(model: Any, packed: Pack, expected: torch.Tensor) -> bool:
    """Whether the rows of a pack have the hidden states [n, H] that they have separately, by layers with their windows.

    Hidden states, and not log-probabilities, since those of a model that is not trained yet hardly depend on anything.
    """
    mask = PackMask(packed.segments or (), model.device)
    found = run_decoder(model, packed, mask=mask)
    # A window is usually longer than these rows, so that only its name in the call shows that a plan respects it.
    model_sizes = model_shape(model.config)
    window = model_sizes.window
    windows = [window if kind == "sliding_attention" else None for kind in model_sizes.layer_types]
    windows = windows or [window] * model_sizes.num_layers
    tolerance = _TOLERANCE * float(expected.abs().max())
    return mask.windows == windows and torch.allclose(found, expected, rtol=0, atol=tolerance)
