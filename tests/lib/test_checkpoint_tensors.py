"""Weights of models as they are found in files."""

from __future__ import annotations

import torch
from safetensors.torch import load_file, save_file
from tests.training.conftest import _make_model
from transformers import AutoModelForCausalLM

from areal_actors.lib.checkpoint_tensors import read_checkpoint
from areal_actors.models import load_policy


def test_single_file_comes_before_an_index(tmp_path):
    """As in transformers: an index may be left of an earlier save."""
    _make_model("qwen2").save_pretrained(tmp_path, max_shard_size="30KB")
    model = _make_model("qwen2", seed=5)
    save_file(dict(model.state_dict()), tmp_path / "model.safetensors", metadata={"format": "pt"})
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()

    assert torch.equal(read_checkpoint(tmp_path)["lm_head.weight"], expected["lm_head.weight"])
    assert torch.equal(expected["lm_head.weight"], model.lm_head.weight)


def test_head_that_differs_from_the_embeddings_is_not_tied(tmp_path):
    """A tied configuration with another head in the files."""
    _make_model("llama").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"] + 1}, path, metadata={"format": "pt"})

    policy = load_policy(tmp_path)

    assert policy.config.tie_word_embeddings is False
    assert torch.equal(policy.lm_head.weight, policy.model.embed_tokens.weight + 1)
