"""What a run needs before it begins."""

from __future__ import annotations

import pytest

from areal_actors.config import create_config
from areal_actors.errors import ConfigError
from areal_actors.models import resolve_model
from areal_actors.run.job import create_policy


def create(device: str, **trainer):
    dataset = {"python": "examples/tiny_agent.py:problems"}
    settings = {"experiment_name": "e", "total_steps": 1, "model": "tiny", "dataset": dataset}
    config = create_config({**settings, "trainer": {"device": device, **trainer}})
    return create_policy(config, resolve_model("tiny"))


def test_the_policy_lives_on_its_device():
    """Named, it is that one; in a gang the ranks take theirs later, and until then it is on the CPU."""
    assert "cpu" == create("cpu").model.device.type
    assert "cpu" == create("auto", gang={"num_processes": 2}).model.device.type


@pytest.mark.parametrize("device", ["cuda:99", "abacus"])
def test_a_device_that_is_not_there_is_named(device):
    """Before anything is sampled."""
    with pytest.raises(ConfigError, match=rf"trainer\.device.*{device}"):
        create(device)
