"""A run whose weights are published by disk."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.moe import save_moe
from tests.run.trained import NAME, train
from transformers import AutoModelForCausalLM

import areal_actors

SERVED = (
    "rollout.backend=sglang",
    f"sglang.environment.PYTHONPATH={Path(areal_actors.__file__).parents[1]}",  # as if its environment had it installed
    f"sglang.command={json.dumps([sys.executable, str(Path(__file__).with_name('serving_fake.py'))])}",
)


def test_run_publishes_by_disk(tmp_path: Path):
    """The weights of its last step are there for engines elsewhere, and are those that the run exports."""
    outcome = train(tmp_path, NAME, "trainer.publish=disk", "engine.dtype=float32")

    assert 0 == outcome.exit_code, outcome.output
    published = tmp_path / NAME / "published"
    assert "version-00000001" in [path.name for path in published.iterdir()]
    served = load_file(published / "version-00000001" / "model.safetensors")
    exported = load_file(tmp_path / NAME / "weights" / "model.safetensors")
    assert all(torch.equal(tensor, exported[name].to(tensor.dtype)) for name, tensor in served.items())


@pytest.mark.parametrize("shape", [(), SERVED], ids=["lent", "written for servers"])
def test_a_mixture_of_experts_is_trained_and_published(tmp_path: Path, shape: tuple[str, ...]):
    """What was sampled is what the trainer computes, and the result loads in transformers."""
    model = save_moe("qwen3_moe", tmp_path / "model")
    settings = (f"model={model}", "total_steps=2", "engine.dtype=float32", "trainer.dtype=float32", *shape)
    outcome = train(tmp_path, NAME, *settings)

    assert 0 == outcome.exit_code, outcome.output
    lines = (tmp_path / NAME / "metrics.jsonl").read_text().splitlines()
    steps = [record for record in map(json.loads, lines) if record.get("behaviour_gap_max") is not None]
    assert 2 == len(steps)
    assert all(record["behaviour_gap_max"] < 1e-4 for record in steps)
    _, report = AutoModelForCausalLM.from_pretrained(tmp_path / NAME / "weights", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
