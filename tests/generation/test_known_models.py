"""A model that an engine has tried before is opened from its files, and computes the same numbers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.generation.tiny_models import create_llama
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from areal_actors.errors import EngineError, ModelError
from areal_actors.generation.torch import TorchEngine, TorchEngineConfig, engine
from areal_actors_testing.engine_contract import collect, join_ids

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    """Use one event loop: models are opened in a thread."""
    return "asyncio"


SIZES = {"vocab_size": 96, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 6, "num_key_value_heads": 2, "initializer_range": 0.3}
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS = {
    "untied": create_llama,
    "biases, tied": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, **HEADS, tie_word_embeddings=True)),
    "head norms": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, **HEADS, head_dim=8)),
    "scaled rotation": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, rope_parameters=SCALED)),
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of models with nothing in it."""
    monkeypatch.setenv("AREAL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def save(model: torch.nn.Module, directory: Path, **options: str) -> Path:
    torch.manual_seed(1)
    for name, weight in model.named_parameters():
        if weight.ndim == 1:  # norms are ones at first, and biases zeros: a mistake would not show
            torch.nn.init.uniform_(weight, 0.5 if "norm" in name else -0.5, 1.5 if "norm" in name else 0.5)
    model.save_pretrained(directory, **options)
    return directory


@pytest.fixture
def sample(create_request):
    """Return a function that opens an engine; it returns the engine's info, and the ids and log-probabilities."""

    async def sample(model: Path, *, dtype: str = "float32") -> tuple[object, list[int], list[float]]:
        config = TorchEngineConfig(dtype=dtype, max_concurrent=2, prefill_chunk=16)
        async with TorchEngine.open(config, model=model) as opened:
            chunks = await collect(opened, create_request(0, np.arange(40) % 96, max_new_tokens=20))
        logprobs = np.concatenate([chunk.logprobs for chunk in chunks])
        return opened.info, np.asarray(join_ids(chunks)).tolist(), logprobs.tolist()

    return sample


@pytest.fixture
def forbid_loading(monkeypatch: pytest.MonkeyPatch):
    """Return a function after which no model is built any more."""

    def forbid() -> None:
        def own_copy(*_: object) -> None:
            raise AssertionError

        monkeypatch.setattr(engine, "own_copy", own_copy)

    return forbid


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
async def test_known_model_is_read_from_its_files(tmp_path, name, dtype, sample, forbid_loading):
    """Neither built nor compared again; what is known of it, each token and each probability are the same."""
    model = save(MODELS[name](), tmp_path / "model", max_shard_size="10kB")
    before = await sample(model, dtype=dtype)
    forbid_loading()

    assert before == await sample(model, dtype=dtype)


async def test_other_settings_are_tried_again(tmp_path, sample, forbid_loading):
    """A setting may change what a model computes."""
    model = save(create_llama(), tmp_path / "model")
    await sample(model)
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(settings | {"rms_norm_eps": 0.5}))
    forbid_loading()

    with pytest.raises(EngineError, match="AssertionError"):
        await sample(model)


async def test_files_that_lack_a_weight_are_refused_as_before(tmp_path, sample):
    """Transformers says what is missing; what they have besides is no reason."""
    model = save(create_llama(), tmp_path / "model")
    before = await sample(model)
    weights = load_file(model / "model.safetensors")
    save_file(weights | {"more": torch.zeros(1)}, model / "model.safetensors", metadata={"format": "pt"})
    assert before == await sample(model)
    del weights["model.norm.weight"]
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(ModelError, match=r"lack 1 weights, model\.norm\.weight"):
        await sample(model)


@pytest.mark.parametrize("damage", ["", "{", '{"vocab_size": 1}', "[]"])
async def test_damaged_cache_is_written_anew(tmp_path, cache, damage, sample, forbid_loading):
    """And so is one of another version."""
    model = save(create_llama(), tmp_path / "model")
    before = await sample(model)
    (kept,) = (cache / "lean").iterdir()
    kept.write_text(damage)

    assert before == await sample(model)
    forbid_loading()
    assert before == await sample(model)


def save_variant(directory: Path, *, head: str, files: str) -> Path:
    """Save a model whose configuration ties its head, and whose files hold none, an equal or another one.

    ``both`` writes a single file next to an index whose files hold other weights.
    """
    torch.manual_seed(7)
    config = Qwen2Config(**SIZES, **HEADS, tie_word_embeddings=True)
    model = Qwen2ForCausalLM(config)
    if files == "both":
        Qwen2ForCausalLM(config).save_pretrained(directory, max_shard_size="10KB")
    model.save_pretrained(directory, max_shard_size="10KB" if files == "index" else "1GB")
    path = max(directory.glob("model*.safetensors")) if files == "index" else directory / "model.safetensors"
    if head != "absent":
        weight = model.lm_head.weight.detach().clone()
        save_file(
            load_file(path) | {"lm_head.weight": weight + (head == "other") * torch.randn_like(weight)},
            path,
            {"format": "pt"},
        )
    if files == "index" and head != "absent":
        index = directory / "model.safetensors.index.json"
        document = json.loads(index.read_text())
        document["weight_map"]["lm_head.weight"] = path.name
        index.write_text(json.dumps(document))
    return directory


VARIANTS = [("absent", "single"), ("equal", "index"), ("absent", "both"), ("other", "single"), ("other", "index")]


@pytest.mark.parametrize("order", [VARIANTS, VARIANTS[::-1]], ids=["absent first", "other first"])
async def test_engine_samples_what_the_files_hold_whatever_was_opened_before(sample, tmp_path, order):
    """All of these have one configuration; each is opened twice, and computes what transformers makes of its files."""
    for head, files in order:
        path = save_variant(tmp_path / f"{head}-{files}", head=head, files=files)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for _ in range(2):
            _, ids, logprobs = await sample(path)
            row = torch.tensor([[*(np.arange(40) % 96), *ids]])
            with torch.no_grad():
                expected = torch.log_softmax(model(row).logits[0, 39:-1], -1).gather(1, row[0, 40:, None])[:, 0]
            assert logprobs == pytest.approx(expected.tolist(), abs=1e-3), (head, files)
