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

from areal_actors.errors import ModelError
from areal_actors.training.config import ComputeDtype, Layout, TrainerConfig
from areal_actors.training.model_checks import plan_attention, require_plain_head
from areal_actors.training.trainer import PolicyTrainer


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_ordinary_models_are_supported(make_model, kind):
    """They have a plain head, and attend by plan."""
    model = make_model(kind).eval()

    require_plain_head(model)
    assert plan_attention(model)


def test_head_with_something_behind_it_is_refused(make_model):
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
def test_decoder_that_ignores_mask_or_positions_does_not_attend_by_plan(make_model, ignored):
    """A packed row would be read as one text: the check finds out by trying."""
    model = make_model().eval()
    plain = model.model.forward
    model.model.forward = lambda **kwargs: plain(**(kwargs | {ignored: None}))

    assert not plan_attention(model)


@pytest.mark.parametrize("kind", ["state", "convolution"])
def test_layer_that_would_read_the_row_before_keeps_rows_apart(make_model, make_row, kind):
    """A recurrent state or a convolution that goes on into the next row of a pack is found by trying."""
    model = make_model().eval()
    layer = model.model.layers[0].mlp
    plain = layer.forward

    def mixed(hidden):
        before = hidden.cumsum(1) if kind == "state" else hidden
        return plain(hidden) + 0.1 * torch.nn.functional.pad(before, (0, 0, 1, 0))[:, :-1]

    layer.forward = mixed
    trainer = PolicyTrainer(model, TrainerConfig(dtype=ComputeDtype.FLOAT32))
    rows = [make_row([*range(first, first + 20)], [0] + 19 * [1], session=f"{first}") for first in (3, 30)]

    assert (trainer.layout, trainer.is_planned) == (Layout.FLAT, False)
    for row, values in zip(rows, trainer.logprobs(rows), strict=True):
        np.testing.assert_allclose(values, plain_logprobs(trainer.model, row), atol=1e-4)


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
@pytest.mark.parametrize("layout", [Layout.FLAT, Layout.TREE])
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
@pytest.mark.parametrize("layout", [Layout.FLAT, Layout.TREE])
def test_models_with_other_attention_compute_padded_rows(make_row, kind, layout):
    """Every row is what the model computes for it alone, within its window and beyond, in both layouts."""
    config = TrainerConfig(dtype=ComputeDtype.FLOAT32, layout=layout)
    trainer = PolicyTrainer(eager(windowed_model(kind, window=8)), config)
    rows = [make_row(np.append(np.arange(last), last), np.repeat([0, 1], [6, last - 5])) for last in (7, 45)]

    for row, values in zip(rows, trainer.logprobs(rows), strict=True):
        np.testing.assert_allclose(values, plain_logprobs(trainer.model, row), atol=1e-4)


def test_attention_that_ignores_plans_keeps_its_mask(make_model):
    """A decoder that makes its own mask of ours cannot take a plan: it is left as it was, and trains as before."""
    model = make_model().eval()
    plain = model.model.forward
    model.model.forward = lambda **kwargs: plain(**(kwargs | {"attention_mask": to_tensor(kwargs["attention_mask"])}))

    assert not plan_attention(model)
    assert model.config._attn_implementation == "sdpa"


def to_tensor(mask):
    """A mask as a decoder may treat it that knows tensors only."""
    return None if mask is None else mask.to(torch.float32).contiguous()
