"""Adapters over one base: losses and gradients against float64 formulas, N adapters against N trainers, and files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from areal_actors.errors import CheckpointError, InvalidRequest, TrainingDiverged
from areal_actors.models import resolve_model
from areal_actors_tinker.bank import AdamSettings, AdapterBank, AdapterSettings
from areal_actors_tinker.losses import LOSSES
from areal_actors_tinker.wire import Datum

# peft 0.21 asks transformers 5.23 for it.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def load(dtype: str = "float32") -> Any:
    """A copy of the model."""
    return AutoModelForCausalLM.from_pretrained(resolve_model("tiny").path, dtype=dtype)


def create_data(seed: int, *lengths: int) -> list[Datum]:
    """Random data with the inputs of all losses, among them positions without weight."""
    rng = np.random.default_rng(seed)
    data = []
    for length in lengths:
        tokens = rng.integers(0, 300, length + 1).astype(np.int32)
        mask = (rng.random(length) < 0.7).astype(np.float32)
        mask[-1] = 1
        inputs = {
            "target_tokens": tokens[1:].astype(np.int64),
            "weights": mask,
            "logprobs": (-2 - rng.random(length)).astype(np.float32),
            "advantages": (rng.normal(size=length) * mask).astype(np.float32),
            "sequence_ratio_mask": mask,
        }
        data.append(Datum(tokens=tokens[:-1], inputs=inputs))
    return data


def reference_loss(name: str, p: torch.Tensor, datum: Datum) -> torch.Tensor:
    """The formula of Tinker's documentation, written out a second time, in float64."""
    given = {key: torch.tensor(value, dtype=torch.float64) for key, value in datum.inputs.items()}
    if name == "cross_entropy":
        return (-p * given["weights"]).sum()
    q, a = given["logprobs"], given["advantages"]
    ratio = torch.exp(p - q)
    match name:
        case "importance_sampling":
            return -(ratio * a).sum()
        case "ppo":
            return -torch.minimum(ratio * a, torch.clamp(ratio, 0.8, 1.2) * a).sum()
        case "cispo":
            return -(torch.clamp(ratio, 0.8, 1.2).detach() * p * a).sum()
        case "dro":
            return -(p * a - 0.5 * 0.05 * (p - q) ** 2).sum()
        case "gspo":
            chosen = given["sequence_ratio_mask"] != 0
            s = torch.exp((p.detach() - q)[chosen].mean()) * torch.exp(p - p.detach())
            return -torch.minimum(s * a, torch.clamp(s, 1 - 3e-4, 1 + 4e-4) * a).sum()
    raise AssertionError(name)


@pytest.mark.parametrize("loss", LOSSES)
def test_loss_and_gradient_equal_formula_in_float64(loss):
    """Loss, log-probabilities and the gradient of each factor, over packed data of different lengths."""
    bank, data = AdapterBank(load(), max_packed_tokens=40), create_data(1, 5, 23, 11, 30)
    bank.create("a", AdapterSettings(rank=4, seed=3))
    bank.run_pass("a", create_data(2, 9), loss="cross_entropy", settings={})
    bank.step("a", AdamSettings(learning_rate=0.01))  # so that both factors have a gradient
    found, metrics = bank.run_pass("a", data, loss=loss, settings={})
    adapter = bank._adapters["a"]

    plain = load("float64")
    config = peft.LoraConfig(r=4, lora_alpha=32, target_modules=bank._targets(adapter.settings), task_type="CAUSAL_LM")
    model: Any = peft.get_peft_model(plain, config)
    factors = {name: p for name, p in model.named_parameters() if ".lora_" in name}
    with torch.no_grad():
        for name, factor in factors.items():
            factor.data = adapter.parameters[name.replace(".default", "")].double()
    total = torch.zeros((), dtype=torch.float64)
    for datum, logprobs in zip(data, found, strict=True):
        logits = model(torch.from_numpy(datum.tokens[None].astype(np.int64)), use_cache=False).logits[0]
        scored = logits.log_softmax(-1).gather(-1, torch.from_numpy(datum.inputs["target_tokens"])[:, None])[:, 0]
        np.testing.assert_allclose(logprobs, scored.detach().numpy(), atol=1e-5)
        total = total + reference_loss(loss, scored, datum)
    total.backward()

    assert metrics["loss:sum"] == pytest.approx(total.item(), rel=1e-5, abs=1e-5)
    for name, factor in factors.items():
        assert factor.grad is not None
        own = adapter.parameters[name.replace(".default", "")].grad
        np.testing.assert_allclose(own, factor.grad, rtol=1e-4, atol=1e-5 * float(factor.grad.abs().max() + 1))


