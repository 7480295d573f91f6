"""Bytes of activations, counted from what autograd saves, and predictions of what a trainer needs."""

from __future__ import annotations

import re
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import moe
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from areal_actors.errors import ConfigError
from areal_actors.generation.torch.config import TorchEngineConfig
from areal_actors.generation.torch.engine import plan_engine
from areal_actors.training import layers
from areal_actors.training.config import (
    Activations,
    ComputeDtype,
    GangConfig,
    KlConfig,
    Layout,
    LoraConfig,
    ObjectiveConfig,
    OptimizerConfig,
    OptimizerName,
    TrainerConfig,
)
from areal_actors.training.gang import Gang
from areal_actors.training.layers import cast_weights, layer_memory
from areal_actors.training.lora import Adapter
from areal_actors.training.memory import (
    activation_bytes,
    plan_trainer,
    require_room,
    sketch_model,
)
from areal_actors.training.packing import Segment
from areal_actors.training.passes import Passes
from areal_actors.training.trainer import PolicyTrainer
from areal_actors.training.tree_attention import SEGMENT_ATTENTION, PackMask, has_planned_attention

PARTITIONED = "aot_eager_decomp_partition"
KINDS: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaForCausalLM, LlamaConfig),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config),
}


def kept_bytes(
    kind: str, dtype: torch.dtype, activations: Activations, *, is_compiled: bool = False, **shape: int
) -> float:
    """Bytes that autograd saves for one token and layer of a decoder, weights and embeddings aside."""
    found = {}
    for num_layers, num_tokens in product((1, 2), (64, 128)):
        model_class, config_class = KINDS[kind]
        model = model_class(config_class(num_hidden_layers=num_layers, **shape)).eval()
        if is_compiled:
            model.set_attn_implementation(SEGMENT_ATTENTION)  # which is no part of the compiled graph
        with layer_memory(
            model,
            activations=activations,
            dtype=None if dtype is torch.float32 else dtype,
            is_compiled=is_compiled,
        ):
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
    segment = Segment(start=0, stop=num_tokens, ancestors=np.zeros(0, dtype=np.int64))
    mask = PackMask([segment], torch.device("cpu")) if has_planned_attention(model) else None
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        Passes(gang=Gang.alone(), dtype=dtype).precision("cpu"),
    ):
        hidden = model.get_decoder()(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
    assert hidden.requires_grad
    return sum(storage.nbytes() for storage in seen.values())


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


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    ("kind", "dtype"), [("llama", torch.float32), ("qwen2", torch.bfloat16), ("qwen3", torch.bfloat16)]
)
def test_bytes_of_compiled_layers_are_predicted(monkeypatch, kind, dtype):
    """What is predicted is at least what is saved and at most 8 % more; the product of the gate is computed again."""
    torch.compiler.reset()  # dynamo compiles a function eight times at most
    # Divides forward and backward pass as a GPU's compiler does, and compiles nothing.
    monkeypatch.setattr(layers, "compiled_forward", partial(layers.compiled_forward, backend=PARTITIONED))
    shape = {"vocab_size": 64, "hidden_size": 384, "intermediate_size": 1536, "head_dim": 64}
    shape |= {"num_attention_heads": 8, "num_key_value_heads": 2}
    config = KINDS[kind][1](num_hidden_layers=1, **shape)

    predicted = activation_bytes(config, dtype=dtype, activations=Activations.KEEP, is_compiled=True)
    saved = kept_bytes(kind, dtype, Activations.KEEP, is_compiled=True, **shape)

    assert saved <= predicted <= 1.08 * saved
    assert predicted < 0.65 * activation_bytes(config, dtype=dtype, activations=Activations.KEEP)


@pytest.mark.parametrize(
    ("kind", "dtype", "activations"),
    [
        ("llama", ComputeDtype.FLOAT32, Activations.OFFLOAD),
        ("llama", ComputeDtype.BFLOAT16, Activations.RECOMPUTE),
        (moe.KINDS[0], ComputeDtype.FLOAT32, Activations.RECOMPUTE),
        (moe.KINDS[0], ComputeDtype.BFLOAT16, Activations.OFFLOAD),
    ],
)
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
@pytest.mark.parametrize("num_kept", range(4))
def test_layers_that_keep_and_layers_that_recompute_change_no_bit(num_kept, dtype):
    """Outputs and gradients are those of a pass that keeps everything; the last layers are the ones that keep."""
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 64}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=3, **shape)).eval()
    calls: list[int] = []
    for index, layer in enumerate(model.model.layers):
        layer.input_layernorm.register_forward_pre_hook(lambda *_, index=index: calls.append(index))
    found = []
    for activations, kept in ((Activations.KEEP, 0), (Activations.RECOMPUTE, num_kept)):
        calls.clear()
        with (
            Passes(gang=Gang.alone(), dtype=dtype).precision("cpu"),
            layer_memory(model, activations=activations, num_kept=kept, dtype=dtype),
        ):
            hidden = model.get_decoder()(torch.arange(60).view(2, 30), use_cache=False).last_hidden_state
        hidden.float().square().sum().backward()
        found.append([hidden.detach(), *(weight.grad.clone() for weight in model.model.parameters())])
        model.zero_grad()

    assert [calls.count(index) for index in range(3)] == [2] * (3 - num_kept) + [1] * num_kept
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_pass_leaves_the_model_as_it_was(make_model):
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


