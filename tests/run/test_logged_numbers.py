"""Numbers that agents log, from the agent to the metrics of a step, the evaluation and the files of a run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from areal_actors.cli import cli
from areal_actors.dashboard import RunDirectory

CONFIG = Path(__file__).parents[2] / "examples" / "tiny.yaml"
AGENTS = Path(__file__).with_name("logging_agents.py")
SMALL = (
    "total_steps=1",
    "batch_size=2",
    "rollout.group_size=4",
    "eval_dataset.size=2",
    "engine.max_concurrent=16",
    "engine.num_threads=1",
    "logging.trackers=[]",
    "logging.display=plain",
    "trainer.dtype=float32",
)


def train(run_dir: Path, *overrides: str) -> Result:
    return CliRunner().invoke(cli, ["train", str(CONFIG), *SMALL, *overrides, "--run-dir", str(run_dir)])


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("mode", ["inline", "subprocess"])
def test_logged_numbers_are_in_metrics(tmp_path, mode):
    """Means and counts, failed episodes among them; evaluations have their own scope."""
    result = train(tmp_path / "run", f"rollout.workflow={AGENTS}:Logging", f"rollout.openai.mode={mode}")
    assert result.exit_code == 0, result.output
    directory = RunDirectory(path=tmp_path / "run")
    first, step = read(directory.metrics)

    assert (0.0, 2) == (first["eval-rollout/member"], first["eval-rollout/member/count"])
    assert (1.5, 8) == (step["rollout/member"], step["rollout/member/count"])
    assert (0.0, 2) == (step["eval-rollout/member"], step["eval-rollout/member/count"])
    assert (mode == "inline") == (step["rollout/pid"] == os.getpid())
    failures = read(directory.failures)
    assert failures
    assert {1.0} == {failure["logged"]["member"] for failure in failures}
    assert "rollout/member" in directory.report.read_text()


def test_logged_numbers_are_accepted_over_http(tmp_path):
    """A name that is logged again has the new value, and what is not a number is refused by name."""
    result = train(tmp_path / "run", f"rollout.workflow={AGENTS}:OverHttp")
    assert result.exit_code == 0, result.output
    _, step = read(RunDirectory(path=tmp_path / "run").metrics)

    assert (1.5, 8, 0) == (step["rollout/member"], step["rollout/member/count"], step["failed_episodes"])


def test_logged_value_that_is_not_a_number_fails_episode(tmp_path):
    """Every episode fails here, so the run ends with the reason."""
    result = train(tmp_path / "run", f"rollout.workflow={AGENTS}:Wrong", "eval_dataset=null")

    assert result.exit_code != 0
    assert "judge was logged as nan; log a finite number." in result.output
