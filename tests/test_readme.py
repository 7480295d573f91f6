"""The README's promises: its programs are the files that it names, and its own agent trains by its own command."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from areal_actors.__main__ import cli

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"^```\w+ title=\"([^\"]+)\"\n(.*?)^```$", README, re.MULTILINE | re.DOTALL))
COMMANDS = [
    line for text in re.findall(r"^```bash\n(.*?)^```$", README, re.MULTILINE | re.DOTALL) for line in text.splitlines()
]
QUICK = ["model=tiny", "total_steps=1", "batch_size=2", "rollout.group_size=2", "logging.display=none"]


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("examples/")])
def test_programs_are_those_of_the_examples(name):
    """What is shown is, letter by letter, a file that the tests of the examples run."""
    assert (ROOT / name).read_text(encoding="utf-8") == FILES[name]


def test_every_python_block_is_accounted_for():
    """Each has the name of a file: an example, or a part of the reader's own agent, which is trained below."""
    assert README.count("```python") == sum(name.endswith(".py") for name in FILES)
    assert {"my_agent.py", "my_problems.jsonl", "my_agent.yaml"} == {name for name in FILES if "/" not in name}


def test_the_readers_own_agent_trains(tmp_path, monkeypatch):
    """The files and the command under "Your own agent" train a model; here the smallest one, for one step."""
    monkeypatch.chdir(tmp_path)
    for name in ("my_agent.py", "my_problems.jsonl", "my_agent.yaml"):
        Path(name).write_text(FILES[name], encoding="utf-8")
    (command,) = [line for line in COMMANDS if line.startswith("areal-actors train")]
    result = CliRunner().invoke(cli, [*command.split()[1:], *QUICK], catch_exceptions=False)

    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout.splitlines()[-1])["steps"] == 1
    assert Path("runs/my_agent/trial/weights/model.safetensors").is_file()


def test_the_two_commands():
    """Both need Python alone, and start sessions that ``nox`` knows."""
    sessions = re.findall(r"@nox\.session\ndef (\w+)", (ROOT / "noxfile.py").read_text(encoding="utf-8"))
    install = "python3 -m venv .venv && .venv/bin/pip install nox && .venv/bin/nox"

    assert [f"{install} -s train", install] == [line for line in COMMANDS if "pip install nox" in line]
    assert "train" in sessions
