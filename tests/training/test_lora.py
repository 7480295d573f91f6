"""Adapters: what is trained, merged, published, saved, resumed and refused."""

from __future__ import annotations

import copy
import json
import warnings

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests import moe
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from areal_actors.errors import CheckpointError, ConfigError
from areal_actors.generation.torch.forward import load_snapshot
from areal_actors.training.config import (
    ComputeDtype,
    KlConfig,
    KlPlace,
    LoraConfig,
    ObjectiveConfig,
    OptimizerConfig,
    TrainerConfig,
)
from areal_actors.training.lora import Adapter
from areal_actors.training.publication import AdapterPublisher, MemoryPublisher
from areal_actors.training.trainer import PolicyTrainer
from areal_actors.training.weights import export_model

LORA = LoraConfig(rank=4, alpha=8)
PLAIN = TrainerConfig(
    dtype=ComputeDtype.FLOAT32, lora=LORA, optimizer=OptimizerConfig(max_grad_norm=None, learning_rate=1e-2)
)
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def create_model(make_model, kind: str):
    """A tiny model, its Qwen3 tied or untied."""
    if not kind.startswith("qwen3-"):
        return make_model(kind).eval()
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=61, initializer_range=0.2, tie_word_embeddings=kind == "qwen3-tied", **shape, **heads
    )
    return Qwen3ForCausalLM(config).eval()


