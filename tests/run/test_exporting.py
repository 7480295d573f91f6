"""Weights of runs that stopped early: from the newest checkpoint, under the name of the run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from click.testing import CliRunner
from tests.run.trained import train
from transformers import AutoModelForCausalLM

from areal_actors.__main__ import cli


def test_a_checkpoint_becomes_weights(tmp_path: Path):
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
