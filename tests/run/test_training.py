"""Whole runs of the tiny job: they rise, they resume exactly, and they end as they were asked to, saying why."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tests.plugins import skipping_without_plugin
from tests.stacks.commands import Command, start_command
from transformers import AutoModelForCausalLM, AutoTokenizer

import areal_actors
from areal_actors.cli import cli
from areal_actors.dashboard import RunDirectory
from areal_actors.training.stored_checkpoints import find_checkpoints

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "examples" / "tiny.yaml"
SMALL = (
    "batch_size=3",
    "rollout.group_size=6",
    "eval_dataset.size=4",
    "engine.max_concurrent=18",
    "engine.deterministic=true",
    "engine.num_threads=1",
    "logging.trackers=[]",
    "logging.display=plain",
    "trainer.dtype=float32",
)
MAX_SECONDS = 120.0


def settings(run_dir: Path, *more: str) -> list[str]:
    return ["train", str(CONFIG), *SMALL, *more, "--run-dir", str(run_dir)]


def run_here(run_dir: Path, *more: str) -> Result:
    """The command line, inside this process."""
    return CliRunner().invoke(cli, settings(run_dir, *more))


@contextmanager
def run_elsewhere(run_dir: Path, *more: str, **environment: str) -> Iterator[Command]:
    """The command line, in a process that may be killed; nothing of it is left behind."""
    log, variables = run_dir.parent / f"{run_dir.name}.log", {"PYTHONPATH": str(ROOT / "src"), **environment}
    with start_command(*settings(run_dir, *more), log=log, variables=variables) as process:
        yield process


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    path = RunDirectory(path=run_dir).metrics
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def wait_for_step(process: Command, run_dir: Path, step: int) -> None:
    """Until a step has been recorded; nothing tells of it but the file."""
    wait_until(lambda: process.poll() is not None or any(row["step"] >= step for row in read_metrics(run_dir)))
    assert process.poll() is None, (run_dir.parent / f"{run_dir.name}.log").read_text()


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + MAX_SECONDS
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def essence(run_dir: Path) -> list[dict[str, Any]]:
    """What a run learnt, without the time that it took and what was sampled meanwhile."""
    took = ("seconds", "per_second", "sampled_tokens")
    return [{k: v for k, v in row.items() if not k.endswith(took)} for row in read_metrics(run_dir)]


def rollouts(run_dir: Path) -> dict[str, list[str]]:
    """The dumped rows by version and task; episodes of a group end in any order."""
    root = RunDirectory(path=run_dir).rollouts
    return {str(path.relative_to(root)): sorted(path.read_text().splitlines()) for path in root.rglob("*.jsonl")}


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """Six steps without an interruption."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    return run_dir, run_here(run_dir, "total_steps=6", "checkpoint.every_steps=2")


def test_tiny_job_learns(whole_run: tuple[Path, Result]):
    """The reward rises in a few steps, the last line is a summary, and transformers loads the weights."""
    run_dir, result = whole_run
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout.splitlines()[-1])
    rows = read_metrics(run_dir)
    weights = RunDirectory(path=run_dir).weights

    assert [0, 1, 2, 3, 4, 5, 6] == [row["step"] for row in rows]
    assert summary["eval_last"] > summary["eval_first"] + 0.2
    assert (6, 6, str(run_dir)) == (summary["steps"], summary["version"], summary["run_dir"])
    assert (rows[1]["reward"], rows[-1]["reward"]) == (summary["reward_first"], summary["reward_last"])
    assert {0.0} == {row["staleness_max"] for row in rows[1:]}
    assert AutoModelForCausalLM.from_pretrained(weights).num_parameters() > 100_000
    assert AutoTokenizer.from_pretrained(weights).chat_template
    assert RunDirectory(path=run_dir).report.stat().st_size > 1000


def test_killed_run_resumes_with_equal_numbers(whole_run: tuple[Path, Result], tmp_path: Path):
    """``kill -9`` between two checkpoints: the resumed run equals the uninterrupted one, number by number."""
    expected, _ = whole_run
    run_dir = tmp_path / "run"
    options = ("total_steps=6", "checkpoint.every_steps=2", "logging.row_dumps.every_steps=1")
    with run_elsewhere(run_dir, *options) as process:
        wait_for_step(process, run_dir, 3)
        process.kill()
        process.wait()
    (checkpoint,) = find_checkpoints(RunDirectory(path=run_dir).checkpoints)
    result = run_here(run_dir, *options, "--resume")

    assert result.exit_code == 0, result.output
    assert checkpoint.step in (2, 4)
    assert essence(expected) == essence(run_dir)
    assert rollouts(expected) == rollouts(run_dir)
    verified = verify_run(run_dir)
    assert (6, True) == (verified.num_dumps, verified.is_complete), verified.differences


def test_run_killed_before_checkpoint_samples_no_group_again(whole_run: tuple[Path, Result], tmp_path: Path):
    """Its steps are repeated with the same groups and give the same numbers."""
    expected, _ = whole_run
    run_dir = tmp_path / "run"
    options = ("total_steps=3", "checkpoint.every_steps=100")
    with run_elsewhere(run_dir, *options) as process:
        wait_for_step(process, run_dir, 2)
        process.kill()
        process.wait()
    result = run_here(run_dir, *options, "--resume=auto")

    again = run_here(run_dir, *options, "--resume=auto", "total_steps=2")

    assert (0, 0) == (result.exit_code, again.exit_code), result.output
    assert "already_trained" in again.stderr
    assert "already_trained" not in result.stderr
    assert [0, 1, 2, 3] == [row["step"] for row in read_metrics(run_dir)]
    assert 0 == read_metrics(run_dir)[2]["sampled_tokens"]
    assert essence(expected)[:3] == essence(run_dir)[:3]


def verify_run(path: Path) -> Any:
    """What the command ``verify`` finds in the run."""
    with skipping_without_plugin():
        from areal_actors_evals.verifying import verify_run as verify
    return verify(path)


# ------------------------------------------------------------------------------------------------- what is wrong


PACKAGE = Path(areal_actors.__file__).parent


def complaint(result: Result, exit_code: int) -> str:
    """The one message of a run that could not be. Only an agent's traceback may come before it."""
    assert exit_code == result.exit_code, (result.output, result.exception)
    assert f'File "{PACKAGE}' not in result.output
    lines = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert 1 == len(lines), result.output
    return result.stderr[result.stderr.index("Error: ") :]


def test_an_agent_that_always_fails_ends_the_run_with_its_error(tmp_path: Path):
    """The user reads what their agent raised, and not only that nothing was learnt."""
    agent = tmp_path / "failing_agent.py"
    agent.write_text("class Agent:\n    async def run(self, data, **extra): raise KeyError('my_field')\n")
    message = complaint(
        run_here(tmp_path / "run", f"rollout.workflow={agent}:Agent", "total_steps=2", "eval_dataset=null"), exit_code=1
    )

    assert "KeyError: 'my_field'" in message


def test_full_disk_ends_run_with_advice(tmp_path: Path):
    """An incomplete checkpoint is not kept, and the earlier files are untouched."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))  # Python sees EFBIG where a full disk says ENOSPC
    try:
        result = run_here(tmp_path / "run", "total_steps=1", "eval_dataset=null")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    message = complaint(result, exit_code=1)

    assert "could not be written" in message
    assert "Free some space" in message
    assert () == find_checkpoints(RunDirectory(path=tmp_path / "run").checkpoints)
    assert [1] == [row["step"] for row in read_metrics(tmp_path / "run")]
