"""Models that would quietly compute something else are refused before training."""

from __future__ import annotations

import pytest
import torch

from areal_actors.errors import ConfigError, ModelError
from areal_actors.training.support import require_plain_head, require_tree_support


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
