"""A run whose weights are published by disk."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from tests.run.trained import NAME, train


def test_a_run_publishes_by_disk(tmp_path: Path):
    """The weights of its last step are there for engines elsewhere, and are those that the run exports."""
    outcome = train(tmp_path, NAME, "trainer.publish=disk", "trainer.publish_keep=1", "engine.dtype=float32")

    assert 0 == outcome.exit_code, outcome.output
    published = tmp_path / NAME / "published"
    assert ["version-00000001"] == [path.name for path in published.iterdir()]
    served = load_file(published / "version-00000001" / "model.safetensors")
    exported = load_file(tmp_path / NAME / "weights" / "model.safetensors")
    assert all(torch.equal(tensor, exported[name].to(tensor.dtype)) for name, tensor in served.items())
