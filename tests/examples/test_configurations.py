"""The configurations of the examples: they load, what they name is there, and what is held out is not trained on."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_actors.config import load_config
from areal_actors.datasets import find_overlap, load_problems
from areal_actors.models import BUILT_IN
from areal_actors.workflows import resolve_agent
from areal_actors.workflows.resolve import import_reference

pytest.importorskip("openai")

CONFIGURATIONS = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))


def test_there_are_some() -> None:
    """The test below must not pass for want of files."""
    assert len(CONFIGURATIONS) >= 3


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda path: path.stem)
def test_a_configuration_names_what_is_there(path: Path) -> None:
    """The model is built in, the agent can be made, and the two sets of problems share none."""
    config = load_config(path)
    train = load_problems(config.dataset, import_reference=import_reference)
    assert config.eval_dataset is not None
    held_out = load_problems(config.eval_dataset, import_reference=import_reference)

    assert config.model in BUILT_IN
    assert resolve_agent(config.rollout.workflow, workflow_kwargs=config.rollout.workflow_kwargs)
    assert find_overlap(train, held_out) == 0
    assert len(train) >= config.batch_size
