"""Attention by plan equals attention over the mask, and is what tree packs really use."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.training import tree_attention
from areal_actors.training.batch import TrainingRow
from areal_actors.training.forward import score_pack
from areal_actors.training.packing import build_trie, pack_tree
from areal_actors.training.tree_attention import tree_mask, use_tree_attention

CPU = torch.device("cpu")


class Module(torch.nn.Module):
    """What transformers hands to an attention function."""

    num_key_value_groups = 2
    is_causal = True


@given(
    found=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=6), seed=st.integers(0, 99)
)
def test_the_plan_equals_the_mask(found, seed):
    """Outputs and all gradients agree on random tries with grouped heads."""
    trie = build_trie([np.array(ids, dtype=np.int32) for ids in found], list(range(len(found))))
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn(1, heads, trie.num_nodes, 4, generator=generator, requires_grad=True) for heads in (4, 2, 2)
    )
    planned = tree_mask(trie.segments, CPU)
    plain = planned.clone()

    def results(mask):
        output, _ = tree_attention._tree_attention_forward(Module(), query, key, value, mask, scaling=0.3)
        return output, *torch.autograd.grad(output.square().sum(), (query, key, value))

    assert not hasattr(plain, "tree_plan")
    for ours, theirs in zip(results(planned), results(plain), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_models_attend_by_plan(make_model, make_agent_group, monkeypatch, kind):
    """The plan reaches the attention of real models, and their scores are those of eager attention over the mask."""
    rows = [
        TrainingRow(trajectory=episode.trajectories[0], advantages=np.ones(episode.trajectories[0].num_tokens))
        for episode in make_agent_group(0).episodes
    ]
    (pack,) = pack_tree(rows, range(len(rows)), max_tokens=1000)
    model = make_model(kind).eval()
    model.set_attn_implementation("eager")
    expected = score_pack(model, pack)

    model.set_attn_implementation("sdpa")
    use_tree_attention(model)
    monkeypatch.setattr(tree_attention, "sdpa_attention_forward", None)
    found = score_pack(model, pack)

    assert torch.allclose(expected.logprobs, found.logprobs, atol=1e-4)


def test_eager_models_keep_their_attention(make_model):
    """Only sdpa is replaced: what somebody chose on purpose stays."""
    model = make_model()
    model.set_attn_implementation("eager")

    use_tree_attention(model)

    assert model.config._attn_implementation == "eager"
