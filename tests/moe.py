"""Mixtures of experts, which transformers keeps in memory in another arrangement than on disk: random and tiny."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from areal_actors.models.built_in import create_tiny_tokenizer

ARCHITECTURES = {
    "mixtral": (MixtralConfig, MixtralForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "olmoe": (OlmoeConfig, OlmoeForCausalLM),
}
KINDS = tuple(ARCHITECTURES)


def create_moe(kind: str, *, seed: int = 0, vocab: int = 61) -> Any:
    """A model of two layers with four experts, two of which see each token."""
    torch.manual_seed(seed)
    config, architecture = ARCHITECTURES[kind]
    experts = {"num_local_experts": 4} if kind == "mixtral" else {"num_experts": 4, "moe_intermediate_size": 48}
    settings = config(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
        **experts,
    )
    return architecture(settings).eval()


def save_moe(kind: str, directory: Path, *, seed: int = 0) -> Path:
    """Save a model that speaks the language of the model ``tiny``. Returns ``directory``."""
    tokenizer = create_tiny_tokenizer()
    model = create_moe(kind, seed=seed, vocab=len(tokenizer))
    # SGLang's grammars need one.
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
