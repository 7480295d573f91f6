"""``areal-actors eval``: equal numbers twice, nothing sampled again after a kill, any model, and bad input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tests.run.trained import train

from areal_actors.cli import cli
from areal_actors.config import create_config
from areal_actors.errors import EpisodeError
from areal_actors.run.evaluation import evaluate

HERE = Path(__file__).parent
AGENTS = HERE / "evaluated_agents.py"
SETTINGS: dict[str, Any] = {
    "experiment_name": "measured",
    "model": "tiny",
    "total_steps": 1,
    "eval_dataset": {"python": f"{AGENTS}:problems", "size": 3, "seed": 5},
    "rollout": {"workflow": f"{AGENTS}:Noting"},
    "engine": {"dtype": "float32", "device": "cpu", "max_length": 256, "num_threads": 1},
}
SETS = {"easy": SETTINGS["eval_dataset"], "hard": SETTINGS["eval_dataset"] | {"size": 2, "seed": 90}}


def write_config(root: Path, **changes: Any) -> Path:
    path = root / "config.yaml"
    path.write_text(json.dumps(SETTINGS | {"fileroot": str(root / "runs")} | changes))
    return path


def run_eval(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["eval", *map(str, arguments)])


def read(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def samples(directory: Path) -> dict[tuple[str, int], tuple[object, ...]]:
    """Reward and sampled ids of each episode."""
    records = read(directory / "episodes.jsonl")
    return {(one["task_id"], one["sample_idx"]): (one["reward"], one["ids_sha256"], one["tokens"]) for one in records}


def test_evaluation_is_repeatable(tmp_path):
    """Numbers, problems and sampled ids; a second set does not change the samples of the first."""
    agent = {"workflow": f"{AGENTS}:Noting", "workflow_kwargs": {"broken": 1}}
    several = write_config(tmp_path, eval_dataset=None, eval_datasets=SETS, rollout=agent)
    first = run_eval(several, "--k", 2, "--json", "--output", tmp_path / "first")
    second = run_eval(several, "--k", 2, "--json", "--output", tmp_path / "second", "evaluation.max_concurrent=2")
    (tmp_path / "less").mkdir()
    alone = write_config(tmp_path / "less", eval_dataset=None, eval_datasets={"hard": SETS["hard"]}, rollout=agent)
    run_eval(alone, "--k", 2, "--output", tmp_path / "alone")
    assert first.stderr.startswith("measured: loading tiny to evaluate it\n")
    summary = json.loads(first.stdout.splitlines()[-1])
    failures = read(tmp_path / "first" / "failures.jsonl")
    page = (tmp_path / "first" / "report.html").read_text()

    assert summary["sets"] == json.loads(second.stdout.splitlines()[-1])["sets"]
    assert samples(tmp_path / "first") == samples(tmp_path / "second")
    assert 10 == len(samples(tmp_path / "first"))
    hard = {key: value for key, value in samples(tmp_path / "first").items() if key[0].startswith("hard-")}
    assert hard == samples(tmp_path / "alone")
    assert [("easy", 3, 6, 2), ("hard", 2, 4, 2)] == [
        (one["source"], one["num_problems"], one["num_episodes"], one["num_failed"]) for one in summary["sets"]
    ]
    assert {"1", "2"} == set(summary["sets"][0]["passes"])
    assert "counts as reward 0" in summary["failed_episodes"]
    assert {("easy-1", 0), ("easy-1", 1), ("hard-1", 0), ("hard-1", 1)} == {
        (one["task_id"], one["sample_idx"]) for one in failures
    }
    assert all("this problem breaks the agent" in one["traceback"] for one in failures)
    assert "easy" in page
    assert "95 % confidence" in page


def test_killed_evaluation_resumes_with_missing_episodes(tmp_path):
    """No recorded episode is sampled again, and the results are those of an evaluation that was not interrupted."""
    config, notes, output = write_config(tmp_path), tmp_path / "notes", tmp_path / "killed"
    arguments = ["eval", str(config), "--k", "4", "--output", str(output), "evaluation.max_concurrent=1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "EVALUATED_NOTES": str(notes)}
    with (tmp_path / "log").open("w") as log:
        command = [sys.executable, "-m", "areal_actors", *arguments]
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + 90
            while len(read(output / "episodes.jsonl")) < 5 and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.01)
            process.send_signal(signal.SIGKILL)
        finally:
            process.kill()
            process.wait()
    recorded = samples(output)
    before = len(notes.read_text().splitlines())
    assert 5 <= len(recorded) < 12, (tmp_path / "log").read_text()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EVALUATED_NOTES", str(notes))
        resumed = run_eval(*arguments[1:], "--resume", "--json")
    again = [tuple(json.loads(line)) for line in notes.read_text().splitlines()[before:]]
    run_eval(config, "--k", 4, "--output", tmp_path / "whole")
    summary = json.loads(resumed.stdout.splitlines()[-1])
    archived = Counter((one["task_id"], one["sample_idx"]) for one in read(output / "sessions.jsonl"))

    assert not set(again) & set(recorded)
    assert 12 == len(set(again) | set(recorded))
    assert (len(recorded), True) == (summary["resumed_episodes"], summary["is_complete"])
    assert samples(tmp_path / "whole") == samples(output)
    assert {1} == set(archived.values())
    assert 11 <= len(archived)  # the process may have been killed before the conversation was written


def test_evaluation_finds_weights_by_step(tmp_path):
    """The newest, or those of a step that has a checkpoint; a finished run's are used as they are."""
    name = "measured/trial"
    trained = train(tmp_path, name, "total_steps=2", "checkpoint={every_steps: 1, keep: 2}")
    assert 0 == trained.exit_code, trained.output
    config, run = write_config(tmp_path), tmp_path / "measured" / "trial"
    untouched = sorted(path.relative_to(run) for path in run.rglob("*"))
    found = {}
    for step in ("", "@1", "@2", "@7"):
        output = ("--output", tmp_path / f"step{step}") if step else ()
        found[step] = run_eval(config, "--model", f"{run}{step}", "--json", *output)
    # Next to the run that is evaluated, which is not that of the configuration.
    beside = run.with_name("trial.eval") / "measured-trial-step-2"
    steps = {step: json.loads(result.stdout.splitlines()[-1])["step"] for step, result in found.items() if step != "@7"}

    assert {"": 2, "@1": 1, "@2": 2} == steps
    assert samples(beside) == samples(tmp_path / "step@2")
    assert samples(beside) != samples(tmp_path / "step@1")
    assert 1 == found["@7"].exit_code
    assert "it has those of 1, 2" in found["@7"].stderr
    assert not (tmp_path / "step@1" / "weights").exists()
    assert untouched == sorted(path.relative_to(run) for path in run.rglob("*"))


