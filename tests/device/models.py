"""Small models whose shapes the kernels of a GPU accept, and rows of branching sessions for them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

FAMILIES = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
VOCAB_SIZE = 97


def create_model(
    device: str, *, family: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float32, **more: Any
) -> Any:
    """Four heads of 32 to each two keys; weights large enough that a mistake shows."""
    config, model = FAMILIES[family]
    torch.manual_seed(seed)
    settings = config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        initializer_range=0.15,
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=None,
        attn_implementation="sdpa",
        **more,
    )
    return model(settings).to(device=device, dtype=dtype).eval()
