"""From names to files, and from files to policies: what is found, and how it is said that something is not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from areal_actors.errors import ModelError
from areal_actors.models import cache_directory, create_empty_policy, load_policy, resolve_model, resolve_tokenizer
from areal_actors.rendering import load_renderer


@pytest.fixture
def copy(tiny_path: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model that a test may break."""
    return Path(shutil.copytree(tiny_path, tmp_path / "mine"))


def test_a_directory_is_a_model(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By absolute path or relative to the working directory; the files say where they are."""
    monkeypatch.chdir(copy.parent)

    assert resolve_model(str(copy)).path == copy.resolve()
    assert resolve_model("mine").path == copy.resolve()
    assert resolve_model("mine").name == "mine"


@pytest.mark.parametrize(
    ("lost", "said"),
    [("config.json", "config.json"), ("model.safetensors", "weights"), ("tokenizer*.json", "tokenizer")],
)
def test_missing_files_of_a_model_are_named(copy: Path, lost: str, said: str) -> None:
    """The error names the missing part, and how to save it."""
    for path in copy.glob(lost):
        path.unlink()

    with pytest.raises(ModelError, match=rf"lacks .*{said}.*save_pretrained"):
        resolve_model(str(copy))


def test_tokenizers_may_lie_elsewhere(copy: Path) -> None:
    """A directory of a tokenizer is not a model, but it is a tokenizer; and a model may have none of its own."""
    (copy / "model.safetensors").unlink()
    with pytest.raises(ModelError):
        resolve_model(str(copy))

    assert resolve_tokenizer(str(copy)).path == copy.resolve()

    (copy / "model.safetensors").touch()
    for path in copy.glob("tokenizer*.json"):
        path.unlink()

    assert resolve_model(str(copy), has_tokenizer=False).path == copy.resolve()
    with pytest.raises(ModelError):
        resolve_tokenizer(str(copy))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("smolm2-135m-instruct", "did you mean 'smollm2-135m-instruct'"),
        ("Tiny", "did you mean 'tiny'"),
        ("owner/large-model", "HF_HUB_OFFLINE is set.*hf download owner/large-model"),
        ("/no/such/directory", "owner/name on the Hugging Face hub"),
        ("", "complete model|name a directory"),
    ],
)
def test_an_unknown_name_is_answered_with_what_could_be_meant(
    name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A near name is offered; otherwise it is said what a model may be, and how to get one of the hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    with pytest.raises(ModelError, match=said):
        resolve_model(name)


def test_a_file_is_no_model(copy: Path) -> None:
    """Naming the weights instead of their directory is a common slip."""
    with pytest.raises(ModelError, match="name the directory"):
        resolve_model(str(copy / "model.safetensors"))


def test_the_cache_is_where_the_environment_says() -> None:
    """``AREAL_CACHE`` first, then the user's cache directory; empty variables say nothing."""
    assert cache_directory({"AREAL_CACHE": "/fast/disk"}) == Path("/fast/disk")
    assert cache_directory({"AREAL_CACHE": "", "XDG_CACHE_HOME": "/x"}) == Path("/x/areal_actors")
    assert cache_directory({}) == Path.home() / ".cache" / "areal_actors"


def test_a_policy_is_loaded_quietly(tiny_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A causal LM in evaluation mode and in the dtype that was asked for; nothing on stdout or stderr."""
    policy = load_policy(tiny_path, dtype="bfloat16")

    assert torch.bfloat16 == policy.dtype
    assert not policy.training
    assert capfd.readouterr() == ("", "")


def test_an_empty_policy_has_everything_but_weights(tiny_path: Path) -> None:
    """Names, shapes, ties and buffers are those of the loaded model; weights are on the meta device."""
    empty, loaded = create_empty_policy(tiny_path), load_policy(tiny_path)

    assert all(weight.is_meta and weight.dtype is torch.float32 for weight in empty.parameters())
    shapes = [[(name, weight.shape) for name, weight in model.named_parameters()] for model in (empty, loaded)]
    assert shapes[0] == shapes[1]
    assert empty.get_input_embeddings().weight is empty.get_output_embeddings().weight
    buffers = dict(empty.named_buffers())
    assert buffers
    assert all(torch.equal(buffers[name], buffer) for name, buffer in loaded.named_buffers())
    assert not empty.training
    assert not torch.nn.Linear(2, 2).weight.is_meta


def test_quietness_ends(tiny_path: Path) -> None:
    """The settings of transformers are the embedding program's: they are put back."""
    from transformers.utils import logging

    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    load_policy(tiny_path)

    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == (verbosity, has_bars)


def test_cut_weights_are_an_error(copy: Path) -> None:
    """As an interrupted copy leaves them."""
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])

    with pytest.raises(ModelError, match="cannot be read"):
        load_policy(copy)


def test_missing_weights_are_an_error(copy: Path) -> None:
    """Transformers would draw them at random and go on."""
    weights = load_file(copy / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(ModelError, match=r"lack 1 weights, model\.norm\.weight"):
        load_policy(copy)


@pytest.mark.parametrize("config", ["{", "[]", '{"model_type": "unheard-of"}'])
def test_a_broken_config_is_an_error(copy: Path, config: str) -> None:
    """Malformed JSON, JSON of another shape, and an unknown architecture."""
    (copy / "config.json").write_text(config)

    with pytest.raises(ModelError, match="cannot be read"):
        load_policy(copy)


def test_weights_of_another_shape_are_an_error(copy: Path) -> None:
    """A config that does not fit its weights."""
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"intermediate_size": 128}))

    with pytest.raises(ModelError, match="cannot be read"):
        load_policy(copy)


def test_the_tiny_model_is_the_same_each_time(tiny_path: Path, tmp_path: Path) -> None:
    """Whatever the state of the random generator, which is left as it was."""
    torch.manual_seed(123)
    before = torch.get_rng_state()
    again = resolve_model("tiny", cache=tmp_path).path

    assert torch.equal(before, torch.get_rng_state())
    first, second = load_file(tiny_path / "model.safetensors"), load_file(again / "model.safetensors")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert (tiny_path / "tokenizer.json").read_text() == (again / "tokenizer.json").read_text()


def test_the_tiny_model_can_talk(tiny_path: Path) -> None:
    """Its tokenizer renders a conversation; its ids fit its vocabulary; it has about 0.2 million parameters."""
    renderer = load_renderer(tiny_path)
    policy = load_policy(tiny_path)

    assert renderer.vocab_size == policy.config.vocab_size == 384
    assert renderer.stop_token_ids == (policy.config.eos_token_id,)
    assert 200_000 < sum(p.numel() for p in policy.parameters()) < 300_000
