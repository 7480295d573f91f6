"""Weights of runs that stopped early: from the newest checkpoint, under the name of the run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from click.testing import CliRunner
from tests.run.trained import train
from transformers import AutoModelForCausalLM

from areal_actors.cli import cli
from areal_actors.dashboard import RowDumper, RunDirectory
from areal_actors.interchange import dump_path, find_dumps, write_rows
from areal_actors.messages import RowsTrained
from areal_actors.models import resolve_model


def test_checkpoint_is_exported_as_weights(tmp_path: Path):
    """They equal those that the run would have written; listing shows them; nothing to export is said."""
    result = train(tmp_path, "early/one", "checkpoint.every_steps=1")
    assert result.exit_code == 0, result.output
    run = tmp_path / "early" / "one"
    expected = AutoModelForCausalLM.from_pretrained(run / "weights").state_dict()
    shutil.rmtree(run / "weights")
    exported = CliRunner().invoke(cli, ["export", str(run)])
    found = AutoModelForCausalLM.from_pretrained(run / "weights").state_dict()
    listed = CliRunner().invoke(cli, ["models", "--fileroot", str(tmp_path)])
    shutil.rmtree(run / "checkpoints")
    refused = CliRunner().invoke(cli, ["export", str(run)])
    nowhere = CliRunner().invoke(cli, ["export", str(tmp_path / "none")])

    assert exported.exit_code == 0, exported.output
    assert {"model": "early/one", "step": 1, "path": str(run / "weights")} == json.loads(exported.stdout)
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())
    assert "early/one" in listed.stdout
    assert (1, 1) == (refused.exit_code, nowhere.exit_code)
    assert "nothing to export" in refused.output
    assert "There is no run" in nowhere.output


def test_adapter_is_exported_as_weights(tmp_path: Path):
    """A run with an adapter writes it and merged weights; a resumed run goes on, and an export writes both again."""
    settings = ("trainer.lora.rank=4", "trainer.optimizer.learning_rate=0.1", "checkpoint.every_steps=1")
    result = train(tmp_path, "adapted/one", *settings)
    assert result.exit_code == 0, result.output
    run = tmp_path / "adapted" / "one"
    (checkpoint,) = run.glob("checkpoints/step-*")
    assert not (checkpoint / "model.safetensors").exists()
    first = AutoModelForCausalLM.from_pretrained(run / "weights").state_dict()
    base = AutoModelForCausalLM.from_pretrained(resolve_model("tiny").path).state_dict()
    changed = {name for name in base if not torch.equal(base[name], first[name])}
    assert changed
    assert all(name.endswith("_proj.weight") for name in changed)
    files = {path.name: path.read_bytes() for path in (run / "adapter").iterdir()}
    for name in ("adapter", "weights"):
        shutil.rmtree(run / name)
    exported = CliRunner().invoke(cli, ["export", str(run)])
    assert exported.exit_code == 0, exported.output
    assert {path.name: path.read_bytes() for path in (run / "adapter").iterdir()} == files
    second = AutoModelForCausalLM.from_pretrained(run / "weights").state_dict()
    assert all(torch.equal(first[name], second[name]) for name in base)

    resumed = train(
        tmp_path, "adapted/one", *settings, "total_steps=2", "trainer.lora.exports_merged=false", "--resume"
    )
    assert resumed.exit_code == 0, resumed.output
    assert {path.name: path.read_bytes() for path in (run / "adapter").iterdir()} != files
    mistaken = train(tmp_path, "adapted/one", *settings, "trainer.lora.rank=8", "--resume")
    assert "trainer.lora.rank is 8; set it to that of the adapter" in mistaken.output


def test_rows_of_a_run_are_exported(tmp_path: Path):
    """Those of each step that was dumped; mistakes are named before anything is written."""
    result = train(tmp_path, "rows/one", "logging.row_dumps.every_steps=1", "total_steps=2")
    assert result.exit_code == 0, result.output
    run = tmp_path / "rows" / "one"

    def export(*arguments: str):
        return CliRunner().invoke(cli, ["export", str(run), *arguments])

    done = export("--format", "slime")
    samples = torch.load(run / "exports" / "slime" / "rollout_1.pt", weights_only=False)["samples"]
    again, forced = export("--format", "slime"), export("--format", "slime", "--force", "--steps", "2:")
    unknown, outside = export("--format", "slimme"), export("--format", "trl", "--steps", "5:9")
    wrong, misplaced = export("--format", "trl", "--steps", "a:b"), export("--output", str(tmp_path / "x"))
    shutil.rmtree(run / "rows")
    without = export("--format", "verl")

    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["files"] == {"0": 1, "1": 2}
    assert json.loads(done.stdout)["num_rows"] == 16
    assert {sample["metadata"]["step"] for sample in samples} == {2}
    assert all(sum(sample["loss_mask"]) for sample in samples)
    assert json.loads(forced.stdout)["files"] == {"0": 2}
    assert (1, 2, 1, 2, 2, 1) == tuple(
        found.exit_code for found in (again, unknown, outside, wrong, misplaced, without)
    )
    assert "--force" in again.output
    assert "did you mean slime?" in unknown.output
    assert "dumps are of steps 1 to 2" in outside.output
    assert "such as 3:10, not 'a:b'" in wrong.output
    assert "weights are written to RUN_DIR/weights" in misplaced.output
    assert "logging.row_dumps.every_steps=1" in without.output


def test_resumed_run_repeats_row_dumps(tmp_path: Path):
    """Files of steps after the checkpoint are removed first, and only the newest are kept if so configured."""
    directory = RunDirectory(path=tmp_path)
    for step in (1, 2, 3):
        write_rows(dump_path(directory.rows, step), [])
    dumper = RowDumper(directory, decode=str, num_kept=2, resumed_step=2)
    dumper.open()
    resumed = list(find_dumps(directory.rows))
    for step in (3, 4):
        dumper.on_event(RowsTrained(step=step, rows=()))
    dumper.close()

    assert resumed == [1, 2]
    assert list(find_dumps(directory.rows)) == [3, 4]
