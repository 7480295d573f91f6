"""The export loads elsewhere as it is."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from areal_actors.training.config import Layout, TrainerConfig
from areal_actors.training.trainer import PolicyTrainer
from areal_actors.training.tree_attention import SEGMENT_ATTENTION
from areal_actors.training.weights import export_model


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_export_loads_in_transformers(tmp_path, make_model, kind, dtype):
    """Config, weights and dtype survive, and the model computes what it did."""
    model = make_model(kind).eval()
    export_model(model, tmp_path / "export", dtype=dtype)
    ids = torch.tensor([[1, 2, 3]])

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype="auto").eval()

    assert loaded.dtype is dtype
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.to(dtype), loaded.get_parameter(name))
    assert torch.allclose(model(ids).logits, loaded.float()(ids).logits, atol=1e-5 if dtype is torch.float32 else 0.1)


def test_tokenizer_files_come_along_and_others_do_not(tmp_path, make_model):
    """Whatever belongs to the tokenizer is copied byte for byte."""
    source = tmp_path / "model"
    source.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "merges.txt", "pytorch_model.bin"):
        (source / name).write_text(name)

    export_model(make_model(), tmp_path / "export", tokenizer_directory=source)

    names = {path.name for path in (tmp_path / "export").iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "merges.txt", "config.json"} < names
    assert "pytorch_model.bin" not in names


def test_an_export_replaces_the_one_before(tmp_path, make_model):
    """Exporting twice to a place leaves the second export alone there."""
    export_model(make_model(seed=1), tmp_path / "export")
    (tmp_path / "export" / "stale").write_text("old")
    export_model(make_model(seed=2), tmp_path / "export")

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export")

    assert torch.equal(make_model(seed=2).get_input_embeddings().weight, loaded.get_input_embeddings().weight)
    assert not (tmp_path / "export" / "stale").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def test_an_export_does_not_mention_how_it_was_trained(tmp_path, make_model):
    """The attention that trains by plan is unknown elsewhere and is not written down."""
    trainer = PolicyTrainer(make_model(), TrainerConfig(layout=Layout.TREE))

    export_model(trainer.model, tmp_path / "export")

    assert trainer.model.config._attn_implementation == SEGMENT_ATTENTION
    assert SEGMENT_ATTENTION not in (tmp_path / "export" / "config.json").read_text()


def test_a_large_model_is_divided_into_files(tmp_path, make_model):
    """As transformers divides it: several files and an index, which it loads."""
    model = make_model()
    export_model(model, tmp_path / "export", max_file_bytes=10_000)

    names = sorted(path.name for path in (tmp_path / "export").glob("*.safetensors"))
    index = json.loads((tmp_path / "export" / "model.safetensors.index.json").read_text())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export")

    assert len(names) > 1
    assert names == sorted(set(index["weight_map"].values()))
    assert all(torch.equal(parameter, loaded.get_parameter(name)) for name, parameter in model.named_parameters())