def test_adapters_train_as_separate_trainers_would():
    """Three clients of one base take turns; weights and losses equal those of three banks with one client each."""
    shared, names = AdapterBank(load()), ("a", "b", "c")
    alone = {name: AdapterBank(load()) for name in names}
    for index, name in enumerate(names):
        for bank in (shared, alone[name]):
            bank.create(name, AdapterSettings(rank=2 + index, seed=index))
    for step in range(3):
        for index, name in enumerate(names):
            data = create_data(10 * step + index, 7, 19)
            for loss in ("cross_entropy", "ppo"):
                one, other = (bank.run_pass(name, data, loss=loss, settings={}) for bank in (shared, alone[name]))
                assert one[1]["loss:sum"] == pytest.approx(other[1]["loss:sum"], rel=1e-6)
            for bank in (shared, alone[name]):
                bank.step(name, AdamSettings(learning_rate=1e-3, weight_decay=0.1, grad_clip_norm=1.0))

    for name in names:
        for key, parameter in shared._adapters[name].parameters.items():
            np.testing.assert_allclose(
                parameter.detach(), alone[name]._adapters[name].parameters[key].detach(), atol=1e-6
            )


def test_step_equals_adamw_of_torch():
    """Including the count of steps after a checkpoint was loaded."""
    bank = AdapterBank(load())
    bank.create("a", AdapterSettings(rank=2))
    adapter = bank._adapters["a"]
    copies = {key: torch.nn.Parameter(p.detach().clone()) for key, p in adapter.parameters.items()}
    adam = torch.optim.AdamW(copies.values(), lr=1e-3, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.1)
    for step in range(4):
        bank.run_pass("a", create_data(step, 12), loss="cross_entropy", settings={})
        for key, copy in copies.items():
            gradient = adapter.parameters[key].grad
            copy.grad = torch.zeros_like(copy) if gradient is None else gradient.clone()
        bank.step("a", AdamSettings(learning_rate=1e-3, weight_decay=0.1))
        adam.step()
        for key, copy in copies.items():
            np.testing.assert_allclose(adapter.parameters[key].detach(), copy.detach(), atol=1e-6)


def test_checkpoint_continues_exactly_and_loads_in_peft(tmp_path: Path):
    """A second adapter loaded from it makes the same step; merged weights and peft's own score the same."""
    bank, data = AdapterBank(load()), create_data(5, 8, 21)
    bank.create("a", AdapterSettings(rank=4))
    for _ in range(2):
        bank.run_pass("a", data, loss="cross_entropy", settings={})
        bank.step("a", AdamSettings(learning_rate=0.01))
    bank.save("a", tmp_path / "one", has_moments=True)
    bank.create("b", AdapterSettings(rank=4, seed=9))
    bank.load("b", tmp_path / "one", has_moments=True)
    for name in ("a", "b"):
        bank.run_pass(name, data, loss="ppo", settings={})
        bank.step(name, AdamSettings(learning_rate=0.01))
    one, other = (bank._adapters[name].parameters for name in ("a", "b"))
    assert all(torch.equal(one[key], other[key]) for key in one)

    bank.load("a", tmp_path / "one", has_moments=False)
    found, _ = bank.run_pass("a", data, loss="cross_entropy", settings={}, is_forward_only=True)
    plain = load()
    plain.load_state_dict(bank.merged(tmp_path / "one"), strict=False)
    bank.export(tmp_path / "one", tmp_path / "whole", files=resolve_model("tiny").path)
    for model in (
        plain,
        peft.PeftModel.from_pretrained(load(), str(tmp_path / "one")),
        AutoModelForCausalLM.from_pretrained(tmp_path / "whole"),
    ):
        logits = model(torch.from_numpy(data[1].tokens[None].astype(np.int64))).logits[0].log_softmax(-1)
        wanted = logits.gather(-1, torch.from_numpy(data[1].inputs["target_tokens"])[:, None])[:, 0]
        np.testing.assert_allclose(found[1], wanted.detach().numpy(), atol=1e-5)


