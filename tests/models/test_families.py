"""Models of every family are trained and sampled, or refused in one sentence; ``nox -s families`` tries all."""

from __future__ import annotations

import random

import pytest
from huggingface_hub.errors import StrictDataclassError
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tools.families import TYPES, cells_of, create_tiny_config, create_tiny_model, try_model
from transformers import (
    BertConfig,
    BertLMHeadModel,
    CohereConfig,
    Gemma2Config,
    Gemma4TextConfig,
    GPT2Config,
    GraniteConfig,
    MambaConfig,
    Qwen2MoeConfig,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from areal_actors.errors import ModelError
from areal_actors.models import model_shape
from areal_actors.training.config import TrainerConfig
from areal_actors.training.trainer import PolicyTrainer


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", random.Random(7).sample(TYPES, 24))
def test_configuration_sizes_are_read_or_refused(model_type):
    """Configurations lack attributes, name them differently, or have one for each layer."""
    try:
        config = CONFIG_MAPPING[model_type]()
        config.get_text_config(decoder=True)
    except (ValueError, KeyError, ImportError, TypeError, AttributeError, NotImplementedError, StrictDataclassError):
        pytest.skip("transformers has no default of it")
    try:
        shape = model_shape(config)
    except ModelError:
        return  # a refusal names the configuration
    sizes = (shape.vocab_size, shape.num_layers, shape.hidden, shape.num_heads, shape.num_kv_heads, shape.head_dim)
    assert all(isinstance(size, int) and size > 0 for size in (*sizes, shape.width))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (GPT2Config(n_embd=32, n_layer=3, n_head=4, n_positions=64), {"width": 128, "head_dim": 8, "num_layers": 3}),
        (Qwen2MoeConfig(num_experts_per_tok=2, moe_intermediate_size=16), {"width": 32, "num_experts_per_token": 2}),
        (MambaConfig(hidden_size=32), {"num_heads": 1, "head_dim": 32, "max_positions": None}),
        (Gemma4TextConfig(head_dim=8, global_head_dim=16), {"head_dim": 16, "min_head_dim": 8}),
        (CohereConfig(logit_scale=0.5), {"logit_scale": 0.5}),
        (GraniteConfig(logits_scaling=8.0), {"logit_scale": 0.125}),
        (Gemma2Config(final_logit_softcapping=30.0), {"logit_cap": 30.0}),
    ],
)
def test_sizes_are_read_whatever_their_names(config, expected):
    """A width that the model decides, experts, no heads, two sizes of heads, and what becomes of logits."""
    shape = model_shape(config)
    assert {name: getattr(shape, name) for name in expected} == expected


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", ["gpt2", "gpt_oss", "gemma4_text", "cohere2", "qwen3_5_text", "rembert"])
def test_family_is_as_in_transformers_or_refused(model_type):
    """Each of these was computed wrongly, refused or ended in an error of Python or torch."""
    results = try_model(create_tiny_model(model_type))
    assert not [result for result in results.values() if result.startswith("!")]


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=3, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_variant_is_as_in_transformers_or_refused(data):
    """Log-probabilities and gradients of both layouts, an adapter, the engine, and weights that were written."""
    cell = data.draw(st.sampled_from(TYPES).flatmap(lambda name: st.sampled_from(list(cells_of(name)))))
    model = create_tiny_model(cell.model_type, cell.changes)
    results = {} if model is None else try_model(model)
    assert not [result for result in results.values() if result.startswith("!")]


def test_model_that_sees_later_tokens_is_refused():
    """An encoder with a head has logits for each token, which know the next ones."""
    config = create_tiny_config("bert")
    assert isinstance(config, BertConfig)
    with pytest.raises(ModelError, match="BertLMHeadModel attends to later tokens"):
        PolicyTrainer(BertLMHeadModel(config), TrainerConfig())
