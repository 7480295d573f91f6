"""The README's promises: its programs are the files that it names, and its own agent trains by its own command."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from areal_actors.cli import cli

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
    (command,) = [line for line in COMMANDS if line.startswith("areal-actors train my_agent")]
    result = CliRunner().invoke(cli, [*command.split()[1:], *QUICK], catch_exceptions=False)

    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout.splitlines()[-1])["steps"] == 1
    assert Path("runs/my_agent/trial/weights/model.safetensors").is_file()


def test_the_directory_of_init_trains(tmp_path, monkeypatch):
    """Both commands, as they are shown; here with the smallest model, for one step."""
    monkeypatch.chdir(tmp_path)
    for line in [line for line in COMMANDS if re.match(r"areal-actors (init|train) sums", line)]:
        words = line.split()[1:]
        result = CliRunner().invoke(cli, words + (QUICK if words[0] == "train" else []), catch_exceptions=False)
        assert result.exit_code == 0, result.output

    assert Path("runs/sums/trial/report.html").is_file()


def test_the_two_commands():
    """Both need Python alone, and start sessions that ``nox`` knows."""
    sessions = re.findall(r"@nox\.session\ndef (\w+)", (ROOT / "noxfile.py").read_text(encoding="utf-8"))
    install = "python3 -m venv .venv && .venv/bin/pip install nox && .venv/bin/nox"

    assert [f"{install} -s train", install] == [line for line in COMMANDS if "pip install nox" in line]
    assert "train" in sessions


# --------------------------------------------------------------------------------------- claims about absence

INDEX = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")


def limitations(page: str) -> list[str]:
    """Return the limitations that a page lists, each in one line, without the targets of its links."""
    section = page.split("## Limitations\n")[1].split("\n## ", maxsplit=1)[0]
    return [re.sub(r"\]\([^)]*\)", "]", " ".join(item.split())) for item in section.split("\n* ")[1:]]


def test_both_pages_have_the_same_limitations():
    """README and the first page of the documentation agree."""
    assert limitations(README) == limitations(INDEX) != []


def test_the_measured_hardware_is_that_of_the_results():
    """One GPU was measured: there is one file of results for a GPU, and it says which."""
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in (ROOT / "benchmarks/results").glob("*.json")]
    gpus = {gpu for report in reports if isinstance(report, dict) and (gpu := report.get("facts", {}).get("gpu"))}

    assert len(gpus) == 1
    assert any("One GPU was measured, an H100" in item for item in limitations(README))
    assert "H100" in gpus.pop()


def test_strict_tools_are_constrained_where_a_call_is_required_only():
    """Under ``auto`` there is no grammar; a required call of the same tool has one."""
    from areal_actors.domain import Tool, ToolChoice
    from areal_actors.models import resolve_model
    from areal_actors.rendering import load_renderer

    renderer = load_renderer(resolve_model("tiny").path)
    tool = Tool(name="add", description="", parameters={"type": "object", "properties": {}}, is_strict=True)

    assert renderer.constrain(tools=[tool], tool_choice=ToolChoice.AUTO) is None
    assert renderer.constrain(tools=[tool], tool_choice=ToolChoice.REQUIRED) is not None
