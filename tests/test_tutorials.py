"""The tutorials work as they are typed in, with fewer steps."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tests.test_docs import ROOT, blocks

from areal_actors.config import load_config
from areal_actors.lib.references import import_reference


@pytest.mark.parametrize("name", ["agent", "environment"])
def test_the_files_of_a_tutorial_train(name: str, tmp_path: Path) -> None:
    """Written where it says, its files are trained by its commands; here with the smallest model, for one step."""
    shown = blocks(ROOT / "docs" / "tutorials" / f"{name}.md")
    for block in shown:
        if block.title is not None:
            (tmp_path / block.title).write_text(block.text)
    lines = [line for block in shown if block.language == "bash" for line in block.text.splitlines()]
    quick = ["model=tiny", "total_steps=1", "eval_dataset=null", "batch_size=2", "rollout.group_size=2"]

    (trained,) = (line.split()[1:] for line in lines if line == "areal-actors train train.yaml")
    scripts = [[sys.executable, line.split()[1]] for line in lines if line.startswith("python ")]
    for command in [*scripts, [sys.executable, "-m", "areal_actors", *trained, *quick]]:
        ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
        assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout.splitlines()[-1])["steps"] == 1


def test_the_configuration_of_the_tutorial_of_a_cluster_is_one(tmp_path: Path) -> None:
    """What it adds to the tiny job has only settings that exist, with values that are allowed."""
    (added,) = (block for block in blocks(ROOT / "docs" / "tutorials" / "cluster.md") if block.language == "yaml")
    base = yaml.safe_load((ROOT / "examples" / "tiny.yaml").read_text())
    for key, value in yaml.safe_load(added.text).items():
        base[key] = {**base.get(key, {}), **value} if isinstance(value, dict) else value
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(base))

    config = load_config(path)
    generation = config.scheduler.roles.generation
    assert generation is not None
    assert generation.replicas == 4


def test_files_of_a_configuration_import_their_neighbours(tmp_path: Path) -> None:
    """As a script does. What is installed comes first: a file beside it hides no package."""
    (tmp_path / "neighbour_of_agent.py").write_text("GREETING = 'hello'\n")
    (tmp_path / "json.py").write_text("raise RuntimeError('not this one')\n")
    (tmp_path / "agent.py").write_text(
        "import json\nfrom neighbour_of_agent import GREETING\nANSWER = json.dumps(GREETING)\n"
    )
    before = list(sys.path)
    try:
        assert import_reference("agent.py:ANSWER", directory=tmp_path) == '"hello"'
    finally:
        sys.path[:] = before
