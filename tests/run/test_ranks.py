"""A run whose training is done by two processes: it is the run of one, and can be taken up after a rank was killed."""

from __future__ import annotations

import json
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file

from areal_actors.cli import cli
from areal_actors.dashboard import RunDirectory
from areal_actors.training.stored_checkpoints import find_checkpoints

CONFIG = Path(__file__).parents[2] / "examples" / "tiny.yaml"
SETTINGS = (
    "total_steps=3",
    "batch_size=2",
    "rollout.group_size=6",
    "rollout.max_head_offpolicyness=0",
    "eval_dataset=null",
    "checkpoint.every_steps=1",
    "engine.max_concurrent=12",
    "engine.deterministic=true",
    "engine.num_threads=1",
    "logging.trackers=[]",
    "logging.display=plain",
    "engine.dtype=float32",  # one rounding of a log-probability to bfloat16 samples another token
    "trainer.dtype=float32",
    "trainer.max_packed_tokens=128",
    "trainer.optimizer.learning_rate=0.001",  # a step of AdamW has the sign of what may be rounding alone
)
MAX_SECONDS = 120.0


def run_here(run_dir: Path, num_processes: int, *more: str) -> Result:
    settings = (*SETTINGS, f"trainer.gang.num_processes={num_processes}", "trainer.gang.backend=gloo")
    return CliRunner().invoke(cli, ["train", str(CONFIG), *settings, "--run-dir", str(run_dir), *more])


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    path = RunDirectory(path=run_dir).metrics
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def ranks() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "areal_actors.worker" in child.cmdline()]


def kill_after_the_first_checkpoint(run_dir: Path) -> None:
    deadline = time.monotonic() + MAX_SECONDS
    while not find_checkpoints(RunDirectory(path=run_dir).checkpoints) and time.monotonic() < deadline:
        time.sleep(0.01)
    for rank in ranks():
        rank.send_signal(signal.SIGKILL)


def test_gang_continues_after_loss_of_process(tmp_path):
    """Two train as one does; a killed rank ends the run by name; resumed, it ends where one process would."""
    alone, gang = tmp_path / "alone", tmp_path / "gang"
    expected = run_here(alone, 1)
    killer = threading.Thread(target=kill_after_the_first_checkpoint, args=(gang,))
    killer.start()
    killed = run_here(gang, 2)
    killer.join()
    resumed = run_here(gang, 2, "--resume")

    assert 0 == expected.exit_code, expected.output
    assert 0 != killed.exit_code
    assert "Rank 1 of the 2 processes that train together failed" in killed.output
    assert str(gang / "logs" / "rank-1.log") in killed.output.replace("\n", "")
    assert [] == ranks()
    assert 0 == resumed.exit_code, resumed.output
    trained = [load_file(path / "weights" / "model.safetensors") for path in (alone, gang)]
    exported = CliRunner().invoke(cli, ["export", str(gang)])
    assert 0 == exported.exit_code, exported.output
    assert 2 == len(list(find_checkpoints(RunDirectory(path=gang).checkpoints)[-1].path.glob("model/shard-*")))
    for name, tensor in load_file(gang / "weights" / "model.safetensors").items():
        assert torch.equal(tensor, trained[1][name])
    for name, tensor in trained[0].items():
        torch.testing.assert_close(tensor, trained[1][name], rtol=1e-4, atol=1e-4)
    rows, others = read_metrics(alone), read_metrics(gang)
    assert [1, 2, 3] == [row["step"] for row in others]
    for name in ("reward", "loss", "kl", "entropy", "trained_tokens", "packed_tokens", "grad_norm"):
        assert [row[name] for row in rows] == pytest.approx([row[name] for row in others], rel=1e-4, abs=1e-5)
