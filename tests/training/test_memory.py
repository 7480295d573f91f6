"""What a forward pass keeps for the backward pass: counted from what autograd saves."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import moe
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from areal_actors.training.config import Activations, ComputeDtype, KlConfig, Layout, ObjectiveConfig, TrainerConfig
from areal_actors.training.gang import Gang
from areal_actors.training.memory import (
    activation_bytes,
    cast_weights,
    count_kept_layers,
    layer_memory,
    num_kept_layers,
    resolve_activations,
)
from areal_actors.training.passes import Passes
from areal_actors.training.trainer import PolicyTrainer

QWEN2_7B = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 64,
}
KINDS: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaForCausalLM, LlamaConfig),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config),
}


def kept_bytes(kind: str, dtype: torch.dtype, activations: Activations, **shape: int) -> float:
    """Bytes that autograd saves for one token and layer of a decoder, weights and embeddings aside."""
    found = {}
    for num_layers, num_tokens in product((1, 2), (64, 128)):
        model_class, config_class = KINDS[kind]
        model = model_class(config_class(num_hidden_layers=num_layers, **shape)).eval()
        with layer_memory(model, activations=activations, dtype=None if dtype is torch.float32 else dtype):
            found[num_layers, num_tokens] = _saved_bytes(model, dtype, num_tokens)
    return ((found[2, 128] - found[2, 64]) - (found[1, 128] - found[1, 64])) / 64


def _saved_bytes(model: Any, dtype: torch.dtype, num_tokens: int) -> int:
    own = {weight.untyped_storage()._cdata for weight in model.parameters()}
    seen: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            seen[storage._cdata] = storage
        return tensor

    ids = torch.zeros((1, num_tokens), dtype=torch.int64)
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        Passes(gang=Gang.alone(), dtype=dtype)._precision("cpu"),
    ):
        hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    assert hidden.requires_grad
    return sum(storage.nbytes() for storage in seen.values())


def test_a_layer_of_a_7b_model_keeps_its_input_alone():
    """20 kB for each token at most if it recomputes; without, it is 225 kB."""
    with FakeTensorMode():  # shapes without memory: a layer has 233 million weights
        recomputed = kept_bytes("qwen2", torch.bfloat16, Activations.RECOMPUTE, **QWEN2_7B)
    config = Qwen2Config(num_hidden_layers=1, **QWEN2_7B)

    assert recomputed <= 20_000
    assert 225 == activation_bytes(config, dtype=torch.bfloat16, activations=Activations.KEEP) // 1000


@settings(max_examples=8)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    activations=st.sampled_from([Activations.KEEP, Activations.RECOMPUTE]),
    heads=st.sampled_from([(4, 4), (8, 2), (16, 4)]),
    widths=st.tuples(*map(st.sampled_from, [(256, 384, 1024), (256, 1024, 1536), (32, 64)])),
)
def test_bytes_are_predicted_from_the_configuration(kind, dtype, activations, heads, widths):
    """Within 2 % of the saved tensors, for any shape."""
    names = ("num_attention_heads", "num_key_value_heads", "hidden_size", "intermediate_size", "head_dim")
    shape = {"vocab_size": 64, **dict(zip(names, (*heads, *widths), strict=True))}
    config = KINDS[kind][1](num_hidden_layers=1, **shape)

    predicted = activation_bytes(config, dtype=dtype, activations=activations)

    assert predicted == pytest.approx(kept_bytes(kind, dtype, activations, **shape), rel=0.02)


@pytest.mark.parametrize("activations", [Activations.RECOMPUTE, Activations.OFFLOAD])
@pytest.mark.parametrize("dtype", [ComputeDtype.FLOAT32, ComputeDtype.BFLOAT16])
@pytest.mark.parametrize("kind", ["llama", moe.KINDS[0]])
def test_recomputed_activations_change_no_bit(make_model, make_agent_group, kind, dtype, activations):
    """Losses, weights after two steps, and names of weights are those of a trainer that keeps everything."""
    config = TrainerConfig(dtype=dtype, activations=Activations.KEEP)
    groups = [make_agent_group(seed) for seed in range(2)]
    one, other = (
        PolicyTrainer(make_model(kind), evolve(config, activations=chosen))
        for chosen in (Activations.KEEP, activations)
    )

    for _ in range(2):
        assert one.train_step(groups).loss == other.train_step(groups).loss

    assert list(dict(one.model.named_parameters())) == list(dict(other.model.named_parameters()))
    expected = one.state_dict()
    assert list(expected) == list(other.state_dict())
    assert all(torch.equal(weight, expected[name]) for name, weight in other.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_kept", [1, 2, 3])
def test_layers_that_keep_and_layers_that_recompute_change_no_bit(num_kept, dtype):
    """Outputs and gradients are those of a pass that keeps everything; the last layers are the ones that keep."""
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 64}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=3, **shape)).eval()
    ids = torch.arange(60).view(2, 30)
    found = []
    for activations, kept in ((Activations.KEEP, 0), (Activations.RECOMPUTE, num_kept)):
        calls = [0] * 3
        norms = [layer.input_layernorm for layer in model.model.layers]
        hooks = [norm.register_forward_pre_hook(_counter(calls, index)) for index, norm in enumerate(norms)]
        with (
            Passes(gang=Gang.alone(), dtype=dtype)._precision("cpu"),
            layer_memory(model, activations=activations, num_kept=kept, dtype=dtype),
        ):
            hidden = model.get_decoder()(ids, use_cache=False).last_hidden_state
        hidden.float().square().sum().backward()
        found.append([hidden.detach(), *(weight.grad.clone() for weight in model.model.parameters())])
        model.zero_grad()
        for hook in hooks:
            hook.remove()

    assert calls == [2] * (3 - num_kept) + [1] * num_kept
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def _counter(calls: list[int], index: int) -> Any:
    def count(*_: Any) -> None:
        calls[index] += 1

    return count


@given(
    num_layers=st.integers(1, 80),
    recomputed=st.integers(1, 10**9),
    more=st.integers(1, 10**10),
    free=st.integers(-(10**10), 10**12),
)
def test_as_many_layers_keep_their_activations_as_fit(num_layers, recomputed, more, free):
    """The layers fit together, and one more would not; none if the inputs alone do not fit."""
    kept = num_kept_layers(
        num_layers=num_layers, kept_bytes=recomputed + more, recomputed_bytes=recomputed, free_bytes=free
    )

    def needed(count: int) -> int:
        return num_layers * recomputed + count * more

    assert 0 <= kept <= num_layers
    assert needed(kept) <= free or not kept
    assert needed(kept + 1) > free or kept == num_layers


def test_a_smaller_pass_keeps_more_layers():
    """A few tokens fit into any machine that runs this, and a petabyte of activations into none."""
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 64}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=4, **shape))
    counts = [
        count_kept_layers(model, dtype=torch.bfloat16, num_tokens=num_tokens, is_sharded=False)
        for num_tokens in (1, 10**10)
    ]
    assert counts == [4, 0]


def test_a_scorer_that_decides_by_free_memory_changes_no_bit(make_model, make_agent_group):
    """Losses and weights are those of a trainer that keeps everything."""
    config = TrainerConfig(activations=Activations.KEEP)
    one, other = (PolicyTrainer(make_model(), config) for _ in range(2))
    other._scorer.activations = Activations.AUTO  # as on a GPU

    assert one.train_step([make_agent_group(0)]).loss == other.train_step([make_agent_group(0)]).loss
    assert all(torch.equal(weight, other.state_dict()[name]) for name, weight in one.state_dict().items())


def test_a_pass_leaves_the_model_as_it_was(make_model):
    """The engine copies the trainer's model between passes: nothing of a pass may follow it."""
    model = make_model()
    before = [dict(part.__dict__) for part in model.modules()]
    ids = torch.arange(5)[None]

    with layer_memory(model, activations=Activations.RECOMPUTE, dtype=torch.bfloat16):
        hidden = model.get_decoder()(ids, use_cache=False).last_hidden_state
    hidden.sum().backward()

    assert hidden.dtype is torch.bfloat16
    assert all(weight.dtype is torch.float32 for weight in model.parameters())
    assert all(weight.grad is not None for weight in model.get_decoder().parameters())
    assert before == [dict(part.__dict__) for part in model.modules()]


