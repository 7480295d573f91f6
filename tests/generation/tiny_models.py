"""Tiny models of the engine tests, with weights large enough that a mistake shows."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM


def create_llama(vocab_size: int = 96, *, seed: int = 0) -> LlamaForCausalLM:
    """Three query heads to each of two key heads, untied."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=24,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=2,
            max_position_embeddings=256,
            initializer_range=0.3,
        )
    ).eval()


_SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "sliding_window": 16,
}
_FULL_AND_WINDOW = {"layer_types": ["sliding_attention", "full_attention"]}
_GATED_DELTA = {"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4}
_GATED_DELTA |= {"linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROTATION = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}

SETTINGS: dict[str, dict[str, Any]] = {
    # The lean path: biases, one key head, tied; norms of heads.
    "qwen2": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "qwen3": {},
    # Learned positions.
    "gpt2": {"n_embd": 24, "n_head": 3, "n_positions": 256},
    # A window of 16 tokens in every second layer.
    "gemma3_text": _FULL_AND_WINDOW,
    # Heads of different sizes, and layers that read keys and values of others.
    "gemma4_text": _FULL_AND_WINDOW
    | {"global_head_dim": 16, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96},
    # Sinks and experts.
    "gpt_oss": _FULL_AND_WINDOW | _EXPERTS | _ROTATION,
    # A recurrent state and a short convolution; keys and values.
    "qwen3_5_text": _GATED_DELTA,
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    # States alone, which several tokens cannot continue in one pass.
    "mamba": {"state_size": 8},
    # A cache of its own, whose rows cannot be padded.
    "deepseek_v4": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}
"""Settings of a family beside ``_SIZES``."""


def create_model(family: str, *, seed: int = 0, **settings: Any) -> Any:
    """Return a small random model of this family of transformers."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **{**_SIZES, **SETTINGS[family], **settings})
    ).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(std=0.2)
    return model
