"""From names to directories: what is found, what is said of the rest, and that no name leads out."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.dashboard import RunDirectory
from areal_actors.domain import is_model_identifier
from areal_actors.errors import ModelError
from areal_actors.models import Catalogue, format_models


def save(root: Path, name: str, **facts: object) -> Path:
    weights = root / name / "weights"
    weights.mkdir(parents=True)
    (weights / "config.json").write_text("{}")
    if facts:
        (weights / "trained.json").write_text(json.dumps(facts))
    return weights


def test_names_find_directories(tmp_path: Path):
    """An identifier, or the experiment alone while only one of its trials has weights."""
    first = save(tmp_path, "a/1", step=3, reward=0.5)
    (tmp_path / "a" / "2").mkdir()
    catalogue = Catalogue(root=tmp_path)
    found, alone = catalogue.find("a/1"), catalogue.find("a")
    save(tmp_path, "a/2/")

    assert (first, "a/1", 3, 0.5) == (found.path, found.name, found.step, found.reward)
    assert found == alone == catalogue.get("a/1")
    assert first == RunDirectory(path=tmp_path / "a/1").weights
    with pytest.raises(ModelError, match="2 trials with weights; name one of them: a/1, a/2"):
        catalogue.find("a")


def test_unknown_model_is_explained(tmp_path: Path):
    """Nearest names, a run that has not finished, and a form that no name has."""
    save(tmp_path, "tool_agent/trial")
    (tmp_path / "tool_agent" / "early").mkdir()
    catalogue = Catalogue(root=tmp_path)

    with pytest.raises(ModelError, match="did you mean tool_agent/trial"):
        catalogue.find("tool-agent/trial")
    with pytest.raises(ModelError, match=r"areal-actors export .*tool_agent/early"):
        catalogue.find("tool_agent/early")
    with pytest.raises(ModelError, match="no run there has finished"):
        Catalogue(root=tmp_path / "elsewhere").find("a/1")
    for name in ("../a", "a/../b", "/a/b", "a/b/c", "", "a/.", "./a", "a\n/b", "a\0/b", ".hidden/x", "x" * 10_000):
        with pytest.raises(ModelError, match="is not the name of a trained model"):
            catalogue.find(name)


@given(st.text(alphabet=st.sampled_from("./\\a-_ \0~%"), max_size=12) | st.text(max_size=12))
def test_no_name_leads_out(tmp_path_factory: pytest.TempPathFactory, name: str):
    """Whatever a client sends: what is found lies below the root."""
    root = tmp_path_factory.getbasetemp() / "catalogue"
    if not root.exists():
        save(root, "inside/a/b")
        save(root, "a/a")
    found = Catalogue(root=root / "inside").get(name)

    assert found is None or found.path.resolve().is_relative_to(root / "inside")


def test_links_out_are_not_followed(tmp_path: Path):
    """A link to a directory elsewhere is no model; one within the root is."""
    outside = save(tmp_path, "outside/a")
    root = tmp_path / "root"
    inside = save(root, "a/1")
    for name, target in (("b/1", outside.parent), ("c/1", inside.parent)):
        (root / name).parent.mkdir()
        (root / name).symlink_to(target)
    (root / "d" / "1").mkdir(parents=True)
    (root / "d" / "1" / "weights").symlink_to(outside)

    assert ["a/1", "c/1"] == [model.name for model in Catalogue(root=root).list()]


def test_half_a_directory_is_no_model(tmp_path: Path):
    """What a writer leaves when it is killed has another name; a directory without a model in it is none."""
    (tmp_path / "a" / "1" / ".weights.partial").mkdir(parents=True)
    (tmp_path / "a" / "1" / ".weights.partial" / "config.json").write_text("{}")
    (tmp_path / "b" / "1" / "weights").mkdir(parents=True)

    assert () == Catalogue(root=tmp_path).list()


def test_a_table_for_people(tmp_path: Path):
    """One line a model; what is not known is left out."""
    os.utime(save(tmp_path, "a/1", step=12, reward=0.25), (0, 0))
    broken = save(tmp_path, "a/2")
    (broken / "trained.json").write_text("[broken")
    os.utime(broken, (60, 60))
    lines = format_models(Catalogue(root=tmp_path).list()).splitlines()

    assert ["a/1", "12", "1970-01-01", "00:00", "0.250"] == lines[1].split()
    assert ["a/2", "1970-01-01", "00:01"] == lines[2].split()
    assert "No run" in format_models(())


def test_identifiers_are_names_of_the_configuration():
    """What a configuration accepts as names is an identifier when it is joined, and nothing else is."""
    assert is_model_identifier("my-model/2025-10-23-run-1")
    assert not any(map(is_model_identifier, ("my-model", "gpt-4o", "a/b/c", "a/b\n", "/b", "a/", "-a/b", "a b/c")))
