"""The sizes of a causal language model and the limits of its positions, read from its transformers configuration.

Configurations name them differently, and lack some: GPT-2 has no ``intermediate_size``, Gemma 4 one ``head_dim`` for
each kind of layer, and Nemotron H a width for its experts only. Everything else asks here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from attrs import frozen

from areal_actors.errors import ConfigError, ModelError

_WIDTHS = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "decoder_ffn_dim", "d_ff", "inner_hidden_size")
_DEFAULT_WIDTH = 4
"""The width of a feed-forward part by that of the layer, where a configuration leaves it to the model, as GPT-2's."""
_SCALES = ("logit_scale", "lm_head_multiplier", "output_multiplier", "logits_scaling")
"""Names of the factor of logits: Cohere's, Falcon H1's, and Granite's, which divides."""
_MULTIPLYING = frozenset({"hyperclovax"})
"""Model types that multiply by ``logits_scaling``."""
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Names of the bound of logits: those of Gemma, RecurrentGemma and xLSTM."""


@frozen(kw_only=True)
class ModelShape:
    """Sizes of a model; where layers differ, the largest, and of heads the smallest as well.

    ``width`` is that of the feed-forward part that one token goes through: of all experts that it is sent to.
    ``max_positions`` and ``window``, which is how many tokens back attention reaches, are ``None`` if nothing limits
    them, and ``layer_types`` is empty if the configuration does not tell layers apart.
    """

    vocab_size: int
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    min_head_dim: int
    width: int
    num_experts_per_token: int | None
    max_positions: int | None
    window: int | None
    layer_types: tuple[str, ...]
    logit_scale: float = 1.0
    """The factor by which the model multiplies the output of its head."""
    logit_cap: float | None = None
    """The bound c of logits, which become c * tanh(logit / c) after they were scaled; ``None`` without one."""


def model_shape(config: Any) -> ModelShape:
    """Return the sizes of the text model that ``config``, a transformers configuration, describes.

    Raises ``ModelError`` if it lacks what every such model has.
    """
    from huggingface_hub.errors import StrictDataclassError

    text = config.get_text_config(decoder=True)
    # Reading these from the configuration itself raises an error, which is no AttributeError.
    differing = getattr(text, "per_layer_attributes", None) or ()

    def read(name: str) -> Any:
        if name not in differing:
            return getattr(text, name, None)
        try:
            return [getattr(layer, name, None) for layer in text.per_layer_config]
        except (ValueError, TypeError, StrictDataclassError) as error:
            raise ModelError(f"{type(text).__name__} cannot be read layer by layer: {error}") from error

    def find(*names: str) -> int | None:
        return next((size for name in names if (size := _largest(read(name)))), None)

    vocab_size = find("vocab_size")
    num_layers = find("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
    hidden = find("hidden_size", "n_embd", "d_model")
    if vocab_size is None or num_layers is None or hidden is None:
        raise ModelError(
            f"{type(text).__name__} does not say how many tokens its model knows, how many layers it has, or how wide "
            "they are; it is not the configuration of a causal language model that can be trained or sampled here."
        )
    # Models without attention have no heads: one, as wide as the layer.
    num_heads = find("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads") or 1
    num_experts = find("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "experts_per_token")
    width = find("moe_intermediate_size") if num_experts else None
    width = width or find(*_WIDTHS) or _DEFAULT_WIDTH * hidden
    head_dim = find("head_dim", "global_head_dim", "kv_channels") or max(hidden // num_heads, 1)
    by_layer = read("head_dim")
    return ModelShape(
        vocab_size=vocab_size,
        num_layers=num_layers,
        hidden=hidden,
        num_heads=num_heads,
        num_kv_heads=find("num_key_value_heads", "num_kv_heads", "n_head_kv") or num_heads,
        head_dim=head_dim,
        min_head_dim=min(by_layer) if isinstance(by_layer, list) else head_dim,
        width=(num_experts or 1) * width,
        num_experts_per_token=num_experts,
        max_positions=find("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"),
        window=find("sliding_window"),
        layer_types=tuple(read("layer_types") or ()),
        logit_scale=_logit_scale(text),
        logit_cap=next((cap for name in _CAPS if (cap := getattr(text, name, None))), None),
    )


def _logit_scale(text: Any) -> float:
    for name in _SCALES:
        if (scale := getattr(text, name, None)) is not None:
            is_divisor = name == "logits_scaling" and text.model_type not in _MULTIPLYING
            return 1 / scale if is_divisor else float(scale)
    return 1.0


def require_fixed_rotation(config: Any, *, max_length: int | None) -> int | None:
    """Return the length in tokens up to which rows are rotated alike in every pass; ``None`` if all are.

    Beyond it, transformers rotates all tokens of a pass by angles that depend on its longest row (dynamic NTK,
    longrope), and keys that were cached before are not rotated again. A token's log-probability would depend on what
    shares its pass, and on when it was sampled. No rule for single rows could follow that, so longer rows are refused.

    Rows have up to ``max_length`` tokens, and no more than the model has positions; ``None`` means any number. Raises
    ``ConfigError`` if they may be longer than that length.
    """
    limit = _rotation_limit(config)
    if limit is None:
        return None
    longest = None if max_length is None else min(max_length, model_shape(config).max_positions or max_length)
    if longest is None or longest > limit:
        raise ConfigError(
            f"engine.max_length: beyond {limit} tokens the model {config.model_type} rotates all rows of a pass by its "
            f"longest one, so that log-probabilities depend on other rows, and rows may have "
            f"{longest or 'any number of'} tokens; set engine.max_length to {limit} or less, or take a model with a "
            "fixed rotation (default, linear, yarn, llama3)."
        )
    return limit


def _rotation_limit(config: Any) -> int | None:
    """Return the length of rows up to which rotary frequencies are constant; ``None`` if they are for any length.

    These are the conditions of ``dynamic_rope_update`` in transformers, which alone changes frequencies in a pass.
    """
    text = config.get_text_config(decoder=True)
    found = getattr(text, "rope_parameters", None) or {}
    # One rotation for all layers, or one for each type of layer.
    rotations = list(found.values()) if all(isinstance(each, Mapping) for each in found.values()) else [found]
    limits = [
        rotation["original_max_position_embeddings"] if kind == "longrope" else text.max_position_embeddings
        for rotation in rotations
        if (kind := rotation.get("rope_type") or "default") == "longrope" or "dynamic" in kind
    ]
    return min(limits, default=None)


def _largest(value: Any) -> int | None:
    """Return a size, the largest of several, or ``None`` for anything else."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, Iterable) and not isinstance(value, str):
        return max((size for item in value if (size := _largest(item))), default=None)
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