def test_prompt_scores_equal_passes(tmp_path: Path):
    """Alternatives and named tokens have the log-probabilities of the plain score; base and adapter differ."""
    bank, data = AdapterBank(load()), create_data(6, 12)
    bank.create("a", AdapterSettings(rank=4))
    bank.run_pass("a", data, loss="cross_entropy", settings={})
    bank.step("a", AdamSettings(learning_rate=0.05))
    bank.save("a", tmp_path / "one", has_moments=False)
    tokens = np.append(data[0].tokens, data[0].inputs["target_tokens"][-1:]).astype(np.int32)
    found, _ = bank.run_pass("a", data, loss="cross_entropy", settings={}, is_forward_only=True)
    targets = np.stack([tokens[1:], np.full(12, -1)], axis=1).astype(np.int32)
    scores = bank.score_prompt(tmp_path / "one", tokens, top=3, targets=targets)

    np.testing.assert_allclose(scores.logprobs[1:], found[0], atol=1e-5)
    assert np.isnan(scores.logprobs[0])
    assert scores.targets is not None
    np.testing.assert_allclose(scores.targets[:, 0], found[0], atol=1e-5)
    assert not scores.targets[:, 1].any()
    assert scores.top is not None
    assert (13, 3) == scores.top[0].shape
    assert (np.diff(scores.top[1][1:], axis=1) <= 0).all()
    base = bank.score_prompt(None, tokens)
    assert np.abs(base.logprobs[1:] - found[0]).max() > 1e-3
    assert "prompt" not in bank._adapters


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"weights": None}, "lacks loss_fn_inputs weights"),
        ({"target_tokens": np.arange(3)}, "target_tokens of datum 1 have the shape"),
        ({"target_tokens": np.full(9, 10**6)}, "token id 1000000, outside the vocabulary"),
        ({"weights": np.ones(8, np.float32)}, "weights of datum 1 has the shape"),
        ({"weights": np.full(9, np.nan, np.float32)}, "not finite"),
    ],
)
def test_refused_data_change_nothing(change, complaint):
    """The gradient of the data before stays, and that of the good data in the refused batch is not added."""
    bank, (good, bad) = AdapterBank(load()), create_data(7, 6, 9)
    bank.create("a", AdapterSettings(rank=2))
    bank.run_pass("a", [good], loss="cross_entropy", settings={})
    before = {key: p.grad for key, p in bank._adapters["a"].parameters.items()}
    inputs = {key: value for key, value in (dict(bad.inputs) | change).items() if value is not None}
    with pytest.raises(InvalidRequest, match=complaint):
        bank.run_pass("a", [good, Datum(tokens=bad.tokens, inputs=inputs)], loss="cross_entropy", settings={})

    after = {key: p.grad for key, p in bank._adapters["a"].parameters.items()}
    assert all(before[key] is after[key] or torch.equal(before[key], after[key]) for key in before)  # type: ignore[arg-type]


def test_loss_that_is_not_finite_adds_no_gradient():
    """A ratio that overflows names itself; the next step is made from the data before."""
    bank, (datum,) = AdapterBank(load()), create_data(8, 6)
    bank.create("a", AdapterSettings(rank=2))
    far = Datum(tokens=datum.tokens, inputs=dict(datum.inputs) | {"logprobs": np.full(6, -1e4, np.float32)})
    with pytest.raises(TrainingDiverged, match="loss importance_sampling is"):
        bank.run_pass("a", [datum, far], loss="importance_sampling", settings={})

    assert {None} == {p.grad for p in bank._adapters["a"].parameters.values()}


def test_unknown_names_and_misfits_are_refused(tmp_path: Path):
    """Each error names what is wrong, and leaves the adapter as it was."""
    bank, data = AdapterBank(load()), create_data(9, 6)
    bank.create("a", AdapterSettings(rank=2))
    bank.save("a", tmp_path / "one", has_moments=False)
    bank.create("b", AdapterSettings(rank=4))
    for call, complaint in (
        (lambda: bank.run_pass("x", data, loss="ppo", settings={}), "There is no model 'x'"),
        (lambda: bank.run_pass("a", data, loss="ppo", settings={"beta": 1.0}), "ppo has no setting 'beta'"),
        (lambda: bank.run_pass("a", data, loss="ppo", settings={"clip_low_threshold": "1"}), "not a finite number"),
        (lambda: bank.run_pass("a", [], loss="ppo", settings={}), "There are no data"),
        (lambda: bank.create("c", AdapterSettings(rank=100_000)), "choose one from 1 to"),
        (lambda: bank.create("c", AdapterSettings(rank=1, adapts_mlp=False, adapts_attention=False)), "Neither"),
    ):
        with pytest.raises(InvalidRequest, match=complaint):
            call()
    with pytest.raises(CheckpointError, match="does not fit the model"):
        bank.load("b", tmp_path / "one", has_moments=False)
    with pytest.raises(CheckpointError, match="no state of an optimiser"):
        bank.load("a", tmp_path / "one", has_moments=True)
