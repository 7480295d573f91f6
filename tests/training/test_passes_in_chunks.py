"""A pass in chunks has the loss and the gradients of the whole pass, with the memory of a chunk."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from tests.training.test_packing import batches, past_of
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import flex_attention as torch_flex

from areal_actors.errors import ConfigError
from areal_actors.training.batch import Batch, TrainingRow
from areal_actors.training.config import (
    Activations,
    Aggregation,
    CaptureConfig,
    ComputeDtype,
    ObjectiveConfig,
    Surrogate,
    TrainerConfig,
)
from areal_actors.training.gang import Gang
from areal_actors.training.model_checks import plan_attention, require_chunk_support
from areal_actors.training.objective import create_objective
from areal_actors.training.packing import pack_flat, pack_tree, visible
from areal_actors.training.passes import Passes, Scorer, split_pack
from areal_actors.training.trainer import PolicyTrainer
from areal_actors.training.tree_attention import BLOCK_ATTENTION, SEGMENT_ATTENTION

OBJECTIVE = create_objective(ObjectiveConfig(surrogate=Surrogate.GSPO, entropy_coefficient=0.1), num_updates=1)
"""Ratios of whole rows, which no chunk has, and a gradient of the entropy."""


@pytest.fixture(scope="module", autouse=True)
def _flex_attention_trains_on_cpu():
    """See ``test_tree_attention.py``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_flex, "_validate_device", lambda *_: None)
        yield


@given(data=st.data(), size=st.integers(1, 12))
@pytest.mark.parametrize("pack", [pack_flat, pack_tree])
def test_a_chunk_attends_to_what_its_tokens_see(make_row, data, size, pack):
    """The prefix and the chunk itself, in the order of its positions, hold the past of each trained token."""
    rows = data.draw(batches(make_row))

    for whole in pack(rows, range(len(rows)), max_tokens=40):
        chunks = split_pack(whole, size)
        assert sorted(np.concatenate([chunk.trained for chunk in chunks])) == list(range(len(whole.targets)))
        for index, chunk in enumerate(chunks):
            positions = [np.arange(part * size, (part + 1) * size) for part in (*chunk.prefix, index)]
            ids = whole.input_ids[0, np.concatenate(positions)[: chunk.pack.segments[-1].stop]]
            seen = visible(chunk.pack.segments)
            first = chunk.pack.segments[0].start
            for source, target, token in zip(chunk.pack.sources, chunk.pack.targets, chunk.trained, strict=True):
                assert ids[seen[first + source]].tolist() == past_of(whole, whole.sources[token])
                assert target == whole.targets[token]


def long_rows(make_row, *, prompt, branch, num_branches):
    """Rows that share a prompt, of which each trains its branch."""
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 61, prompt)
    rows = [
        make_row(np.append(shared, rng.integers(0, 61, branch)), np.repeat([0, 1], [prompt, branch]))
        for _ in range(num_branches)
    ]
    return [
        TrainingRow(trajectory=row, advantages=np.full(prompt + branch, 0.5 - index), episode=index)
        for index, row in enumerate(rows)
    ]


def accumulated(model, rows, pack, *, chunk_tokens, dtype=torch.float32, activations=Activations.KEEP):
    """Loss, scores and gradients of an update."""
    batch = Batch.create(rows, aggregation=Aggregation.TOKEN_MEAN, fixed_length=None)
    packs = pack(rows, range(len(rows)), max_tokens=10_000)
    passes = Passes(gang=Gang.alone(), dtype=dtype, chunk_tokens=chunk_tokens)
    model.zero_grad()
    scorer = Scorer(model)
    scorer.activations = activations
    found = passes.accumulate(scorer, OBJECTIVE, batch, packs)
    return found, {name: weight.grad.clone() for name, weight in model.named_parameters()}


def assert_same(found, expected, *, tolerance):
    assert found[0].loss == pytest.approx(expected[0].loss, rel=tolerance)
    for ours, theirs in zip(found[0].scores, expected[0].scores, strict=True):
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, rtol=tolerance, atol=tolerance)
    for name, gradient in expected[1].items():
        assert (found[1][name] - gradient).norm() <= tolerance * gradient.norm(), name