def test_bfloat16_passes_are_those_of_a_bfloat16_model(make_model, make_agent_group):
    """Log-probabilities are those of the model cast as an engine casts it, and equal weights have distance 0."""
    model, cast = make_model(), make_model()
    cast_weights(cast, torch.bfloat16)
    kl = evolve(ObjectiveConfig(), kl=KlConfig(coefficient=0.1))
    trainer = PolicyTrainer(
        model, TrainerConfig(dtype=ComputeDtype.BFLOAT16, objective=kl, layout=Layout.FLAT), reference=make_model()
    )
    group = make_agent_group(0)
    row = group.episodes[0].trajectories[0]

    with torch.no_grad():
        logits = cast(torch.tensor(row.input_ids.astype(int))[None]).logits[0, :-1].float()
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(row.input_ids[1:].astype(int))[:, None]).squeeze(-1)
    found = trainer.logprobs([row])[0][1:]

    mask = row.loss_mask[1:] == 1
    np.testing.assert_allclose(found[mask], expected.numpy()[mask], atol=1e-6)
    assert 0.0 == trainer.train_step([group]).reference_kl


def test_activations_are_kept_where_they_fit(make_model):
    """``auto`` recomputes if a pass needs more than a third of what the state leaves; a choice is taken as it is."""
    config = make_model().config
    kept = activation_bytes(config, dtype=torch.float32, activations=Activations.KEEP)

    def resolve(asked: Activations, memory_bytes: int) -> Activations:
        return resolve_activations(
            asked, config, dtype=torch.float32, num_tokens=10, state_bytes=500, memory_bytes=memory_bytes
        )

    assert resolve(Activations.AUTO, 30 * kept + 501) is Activations.KEEP
    assert resolve(Activations.AUTO, 30 * kept + 400) is Activations.RECOMPUTE
    assert resolve(Activations.AUTO, 100) is Activations.RECOMPUTE
    assert resolve(Activations.KEEP, 100) is Activations.KEEP
    assert PolicyTrainer(make_model(), TrainerConfig()).activations is Activations.KEEP
