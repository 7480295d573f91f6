"""The engine's copy of a model: the weights in its format, everything else as it is."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from areal_actors.generation.torch.engine import own_copy


def create_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=2048,
    )
    return LlamaForCausalLM(config).eval()


def test_copy_has_the_positions_of_a_model_that_was_loaded_in_its_format(tmp_path):
    """Rounded frequencies of rotary embeddings are off by radians after a thousand tokens."""
    model = create_model()
    model.save_pretrained(tmp_path)
    copied, loaded = (own_copy(source, torch.bfloat16, "cpu") for source in (model, tmp_path))

    assert {weight.dtype for weight in copied.parameters()} == {torch.bfloat16}
    assert copied.model.rotary_emb.inv_freq.dtype == torch.float32
    ids = torch.randint(64, (1, 1500))
    with torch.no_grad():
        torch.testing.assert_close(copied(ids).logits, loaded(ids).logits, rtol=0, atol=0)
