"""``areal-actors init``: what it writes is valid, is trained with each client, and never overwrites."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from areal_actors.cli import cli
from areal_actors.config import load_config


def run(*arguments: str) -> Result:
    """Run the command in this process."""
    return CliRunner().invoke(cli, ["init", *arguments])


def test_init_writes_an_agent_and_a_configuration(tmp_path: Path):
    """The experiment is named after the directory; the output has the commands that come next."""
    result = run(str(tmp_path / "my sums"))

    assert 0 == result.exit_code, result.output
    config = load_config(tmp_path / "my sums" / "train.yaml")
    assert ("my-sums", "smollm2-135m-instruct") == (config.experiment_name, config.model)
    assert "areal-actors train" in result.output


@pytest.mark.parametrize(
    ("sdk", "module"),
    [("openai", "openai"), ("anthropic", "anthropic"), ("langchain", "langchain_openai"), ("httpx", "httpx")],
)
def test_init_writes_a_trainable_agent_for_each_client(
    tmp_path: Path, sdk: str, module: str, monkeypatch: pytest.MonkeyPatch
):
    """One step of the tiny model, without a failed episode."""
    pytest.importorskip(module, reason=f"pip install {module.replace('_', '-')}")
    assert 0 == run(str(tmp_path / "sums"), "--sdk", sdk, "--model", "tiny").exit_code
    small = ["total_steps=1", "batch_size=2", "rollout.group_size=2", "eval_dataset=null"]

    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli, ["train", str(tmp_path / "sums" / "train.yaml"), *small])

    assert 0 == done.exit_code, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert 1 == summary["steps"]
    assert not (Path(summary["run_dir"]) / "failures.jsonl").exists()


@pytest.mark.parametrize("name", ["null", "123", "1e3", "true", "2024-01-01", "_x", "a b", "-dash", "#hash", "a$b"])
def test_init_quotes_odd_names(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch):
    """YAML reads some names as numbers or dates; those are quoted. The commands shown can be pasted into a shell."""
    monkeypatch.chdir(tmp_path)
    result = run("--model", "a: b #c", "--", name)

    assert 0 == result.exit_code, result.output
    config = load_config(tmp_path / name / "train.yaml")
    assert "a: b #c" == config.model
    shown = next(line for line in result.output.splitlines() if "areal-actors train" in line)
    path = shlex.split(shown, comments=True)[2]
    assert (tmp_path / name / "train.yaml").samefile(path)
    assert not path.startswith("-")


def test_init_overwrites_nothing(tmp_path: Path):
    """One file that exists is enough to refuse, and then none is written."""
    (tmp_path / "agent.py").write_text("mine")

    result = run(str(tmp_path))

    assert 0 != result.exit_code
    assert "has agent.py already; name another directory" in result.output
    assert ["agent.py"] == [path.name for path in tmp_path.iterdir()]
    assert "mine" == (tmp_path / "agent.py").read_text()
