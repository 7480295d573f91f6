"""Models that would quietly compute something else are refused before training."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import (
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)

from areal_actors.errors import ConfigError, ModelError
from areal_actors.training.config import ComputeDtype, Layout, TrainerConfig
from areal_actors.training.model_checks import plan_attention, require_plain_head, require_tree_support
from areal_actors.training.trainer import PolicyTrainer


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_ordinary_models_are_supported(make_model, kind):
    """Neither check refuses them."""
    model = make_model(kind).eval()

    require_plain_head(model)
    require_tree_support(model)


def test_a_head_with_something_behind_it_is_refused(make_model):
    """A model that scales its logits would be scored wrongly: it is refused by name."""
    model = make_model()
    plain = model.forward

    def scaled(*args, **kwargs):
        output = plain(*args, **kwargs)
        output.logits = output.logits / 8
        return output

    model.forward = scaled

    with pytest.raises(ModelError, match="LlamaForCausalLM"):
        require_plain_head(model)


@pytest.mark.parametrize("ignored", ["attention_mask", "position_ids"])
def test_a_decoder_that_ignores_mask_or_positions_is_refused(make_model, ignored):
    """A packed row would be read as one text: the check finds out by trying."""
    model = make_model().eval()
    plain = model.model.forward
    model.model.forward = lambda **kwargs: plain(**(kwargs | {ignored: None}))

    with pytest.raises(ConfigError, match="layout=flat"):
        require_tree_support(model)


def test_windows_and_foreign_attention_are_refused(make_model):
    """A window is longer than the trial, so it is recognised by name."""
    model = make_model().eval()
    model.config.layer_types = ["full_attention", "sliding_attention"]

    with torch.no_grad(), pytest.raises(ConfigError, match="full attention"):
        require_tree_support(model)


WINDOWED = {
    "phi3": (Phi3Config, Phi3ForCausalLM, {"pad_token_id": 0}),
    "mixtral": (MixtralConfig, MixtralForCausalLM, {"num_local_experts": 2}),
    "starcoder2": (Starcoder2Config, Starcoder2ForCausalLM, {}),
    "mistral": (MistralConfig, MistralForCausalLM, {}),
}


def windowed_model(kind, *, window, context=64):
    """A tiny random model, all of whose layers have a window, and whose configuration names no kinds of layers."""
    make_config, make, extra = WINDOWED[kind]
    torch.manual_seed(0)
    config = make_config(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        sliding_window=window,
        initializer_range=0.5,
        **extra,
    )
    return make(config)


def plain_logprobs(model, row):
    """Log-probabilities of the row's tokens by the model's own forward pass."""
    ids = torch.tensor(np.array(row.input_ids), dtype=torch.long)
    with torch.no_grad():
        logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1).numpy()
    return np.where(row.loss_mask == 1, np.concatenate([[0], logprobs]), 0)


@pytest.mark.parametrize("kind", list(WINDOWED))
@pytest.mark.parametrize("layout", Layout)
def test_windows_reach_back_in_the_row(make_row, kind, layout):
    """Rows longer than the window are what the model computes for each of them alone, in both layouts."""
    trainer = PolicyTrainer(windowed_model(kind, window=8), TrainerConfig(dtype=ComputeDtype.FLOAT32, layout=layout))
    rows = [make_row(np.append(np.arange(45), last), np.repeat([0, 1], [6, 40])) for last in (50, 60)]

    for row, values in zip(rows, trainer.logprobs(rows), strict=True):
        np.testing.assert_allclose(values, plain_logprobs(trainer.model, row), atol=1e-4)


def eager(model):
    """The model with an attention that packs do not replace."""
    model.set_attn_implementation("eager")
    return model


@pytest.mark.parametrize("kind", list(WINDOWED))
def test_a_window_that_rows_may_exceed_is_refused_in_trees_of_other_attention(make_row, kind):
    """A dense mask knows no window. The error names it and the way out, where every row is what the model computes."""
    row = make_row(np.arange(46) % 61, np.repeat([0, 1], [6, 40]))

    with pytest.raises(ConfigError, match=r"last 8 tokens only, while rows may have 64 tokens; use layout=flat"):
        PolicyTrainer(eager(windowed_model(kind, window=8)), TrainerConfig(dtype=ComputeDtype.FLOAT32))

    config = TrainerConfig(dtype=ComputeDtype.FLOAT32, layout=Layout.FLAT)
    flat = PolicyTrainer(eager(windowed_model(kind, window=8)), config)
    np.testing.assert_allclose(flat.logprobs([row])[0], plain_logprobs(flat.model, row), atol=1e-4)


@pytest.mark.parametrize("kind", list(WINDOWED))
def test_rows_within_a_window_are_trained_in_trees_of_other_attention(make_row, kind):
    """As long as the engine's context is no longer than the window; a longer row from elsewhere is refused."""
    config = TrainerConfig(dtype=ComputeDtype.FLOAT32)
    trainer = PolicyTrainer(eager(windowed_model(kind, window=24)), config, max_length=24)
    rows = [make_row(np.append(np.arange(23), last), np.repeat([0, 1], [6, 18])) for last in (30, 40)]

    for row, values in zip(rows, trainer.logprobs(rows), strict=True):
        np.testing.assert_allclose(values, plain_logprobs(trainer.model, row), atol=1e-4)

    with pytest.raises(ConfigError, match="a row has 25"):
        trainer.logprobs([make_row(np.arange(25), np.repeat([0, 1], [6, 19]))])


def test_attention_that_ignores_plans_keeps_its_mask(make_model):
    """A decoder that makes its own mask of ours cannot take a plan: it is left as it was, and trains as before."""
    model = make_model().eval()
    plain = model.model.forward
    model.model.forward = lambda **kwargs: plain(**(kwargs | {"attention_mask": to_tensor(kwargs["attention_mask"])}))

    assert not plan_attention(model)
    assert model.config._attn_implementation == "sdpa"
    require_tree_support(model)


def to_tensor(mask):
    """A mask as a decoder may treat it that knows tensors only."""
    return None if mask is None else mask.to(torch.float32).contiguous()