def test_auto_keeps_activations_where_they_fit(make_model):
    """``auto`` recomputes if a pass needs more than a third of what the state leaves; a choice is taken as it is."""
    model, config = make_model(), TrainerConfig(dtype=ComputeDtype.FLOAT32)

    def resolve(memory_bytes: int, activations: Activations = Activations.AUTO):
        return plan_trainer(
            model,
            evolve(config, activations=activations),
            device_type="cpu",
            memory_bytes=memory_bytes,
            num_tokens=10,
        )

    kept = resolve(0, Activations.KEEP)
    state = kept.weights + kept.gradients + kept.moments
    assert resolve(state + 3 * kept.activations + 1).kept is Activations.KEEP
    assert resolve(state + 3 * kept.activations - 100).kept is Activations.RECOMPUTE
    assert resolve(100).kept is Activations.RECOMPUTE
    assert PolicyTrainer(make_model(), TrainerConfig()).activations is Activations.KEEP


SEVEN_B = Qwen2Config(
    vocab_size=152064,
    hidden_size=3584,
    intermediate_size=18944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    tie_word_embeddings=False,
)
GB = 1e9


@pytest.fixture(scope="module")
def model():
    return sketch_model(SEVEN_B)


def plan(model, *, memory_bytes=80 * 10**9, num_tokens=4096, free=None, teacher=None, **settings):
    config = TrainerConfig(dtype=ComputeDtype.BFLOAT16, **settings)
    return plan_trainer(
        model,
        config,
        device_type="cuda",
        memory_bytes=memory_bytes,
        num_tokens=num_tokens,
        free=free,
        teacher=teacher,
    )


@pytest.mark.parametrize(
    "less",
    [
        {"activations": Activations.RECOMPUTE},
        {"activations": Activations.OFFLOAD},
        {"optimizer": OptimizerConfig(name=OptimizerName.ADAMW_BF16), "activations": Activations.KEEP},
        {"gang": GangConfig(num_processes=4), "activations": Activations.KEEP},
        {"lora": LoraConfig(), "activations": Activations.KEEP},
    ],
    ids=lambda less: next(iter(less)),
)
def test_settings_that_save_memory_are_predicted_to(model, less):
    """Each of them, against keeping all activations of full training."""
    assert plan(model, **less).total < plan(model, activations=Activations.KEEP).total


@pytest.mark.parametrize("settings", [{"lora": LoraConfig()}, {"gang": GangConfig(num_processes=4)}, {}])
@pytest.mark.parametrize("free", [5, 20, 40, 60, 500])
def test_as_many_layers_keep_their_activations_as_fit(model, settings, free):
    """A tenth of what is free and the temporaries of a pass aside; none if the inputs of all layers do not fit."""
    found = plan(model, num_tokens=16384, free=int(free * GB), **settings)
    kept = plan(model, num_tokens=16384, activations=Activations.KEEP, compile_layers=False, **settings)
    temporaries = kept.temporaries
    if settings == {"gang": GangConfig(num_processes=4)}:  # counted as those of one process, which are more
        temporaries = plan(model, num_tokens=16384, activations=Activations.KEEP, compile_layers=False).temporaries
    layer = (kept.activations - found.activations) // 28
    if not settings:
        layer += 2 * sum(weight.numel() for weight in model.model.layers[0].parameters())  # copies in bfloat16

    def needed(count: int) -> int:
        return found.activations + temporaries + count * layer

    assert found.kept is Activations.AUTO
    assert 0 <= found.num_kept_layers <= 28
    assert needed(found.num_kept_layers) <= 0.9 * free * GB or not found.num_kept_layers
    assert needed(found.num_kept_layers + 1) > 0.9 * free * GB or found.num_kept_layers == 28
    assert plan(model, num_tokens=4096, free=int(free * GB), **settings).num_kept_layers >= found.num_kept_layers