def test_evaluation_during_training_samples_one_version(tmp_path):
    """Every token has the version of its report; each step reports its evaluation, in order."""
    more = ("total_steps=3", "evaluation={every_steps: 1, num_samples: 2}", "checkpoint.every_steps=1")
    sets = f"eval_datasets={json.dumps(SETS)}"
    trained = train(tmp_path, "measured/trial", *more, sets)
    run = tmp_path / "measured" / "trial"
    steps = read(run / "metrics.jsonl")
    rows = {path.parent.name: read(path) for path in (run / "eval-rollout").rglob("easy-0.jsonl")}

    assert 0 == trained.exit_code, trained.output
    assert [0, 1, 2, 3] == [step["step"] for step in steps]
    assert {"0", "1", "2", "3"} == set(rows)
    for version, found in rows.items():
        assert {(0, version), (1, version)} == {(row["sample_idx"], str(row["head_version"])) for row in found}
        assert {version} == {str(row["tail_version"]) for row in found}
    for step in steps:
        means = [step["eval/easy/reward"], step["eval/hard/reward"]]
        assert step["eval_reward"] == pytest.approx((3 * means[0] + 2 * means[1]) / 5)
        assert {"eval/easy/pass_at_1", "eval/easy/pass_at_2"} <= step.keys()


def test_evaluation_without_success_is_an_error_with_results(tmp_path):
    """An agent that never calls the model is broken, not bad at the problems."""
    config = create_config(
        SETTINGS | {"fileroot": str(tmp_path), "rollout": {"workflow": f"{AGENTS}:Silent"}}, directory=tmp_path
    )
    with pytest.raises(EpisodeError, match="never called the model"):
        evaluate(config, output=tmp_path / "silent")

    assert {True} == {one["failed"] for one in read(tmp_path / "silent" / "episodes.jsonl")}


@pytest.mark.parametrize(
    ("changes", "arguments", "complaint"),
    [
        ({"eval_dataset": None}, (), "eval_dataset is missing"),
        ({"eval_datasets": SETS}, (), "names easy, hard, and there is eval_dataset"),
        ({"eval_dataset": None, "eval_datasets": {"a/b": SETTINGS["eval_dataset"]}}, (), "has the name 'a/b'"),
        ({}, ("--served-name", "x"), "give its URL as --model"),
        ({}, ("--model", "nowhere@3"), "there is no run in"),
        ({}, ("--model", "tinny"), "did you mean 'tiny'"),
        ({}, ("--resume",), "to resume"),
    ],
)
def test_evaluation_reports_mistakes_before_sampling(tmp_path, changes, arguments, complaint):
    """And leave no directory behind."""
    result = run_eval(write_config(tmp_path, **changes), *arguments, "--output", tmp_path / "out")

    assert 2 == result.exit_code, result.output
    assert complaint in result.stderr
    assert not (tmp_path / "out").exists()


def test_different_evaluation_is_not_resumed(tmp_path):
    """The message says what differs; the record stays as it was."""
    config, output = write_config(tmp_path), tmp_path / "out"
    assert 0 == run_eval(config, "--output", output).exit_code
    before = (output / "episodes.jsonl").read_bytes()
    refused = run_eval(config, "--output", output, "--resume", "seed=8")
    more = run_eval(config, "--output", output, "--resume", "--k", 2, "--json")

    assert 2 == refused.exit_code
    assert "It differs in seed: 1 -> 8" in refused.stderr
    assert (output / "episodes.jsonl").read_bytes().startswith(before)
    assert (3, 6) == (
        json.loads(more.stdout.splitlines()[-1])["resumed_episodes"],
        len(read(output / "episodes.jsonl")),
    )