def move(adapter: Adapter, scale: float = 0.05) -> None:
    """Give the adapter random factors."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for factor in adapter.parameters().values():
            factor.add_(torch.randn(factor.shape, generator=generator) * scale)


@torch.no_grad()
def logits(model):
    return model(input_ids=torch.arange(20)[None]).logits


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3-tied", "qwen3-untied", *moe.KINDS])
def test_the_adapter_is_pefts(make_model, kind, tmp_path):
    """The model with it, with merged weights, and as peft loads the saved directory, computes the same; bases stay."""
    peft = pytest.importorskip("peft")
    base = create_model(make_model, kind)
    model, config = copy.deepcopy(base), evolve(LORA, target_parameters=EXPERTS if kind in moe.KINDS else ())
    before = copy.deepcopy(base.state_dict())

    adapter = Adapter.create(model, config)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained == list(adapter.parameters())
    assert torch.equal(logits(model), logits(base))
    move(adapter)

    merged = copy.deepcopy(base)
    merged.load_state_dict(dict(adapter.merge(model.state_dict())))
    assert (logits(model) - logits(base)).abs().max() > 0.1
    torch.testing.assert_close(logits(merged), logits(model), atol=2e-5, rtol=0)
    with adapter.disabled():
        assert torch.equal(logits(model), logits(base))
    adapter.save(tmp_path / "adapter")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a deprecation between peft and transformers
        loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "adapter").eval()
        assert torch.equal(logits(loaded), logits(model))
        theirs = loaded.merge_and_unload().state_dict()
    ours = adapter.merge(model.state_dict())
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)
    kept = {
        name.replace(".base_layer", ""): tensor for name, tensor in model.state_dict().items() if "lora" not in name
    }
    assert all(torch.equal(kept[name], before[name]) for name in before)


@settings(max_examples=25, deadline=None)
@given(rank=st.integers(1, 9), alpha=st.floats(0.5, 64), scale=st.floats(0, 1), seed=st.integers(0, 99))
def test_merging_is_the_sum_of_products(make_model, rank, alpha, scale, seed):
    """Each merged weight is ``W + alpha / rank * B A``, and reading it changes nothing."""
    model = make_model("llama", seed=seed)
    adapter = Adapter.create(model, LoraConfig(rank=rank, alpha=alpha, target_modules=("q_proj", "down_proj")))
    move(adapter, scale)
    state = model.state_dict()
    before = {name: tensor.clone() for name, tensor in state.items()}
    merged = adapter.merge(state)
    for name, tensor in dict(merged).items():
        stem = name.removesuffix(".weight")
        a, b = (state.get(f"{stem}.lora_{side}.default.weight") for side in "AB")
        if a is None:
            assert name in state
            assert tensor.data_ptr() == state[name].data_ptr()
            continue
        expected = state[f"{stem}.base_layer.weight"].double() + alpha / rank * (b.double() @ a.double())
        torch.testing.assert_close(tensor.double(), expected, atol=1e-5 * (1 + scale**2 * alpha), rtol=1e-5)
    assert len(merged) == len(dict(merged))
    assert all(torch.equal(state[name], before[name]) for name in state)


def test_only_the_adapter_learns(make_model, make_agent_group):
    """A step changes factors and nothing else; gradients of a frozen head are not computed; two runs are equal."""
    groups = [make_agent_group(seed) for seed in range(3)]
    first, second = (PolicyTrainer(make_model("qwen2"), PLAIN) for _ in range(2))
    before = {name: tensor.clone() for name, tensor in first.model.state_dict().items()}
    for _ in range(2):
        statistics = first.train_step(groups)
        assert second.train_step(groups).loss == statistics.loss
    changed = {name for name, tensor in first.model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == set(first.adapter.parameters())
    assert first._optimizer.state_dict().keys() == {
        f"{what}/{name}" for name in changed for what in ("exp_avg", "exp_avg_sq", "step")
    }


def test_the_gradient_is_that_of_full_training(make_model, make_agent_group):
    """dL/dB is alpha / rank * dL/dW A^T, with dL/dW of full training of the merged weights."""
    groups = [make_agent_group(seed) for seed in range(2)]
    found = {}

    def gradients(trainer):
        update, found = trainer._optimizer.step, {}

        def step():
            found.update({n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None})
            return update()

        trainer._optimizer.step = step
        trainer.train_step(groups)
        return found

    lora = PolicyTrainer(make_model("qwen2"), PLAIN)
    move(lora.adapter)
    merged = make_model("qwen2")
    merged.load_state_dict(dict(lora.state_dict()))
    factors = {name: factor.detach().clone() for name, factor in lora.adapter.parameters().items()}
    found, full = gradients(lora), gradients(PolicyTrainer(merged, evolve(PLAIN, lora=None)))
    for name, gradient in found.items():
        stem, _, side = name.removesuffix(".default.weight").rpartition(".lora_")
        whole = full[f"{stem}.weight"]
        a, b = (factors[f"{stem}.lora_{factor}.default.weight"] for factor in "AB")
        expected = 2 * (whole @ a.T if side == "B" else b.T @ whole)
        torch.testing.assert_close(gradient, expected, atol=1e-5 * float(expected.abs().max() + 1), rtol=1e-4)


def test_the_reference_is_the_base(make_model, make_agent_group):
    """KL penalties without a reference model compare with the model without its adapter."""
    config = evolve(PLAIN, objective=ObjectiveConfig(kl=KlConfig(coefficient=0.1)))
    groups = [make_agent_group(seed) for seed in range(2)]
    own, given_one = (PolicyTrainer(make_model(), config, reference=model) for model in (None, make_model()))
    for trainer in (own, given_one):
        move(trainer.adapter)
    first, second = own.train_step(groups), given_one.train_step(groups)
    assert first.reference_kl > 0
    assert first.loss == pytest.approx(second.loss, abs=1e-6)
    assert first.reference_kl == pytest.approx(second.reference_kl, rel=1e-5)


@pytest.mark.parametrize("place", list(KlPlace))
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_reference_is_the_policy_at_the_start_of_the_run(make_model, make_agent_group, tmp_path, kind, place):
    """A run that starts from an adapter begins with a distance of 0; after it was resumed, too, the start counts."""
    lora = evolve(LORA, target_parameters=EXPERTS if kind == "mixtral" else ())
    first = PolicyTrainer(make_model(kind), evolve(PLAIN, lora=lora))
    move(first.adapter)
    first.adapter.save(tmp_path / "adapter")
    config = evolve(
        PLAIN,
        lora=evolve(lora, path=tmp_path / "adapter"),
        objective=ObjectiveConfig(kl=KlConfig(coefficient=0.1, place=place)),
    )
    groups = [make_agent_group(seed) for seed in range(2)]
    whole = PolicyTrainer(make_model(kind), config)
    start = copy.deepcopy(whole.adapter.parameters())

    distances = [whole.train_step(groups).reference_kl]
    whole.save(tmp_path / "checkpoints")
    resumed = PolicyTrainer(make_model(kind), config)
    resumed.restore(tmp_path / "checkpoints")
    distances += [trainer.train_step(groups).reference_kl for trainer in (whole, resumed)]

    assert distances[0] == pytest.approx(0, abs=1e-6)
    assert 1e-6 < distances[1] == pytest.approx(distances[2], rel=1e-4)
    with resumed.adapter.at_start():
        assert all(torch.equal(start[name], now) for name, now in resumed.adapter.parameters().items())
    assert not any("start" in name for name in resumed.state_dict())


def test_frozen_weights_have_the_dtype_of_the_passes(make_model, make_agent_group):
    """In bfloat16 the base needs half the memory; factors, their moments and vectors stay in float32."""
    groups = [make_agent_group(seed) for seed in range(2)]
    model = make_model("qwen2")
    trainer = PolicyTrainer(model, evolve(PLAIN, dtype=ComputeDtype.BFLOAT16))
    dtypes = {name: parameter.dtype for name, parameter in trainer.model.named_parameters()}
    assert dtypes["model.layers.0.self_attn.q_proj.base_layer.weight"] is torch.bfloat16
    assert {dtypes[name] for name in trainer.adapter.parameters()} == {torch.float32}
    exact = PolicyTrainer(make_model("qwen2"), PLAIN)
    rows = [row for group in groups for episode in group.episodes for row in episode.trajectories]
    for ours, theirs in zip(trainer.logprobs(rows), exact.logprobs(rows), strict=True):
        assert np.abs(ours - theirs).max() < 0.3
    assert np.isfinite(trainer.train_step(groups).loss)
    merged = trainer.state_dict()
    assert merged["model.layers.0.self_attn.q_proj.weight"].dtype is torch.float32


# ---------------------------------------------------------------------------------------- what is kept on disk


def test_resume_is_exact_and_small(make_model, make_agent_group, tmp_path):
    """A checkpoint has the adapter and its moments only; a resumed run makes the same steps, bit for bit."""
    steps = [[make_agent_group(10 * step + seed) for seed in range(2)] for step in range(4)]
    whole, first = (PolicyTrainer(make_model(), PLAIN) for _ in range(2))
    losses = [whole.train_step(groups).loss for groups in steps]
    for groups in steps[:2]:
        first.train_step(groups)
    saved = first.save(tmp_path, counters={"position": 3})
    assert {path.name for path in saved.path.iterdir()} == {
        *("adapter_model.safetensors", "adapter_config.json", "base_model.json"),
        *("optimizer.safetensors", "rng.safetensors", "checkpoint.json"),
    }
    assert sum(tensor.numel() for tensor in saved.load("adapter_model").values()) == sum(
        factor.numel() for factor in first.adapter.parameters().values()
    )
    torch.manual_seed(5)
    resumed = PolicyTrainer(make_model(), evolve(PLAIN, seed=7))
    assert resumed.restore(tmp_path) == {"position": 3}
    resumed.config = PLAIN
    assert [resumed.train_step(groups).loss for groups in steps[2:]] == losses[2:]
    for name, factor in resumed.adapter.parameters().items():
        assert torch.equal(factor, whole.adapter.parameters()[name])


def test_exports_merged_weights_that_transformers_loads(make_model, tmp_path):
    """The merged directory is one of the plain architecture."""
    for kind in ("llama", "qwen2", "mixtral"):
        model = make_model(kind).eval()
        adapter = Adapter.create(model, evolve(LORA, target_parameters=EXPERTS if kind == "mixtral" else ()))
        move(adapter)
        export_model(model, tmp_path / kind, state=adapter.merge(model.state_dict()))
        loaded, report = type(model).from_pretrained(tmp_path / kind, output_loading_info=True)
        assert not report["missing_keys"]
        assert not report["unexpected_keys"]
        torch.testing.assert_close(logits(loaded.eval()), logits(model), atol=2e-5, rtol=0)


def test_publishes_merged_or_adapter(make_model, tmp_path):
    """An engine in this process gets merged weights; servers get a directory of a few kilobytes next to the base."""
    trainer = PolicyTrainer(make_model(), PLAIN)
    move(trainer.adapter)
    lent = MemoryPublisher().publish(trainer)
    assert lent.state.keys() == make_model().state_dict().keys()
    engine = make_model(seed=1)
    load_snapshot(lent, dict(engine.named_parameters()), {"lm_head.weight": "model.embed_tokens.weight"})
    assert all(torch.equal(tensor, lent.state[name]) for name, tensor in engine.state_dict().items())
    publisher = AdapterPublisher(root=tmp_path, base=tmp_path / "base", num_kept=1)
    for version in range(4):
        trainer.version = version
        snapshot = publisher.publish(trainer)
    assert (snapshot.version, snapshot.path) == (3, tmp_path / "base")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter-00000002", "adapter-00000003"]
    settings = json.loads((snapshot.adapter / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["peft_type"]) == (4, 8, "LORA")


def test_starts_from_an_adapter(make_model, tmp_path):
    """``path`` continues from an adapter, also from one that peft has written."""
    first = PolicyTrainer(make_model(), PLAIN)
    move(first.adapter)
    first.adapter.save(tmp_path / "ours")
    second = PolicyTrainer(make_model(), evolve(PLAIN, lora=evolve(LORA, path=tmp_path / "ours")))
    assert torch.equal(logits(second.model), logits(first.model))
    (tmp_path / "ours" / "base_model.json").unlink()  # which peft does not write
    third = PolicyTrainer(make_model(), evolve(PLAIN, lora=evolve(LORA, path=tmp_path / "ours")))
    assert torch.equal(logits(third.model), logits(first.model))


# -------------------------------------------------------------------------------------------------- bad input


def refusal(model, **changes) -> str:
    """The error of a configuration, after which the model is what it was."""
    before = set(model.state_dict())
    with pytest.raises(ConfigError) as found:
        Adapter.create(model, evolve(LORA, **changes))
    if "path" not in changes:
        assert set(model.state_dict()) == before
    return str(found.value)


def test_unknown_targets_name_the_nearest(make_model):
    """Modules and parameters that do not exist, and embeddings and heads, which cannot have an adapter."""
    assert "did you mean q_proj" in refusal(make_model(), target_modules=("q_prj", "v_proj"))
    assert "It has down_proj" in refusal(make_model(), target_modules=("c_attn",))
    assert "has no 'lm_head'" in refusal(make_model("qwen2"), target_modules=("lm_head",))
    told = refusal(make_model("mixtral"), target_parameters=("mlp.experts.gate_proj",))
    assert "did you mean mlp.experts.gate_up_proj" in told
    assert "It has none" in refusal(make_model(), target_parameters=("experts.gate_up_proj",))


def create_gated(kind: str):
    """A small model with layers that are narrower than a head: gates of experts, of heads and of states."""
    shape = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    experts = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    shared = {"shared_expert_intermediate_size": 16}
    torch.manual_seed(0)
    if kind == "qwen2_moe":
        return Qwen2MoeForCausalLM(Qwen2MoeConfig(**shape, **heads, **experts, **shared))
    linear = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16}
    linear |= {"linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"], "head_dim": 16}
    return Qwen3NextForCausalLM(Qwen3NextConfig(**shape, **heads, **experts, **shared, **linear))


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")  # of peft, about other families
@pytest.mark.parametrize(
    ("kind", "gates"), [("qwen2_moe", "shared_expert_gate"), ("qwen3_next", "in_proj_ba, shared_expert_gate")]
)
def test_gates_have_no_adapter_unless_they_are_named(caplog, kind, gates):
    """All linear layers but those narrower than a head, and the log says which."""
    model = create_gated(kind)
    caplog.set_level("INFO")
    adapter = Adapter.create(model, LORA)
    adapted = {name.split(".lora_")[0].rpartition(".")[2] for name in adapter.parameters()}

    assert adapted.isdisjoint(gates.split(", "))
    assert {"q_proj", "o_proj"} <= adapted
    assert gates in caplog.text
    named = Adapter.create(create_gated(kind), evolve(LORA, target_modules=("shared_expert_gate",)))
    assert all("shared_expert_gate" in name for name in named.parameters())


def test_model_without_linear_layers_is_refused():
    """GPT-2 has convolutions of width one in their place."""
    model = GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=64))
    with pytest.raises(ConfigError, match="GPT2LMHeadModel has no linear layers"):
        Adapter.create(model, LORA)


def test_adapters_of_other_bases_are_refused(make_model, tmp_path):
    """Another model, other weights of the same shape, another rank, alpha or target, and no adapter at all."""
    first = Adapter.create(make_model(), LORA)
    first.save(tmp_path / "a")
    assert "base model" in refusal(make_model(seed=1), path=tmp_path / "a")
    assert "base model" in refusal(make_model("qwen2"), path=tmp_path / "a")
    assert "trainer.lora.rank is 8" in refusal(make_model(), path=tmp_path / "a", rank=8)
    assert "trainer.lora.alpha is 9" in refusal(make_model(), path=tmp_path / "a", alpha=9)
    assert "tensors differ" in refusal(make_model(), path=tmp_path / "a", target_modules=("q_proj",))
    assert "cannot be read" in refusal(make_model(), path=tmp_path / "nothing")
    document = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    (tmp_path / "a" / "base_model.json").unlink()
    other = document | {"base_model_name_or_path": "somewhere/other-7B"}
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(other))
    assert "other-7B" in refusal(make_model(), path=tmp_path / "a")
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(document | {"use_dora": True}))
    assert "use_dora" in refusal(make_model(), path=tmp_path / "a")


def test_a_broken_file_changes_nothing(make_model, tmp_path):
    """An adapter with one tensor of another shape is refused before the first one is copied."""
    adapter = Adapter.create(make_model(), LORA)
    adapter.save(tmp_path / "a")
    tensors = load_file(tmp_path / "a" / "adapter_model.safetensors")
    last = max(tensors)
    save_file(
        {name: tensor[:1].clone() if name == last else tensor + 1 for name, tensor in tensors.items()},
        tmp_path / "a" / "adapter_model.safetensors",
    )
    before = {name: factor.clone() for name, factor in adapter.parameters().items()}
    with pytest.raises(CheckpointError, match="does not fit"):
        adapter.load(tmp_path / "a")
    assert all(torch.equal(factor, before[name]) for name, factor in adapter.parameters().items())


def test_checkpoints_of_the_other_kind_are_refused(make_model, tmp_path):
    """A run with an adapter does not go on from all weights, nor the other way round."""
    adapted, full = PolicyTrainer(make_model(), PLAIN), PolicyTrainer(make_model(), evolve(PLAIN, lora=None))
    adapted.save(tmp_path / "adapted")
    full.save(tmp_path / "full")
    with pytest.raises(CheckpointError, match=r"leave trainer\.lora out"):
        adapted.restore(tmp_path / "full")
    with pytest.raises(CheckpointError, match=r"set trainer\.lora"):
        full.restore(tmp_path / "adapted")