@pytest.mark.parametrize("other", [0, 12 * 10**9])
def test_layers_that_auto_keeps_are_predicted_beside_what_is_held(model, other):
    """None of what they keep is needed, so that it is no part of the total."""
    found = plan(model, lora=LoraConfig(), num_tokens=16384, memory_bytes=80 * 10**9 - other)
    recomputed = plan(model, lora=LoraConfig(), num_tokens=16384, activations=Activations.RECOMPUTE)

    left = 80 * 10**9 - other - found.weights - found.gradients - found.moments
    assert 0 < found.num_kept_layers < SEVEN_B.num_hidden_layers
    assert found.total == recomputed.total == sum(found.parts().values())
    # Before a pass, layers may still turn out not to compile.
    assert plan(model, lora=LoraConfig(), num_tokens=16384, free=left).num_kept_layers < found.num_kept_layers


@pytest.mark.parametrize(
    "kind", [{}, {"lora": LoraConfig(rank=4)}, {"optimizer": OptimizerConfig(name=OptimizerName.ADAMW_BF16)}]
)
def test_trainer_counts_its_state_as_the_planner_does(make_model, kind):
    """The plan has the bytes of the weights, gradients and moments that a trainer holds after an update."""
    config = TrainerConfig(dtype=ComputeDtype.FLOAT32, **kind)
    trainer = PolicyTrainer(make_model(), config)
    found = plan_trainer(make_model(), config, device_type="cpu", memory_bytes=2**50, num_tokens=1)
    trained = [weight for weight in trainer.model.parameters() if weight.requires_grad]
    trainer._optimizer.zero_grad()
    for weight in trained:
        weight.grad = torch.ones_like(weight)
    trainer._optimizer.step()
    moments = [tensor for tensor in trainer._optimizer.state_dict().values() if tensor.ndim]

    assert found.weights == sum(weight.nbytes for weight in trainer.model.parameters())
    assert found.gradients == sum(weight.grad.nbytes for weight in trained)
    assert found.moments == sum(moment.nbytes for moment in moments)


@pytest.mark.parametrize("targets", [("all-linear",), ("q_proj", "v_proj")])
def test_adapters_have_as_many_weights_as_peft_gives_them(targets):
    """They are counted without being created."""
    pytest.importorskip("peft", reason="pip install 'areal_actors[lora]'")
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    lora = LoraConfig(rank=4, target_modules=targets)
    real = AutoModelForCausalLM.from_config(config)
    Adapter.create(real, lora)
    num_trained = sum(weight.numel() for weight in real.parameters() if weight.requires_grad)
    assert plan(sketch_model(config), lora=lora).gradients == 4 * num_trained


def test_adapter_that_the_model_cannot_have_is_refused_before_any_weights_are_read(model):
    """A misspelt target would count as no weights at all."""
    with pytest.raises(ConfigError, match="query_proj"):
        plan(model, lora=LoraConfig(target_modules=("query_proj",)))


def test_adapters_of_stacked_experts_are_counted():
    """Each expert has factors of the whole rank."""
    pytest.importorskip("peft", reason="pip install 'areal_actors[lora]'")
    config = MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    lora = LoraConfig(rank=4, target_modules=("q_proj",), target_parameters=("mlp.experts.gate_up_proj",))
    real = AutoModelForCausalLM.from_config(config)
    Adapter.create(real, lora)
    num_trained = sum(weight.numel() for weight in real.parameters() if weight.requires_grad)
    assert plan(sketch_model(config), lora=lora).gradients == 4 * num_trained


def test_row_that_no_memory_holds_is_refused_with_the_longest_that_fits():
    """The model may take longer rows than the machine."""
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 64}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, max_position_embeddings=10**12, **shape))

    require_room(model, TrainerConfig(), max_length=2048)
    with pytest.raises(ConfigError, match=r"a row of 1,000,000,000 tokens needs [0-9,.]+ GB") as caught:
        require_room(model, TrainerConfig(), max_length=10**9)
    (fitting,) = re.findall(r"Rows of ([0-9,]+) tokens fit: lower engine.max_length", str(caught.value))
    longest = int(fitting.replace(",", ""))
    require_room(model, TrainerConfig(), max_length=longest)
    with pytest.raises(ConfigError, match="a row of"):
        require_room(model, TrainerConfig(), max_length=int(1.2 * longest))


def test_engine_needs_its_weights_and_the_cache_of_all_slots(model):
    """28 layers of 4 heads of 128, keys and values, 2 bytes: 57 kB per token."""
    config = TorchEngineConfig(dtype="bfloat16", max_concurrent=64, max_length=4096)
    found = plan_engine(model, config, device_type="cuda")
    assert found.weights == pytest.approx(15.2 * GB, rel=0.01)
    assert found.cache == 64 * 4096 * 28 * 2 * 4 * 128 * 2
