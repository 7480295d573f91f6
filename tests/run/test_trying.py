"""An agent is tried before it is trained: what is printed, and what is found wrong with it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from areal_actors.cli import cli
from areal_actors.dashboard import RunDirectory

AGENT = '''
import time

from openai import AsyncOpenAI


class Odd(BaseException):
    pass


class Agent:
    """Sums that go wrong in different ways, by the kind of the problem."""

    async def run(self, data, base_url, api_key, **extra_kwargs):
        if data["kind"] == "silent":
            return 1.0
        greedy = {"greedy": {"temperature": 0}, "unstored": {"store": False}}.get(data["kind"], {})
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            messages = [{"role": "user", "content": "say " + data["kind"]}]
            answer = await client.chat.completions.create(model="policy", messages=messages, max_tokens=3, **greedy)
        if data["kind"] == "blocking":
            time.sleep(0.8)
        if data["kind"] == "broken":
            raise KeyError("answer")
        if data["kind"] == "odd":
            raise Odd("lone \\ud800 surrogate")
        return float(len(answer.choices[0].message.content or "")) if data["kind"] == "fine" else 0.0
'''
CONFIG = """
experiment_name: tried
model: tiny
total_steps: 2
dataset: {jsonl: problems.jsonl}
rollout: {workflow: "agent.py:Agent", group_size: 4}
engine: {max_length: 128}
"""


def tried(where: Path, *kinds: str, words: tuple[str, ...] = ()):
    """The result of the command on one problem of each kind."""
    (where / "agent.py").write_text(AGENT)
    (where / "job.yaml").write_text(CONFIG)
    (where / "problems.jsonl").write_text("".join(json.dumps({"kind": kind}) + "\n" for kind in kinds))
    return CliRunner().invoke(cli, ["try", str(where / "job.yaml"), *words], catch_exceptions=False)


def test_try_names_problems_that_prevent_learning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Failures with file and line, episodes without a request, equal rewards, greedy answers, a blocked event loop.

    Nothing is written next to the configuration.
    """
    monkeypatch.chdir(tmp_path)
    kinds = ("broken", "silent", "greedy", "blocking")
    result = tried(tmp_path, *kinds)

    shown = result.stdout
    assert 0 == result.exit_code
    assert "failed 4 times: Agent.run raised KeyError: 'answer'" in shown
    raised = 1 + AGENT.splitlines().index('            raise KeyError("answer")')
    assert f'agent.py", line {raised}, in run' in shown
    assert "8 of 16 episodes failed" in shown
    assert "4 of 16 episodes ended without an answer of the model" in shown
    assert "3 of 4 groups had equal rewards" in shown or "2 of 4 groups had equal rewards" in shown
    assert "were sampled at temperature 0" in shown
    slept = 1 + AGENT.splitlines().index("            time.sleep(0.8)")
    assert re.search(rf"agent\.py:{slept}, in run, kept the event loop for [0-3]\.\d s, in which all", shown)
    assert "user: say blocking" in shown
    assert {"agent.py", "job.yaml", "problems.jsonl"} >= {path.name for path in tmp_path.iterdir()} - {"__pycache__"}


def test_try_approves_agent_that_can_learn(tmp_path: Path):
    """The output has a conversation and the rewards of the groups; --output keeps the files."""
    result = tried(tmp_path, "fine", "fine", "fine", words=("-n", "2", "--output", str(tmp_path / "kept"), "--json"))
    found = json.loads(result.stdout)

    assert [4, 4] == [len(group["rewards"]) for group in found["groups"]]
    assert not any("equal" in sentence or "failed" in sentence for sentence in found["problems"])
    assert found["step_seconds"] > 0
    assert 8 == len((tmp_path / "kept" / "episodes.jsonl").read_text().splitlines())
    again = tried(tmp_path, "fine", words=("--output", str(tmp_path / "kept")))
    assert 2 == again.exit_code
    assert "is not empty" in again.output


def test_try_fails_if_every_episode_fails(tmp_path: Path):
    """The summary is printed before the error."""
    result = tried(tmp_path, "broken")

    assert 1 == result.exit_code
    assert "4 of 4 episodes failed" in result.stdout


def test_try_names_groups_of_one(tmp_path: Path):
    """Their rewards are not reported as equal."""
    result = tried(tmp_path, "fine", "fine", words=("rollout.group_size=1",))

    assert 0 == result.exit_code
    assert "- rollout.group_size is 1: a group of one has nothing to compare its reward with." in result.stdout
    assert "equal" not in result.stdout
    assert result.stderr.startswith("tried: loading tiny to try it\n")


def test_try_names_untrained_tokens_once(tmp_path: Path):
    """The reason is named: agents that send temperature 0 are answered and rewarded, but not trained."""
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "job.yaml").write_text(CONFIG)
    (tmp_path / "problems.jsonl").write_text('{"kind": "greedy"}\n')
    command = ["train", str(tmp_path / "job.yaml"), "total_steps=2", "batch_size=1", "logging.display=none"]
    result = CliRunner().invoke(cli, [*command, "--run-dir", str(tmp_path / "run")])

    assert 0 == result.exit_code, result.output
    log = RunDirectory(path=tmp_path / "run").log.read_text()
    assert 1 == log.count("tokens_not_trained")
    assert re.search(r"(\d+) of \1 sampled tokens are not trained: \1 were sampled at temperature 0", log)


@pytest.mark.parametrize("missing", ["dataset", "workflow"])
def test_try_refuses_configuration_without_agent_or_problems(tmp_path: Path, missing: str):
    """The error comes before the model is loaded."""
    config = CONFIG.replace("dataset: {jsonl: problems.jsonl}\n", "") if missing == "dataset" else CONFIG
    config = config.replace('workflow: "agent.py:Agent", ', "") if missing == "workflow" else config
    (tmp_path / "problems.jsonl").write_text('{"kind": "fine"}\n')
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "job.yaml").write_text(config)
    result = CliRunner().invoke(cli, ["try", str(tmp_path / "job.yaml")])

    assert 2 == result.exit_code
    assert missing in result.output
