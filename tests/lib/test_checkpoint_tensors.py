"""The weights of a model are read by rows, as transformers would load them whole; what does not fit is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from attrs import frozen
from safetensors.torch import load_file, save_file
from tests.training.conftest import _make_model
from transformers import AutoModelForCausalLM

from areal_actors.errors import ModelError
from areal_actors.lib.checkpoint_tensors import StoredModel, read_checkpoint
from areal_actors.models import create_empty_policy, load_policy

KINDS = ("llama", "qwen2", "mixtral", "qwen3_moe")


@frozen
class Saved:
    """A directory with a model in several files."""

    path: Path

    def open(self) -> StoredModel:
        """Read it as a rank does."""
        return StoredModel(self.path, create_empty_policy(self.path))

    def edit(self, name: str, change) -> None:
        """Replace a tensor in its file; ``None`` removes it."""
        index = json.loads((self.path / "model.safetensors.index.json").read_text())
        file = self.path / index["weight_map"][name]
        tensors = load_file(file)
        changed = change(tensors.pop(name))
        if changed is not None:
            tensors[name] = changed
        save_file(tensors, file, metadata={"format": "pt"})


@pytest.fixture
def saved(tmp_path) -> Saved:
    """A model in three files."""
    _make_model("qwen2").save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) == 3
    return Saved(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_tensor_rows_equal_those_of_transformers(kind, dtype, tmp_path):
    """Of plain weights, of tied ones under both names, and of experts that are stacked from many tensors."""
    _make_model(kind).to(dtype).save_pretrained(tmp_path, max_shard_size="50KB")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    stored = Saved(tmp_path).open()

    for name, whole in expected.state_dict().items():
        assert stored.shape(name) == whole.shape
        for first, stop in ((0, len(whole)), (1, 3), (2, 2), (len(whole) - 1, len(whole))):
            assert torch.equal(stored.rows(name, first, stop), whole[first:stop])


def test_digest_of_copies_is_equal(tmp_path):
    """In however many files they are; another model has another one."""
    digests = []
    for name, seed, size in (("one", 0, "50GB"), ("two", 0, "30KB"), ("other", 1, "50GB")):
        _make_model("qwen2", seed=seed).save_pretrained(tmp_path / name, max_shard_size=size)
        digests.append(Saved(tmp_path / name).open().digest())
    assert digests[0] == digests[1] != digests[2]


def test_absent_weights_file_is_named(saved):
    """As an interrupted download of several files leaves it."""
    absent = sorted(saved.path.glob("*.safetensors"))[1]
    absent.unlink()
    with pytest.raises(ModelError, match=rf"1 of the files in model.safetensors.index.json are absent, {absent.name}"):
        saved.open()


def test_truncated_weights_file_is_named(saved):
    """As an interrupted download of one file leaves it."""
    cut = sorted(saved.path.glob("*.safetensors"))[1]
    cut.write_bytes(cut.read_bytes()[:-100])
    with pytest.raises(ModelError, match=rf"cannot be read: {cut.name}: .*Download or save it again"):
        saved.open()


def test_tensor_missing_from_its_shard_is_named(saved):
    """A file of another model in the place of one."""
    saved.edit("model.norm.weight", lambda _: None)
    with pytest.raises(ModelError, match=r"has no model\.norm\.weight, which model\.safetensors\.index\.json says"):
        saved.open()


def test_single_file_comes_before_an_index(saved):
    """As in transformers: an index may be left of an earlier save."""
    model = _make_model("qwen2", seed=5)
    save_file(dict(model.state_dict()), saved.path / "model.safetensors", metadata={"format": "pt"})
    expected = AutoModelForCausalLM.from_pretrained(saved.path, dtype=torch.float32).state_dict()

    assert torch.equal(saved.open().rows("lm_head.weight", 0, 9), expected["lm_head.weight"][:9])
    assert torch.equal(read_checkpoint(saved.path)["lm_head.weight"], expected["lm_head.weight"])
    assert torch.equal(expected["lm_head.weight"], model.lm_head.weight)


def test_head_that_differs_from_the_embeddings_is_not_tied(tmp_path):
    """A tied configuration with another head in the files: untied where it is loaded whole, refused in parts."""
    _make_model("llama").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"] + 1}, path, metadata={"format": "pt"})

    policy = load_policy(tmp_path)

    assert policy.config.tie_word_embeddings is False
    assert torch.equal(policy.lm_head.weight, policy.model.embed_tokens.weight + 1)
    with pytest.raises(ModelError, match=r"Set tie_word_embeddings to false in config\.json"):
        Saved(tmp_path).open()


def test_missing_weights_are_named(tmp_path):
    """Transformers would draw them at random."""
    model = _make_model("qwen2")
    state = model.state_dict()
    del state["model.norm.weight"]
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ModelError, match=r"lack 1 weights, model\.norm\.weight"):
        Saved(tmp_path).open()


def test_weight_of_another_shape_is_named(saved):
    """With both shapes."""
    saved.edit("model.norm.weight", lambda norm: norm[:-1].clone())
    with pytest.raises(ModelError, match=r"model\.norm\.weight in .* has the shape \(31,\), and \(32,\) by its config"):
        saved.open()
