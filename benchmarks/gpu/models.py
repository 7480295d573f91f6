"""Models made from a configuration, with random weights created on the device, and the operations that they need."""

from __future__ import annotations

from typing import Any

import torch
from attrs import frozen

__all__ = ["SHAPES", "Shape", "create_model", "set_logit_spread", "train_flops"]


@frozen(kw_only=True)
class Shape:
    """The shape of a decoder. ``family`` is the model type of transformers."""

    family: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int = 151936
    max_position_embeddings: int = 40960

    @property
    def num_body_parameters(self) -> int:
        """Parameters of the layers that every token is multiplied with; neither embeddings nor head."""
        queries, keys = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        attention = self.hidden_size * (2 * queries + 2 * keys)
        return self.num_hidden_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def num_head_parameters(self) -> int:
        """Parameters of the output head."""
        return self.hidden_size * self.vocab_size


SHAPES = {
    "0.5b": Shape(  # Qwen2.5-0.5B
        family="qwen2",
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        head_dim=64,
    ),
    "1.5b": Shape(  # Qwen2.5-1.5B
        family="qwen2",
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        head_dim=128,
    ),
    "4b": Shape(  # Qwen3-4B
        family="qwen3",
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
    ),
    "tiny": Shape(
        family="qwen2",
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=512,
    ),
}


def create_model(shape: Shape, device: str, *, dtype: torch.dtype = torch.bfloat16, is_tied: bool = True) -> Any:
    """Return a transformers causal LM of ``shape`` with random weights, in evaluation mode.

    Its weights are created on ``device``: drawing them on the host takes longer than everything that is measured.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        shape.family,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_hidden_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        max_position_embeddings=shape.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=is_tied,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device(device):
        factory: Any = AutoModelForCausalLM
        model = factory.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return model.to(device).eval()


@torch.no_grad()
def set_logit_spread(model: Any, spread: float) -> None:
    """Scale the last norm so that logits have the standard deviation ``spread``.

    With the weights of an initialisation, all ids are nearly equally probable, and log-probabilities hardly depend on
    rounding; a trained model has a spread of 2 to 4. Only meaningful for an untied head: with tied weights, the largest
    logit is that of the last token.
    """
    ids = torch.randint(model.config.vocab_size, (4, 64), device=model.device)
    model.model.norm.weight.mul_(spread / model(input_ids=ids, use_cache=False).logits.float().std())


def train_flops(shape: Shape, *, num_tokens: int, num_trained: int, num_pairs: int, is_full: bool) -> float:
    """Return the floating-point operations of a training step on ``num_tokens``, each counted once.

    6 per parameter and token for full training, 4 with adapters, whose gradients with respect to weights are hardly
    any; the head only for the ``num_trained`` tokens that it is computed for; attention 12 per query-key pair, layer
    and width. Anything that is computed again for the backward pass is not counted.
    """
    per_parameter = 6 if is_full else 4
    width = shape.num_attention_heads * shape.head_dim
    matrices = shape.num_body_parameters * num_tokens + shape.num_head_parameters * num_trained
    return per_parameter * matrices + 12.0 * shape.num_hidden_layers * width * num_pairs