@pytest.mark.parametrize("activations", [Activations.KEEP, Activations.RECOMPUTE])
@pytest.mark.parametrize(("pack", "num_branches"), [(pack_flat, 1), (pack_flat, 3), (pack_tree, 3)])
def test_chunks_have_the_gradients_of_the_whole(make_model, make_row, activations, pack, num_branches):
    """A single row, rows one after another and branches, with kept and recomputed layers."""
    rows = long_rows(make_row, prompt=23, branch=14, num_branches=num_branches)
    model = make_model("qwen2").eval()
    model.set_attn_implementation(SEGMENT_ATTENTION)
    expected = accumulated(model, rows, pack, chunk_tokens=None)

    for chunk_tokens in (4, 17):
        found = accumulated(model, rows, pack, chunk_tokens=chunk_tokens, activations=activations)
        assert_same(found, expected, tolerance=1e-5)


def test_chunks_attend_by_block(make_model, make_row):
    """As on a GPU, where chunks are whole blocks; each attends to those of its own branch only."""
    rows = long_rows(make_row, prompt=270, branch=140, num_branches=2)
    model = make_model().eval()
    model.set_attn_implementation(SEGMENT_ATTENTION)
    expected = accumulated(model, rows, pack_tree, chunk_tokens=None)

    model.set_attn_implementation(BLOCK_ATTENTION)

    assert_same(accumulated(model, rows, pack_tree, chunk_tokens=200), expected, tolerance=1e-5)


def test_models_with_attention_of_their_own_are_refused(make_model):
    """Before the first step, with the attention's name."""
    model = make_model()
    model.set_attn_implementation("eager")

    with pytest.raises(ConfigError, match="LlamaForCausalLM with eager attention cannot be computed in chunks"):
        PolicyTrainer(model, TrainerConfig(chunk_tokens=64))


def test_layers_that_do_not_know_their_index_are_refused(make_model):
    """Their keys and values could not be told apart: the trial finds other scores."""
    model = make_model().eval()
    plan_attention(model)
    require_chunk_support(model)
    for layer in model.model.layers:
        del layer.self_attn.layer_idx

    with pytest.raises(ConfigError, match="chunk_tokens"):
        require_chunk_support(model)


def test_a_trainer_steps_in_chunks(make_model, make_agent_group):
    """Statistics and weights of a step equal those of whole passes."""
    config = TrainerConfig(dtype=ComputeDtype.FLOAT32, capture=CaptureConfig(enabled=False))
    steps = []
    for chunk_tokens in (None, 8):
        trainer = PolicyTrainer(make_model(), evolve(config, chunk_tokens=chunk_tokens))
        statistics = trainer.train_step([make_agent_group(0), make_agent_group(1)])
        steps.append((statistics.grad_norm, statistics.loss, statistics.num_packed_tokens))

    assert steps[1] == pytest.approx(steps[0], rel=1e-5)


def test_chunks_keep_the_activations_of_one(make_model, make_row):
    """What autograd keeps at a time is that of a chunk, the keys and values that it attends to, and its mask."""
    (row,) = long_rows(make_row, prompt=24, branch=1000, num_branches=1)
    model = make_model().eval()
    model.set_attn_implementation(SEGMENT_ATTENTION)
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}

    def most_kept(chunk_tokens):
        kept, most = {}, 0

        def pack(tensor):
            nonlocal most
            storage = tensor.untyped_storage()
            if storage.data_ptr() in weights:
                return tensor
            kept[id(storage)] = storage.nbytes()
            most = max(most, sum(kept.values()))
            return tensor

        class Counting(Scorer):
            def forward(self, *args):
                kept.clear()  # the graph of the call before is gone
                return super().forward(*args)

        passes = Passes(gang=Gang.alone(), dtype=torch.float32, chunk_tokens=chunk_tokens)
        batch = Batch.create([row], aggregation=Aggregation.TOKEN_MEAN, fixed_length=None)
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            passes.accumulate(Counting(model), OBJECTIVE, batch, pack_flat([row], [0], max_tokens=10_000))
        return most

    config = model.config
    width = 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * config.hidden_size
    keys_and_values = 1023 * width // config.num_attention_heads
    mask = 4 * 128 * 1023
    assert most_kept(128) <= most_kept(None) / 7 + keys_and_values + mask
