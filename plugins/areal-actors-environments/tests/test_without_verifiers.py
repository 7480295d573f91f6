"""Environments of verifiers where the package is absent: how they are configured, and what is missing."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from click.testing import CliRunner

from areal_actors.cli import cli
from areal_actors.config import create_config, load_config, save_config
from areal_actors.errors import ConfigError
from areal_actors.workflows import PluginWorkflow
from areal_actors_environments.tasksets import VerifiersPlugin
from areal_actors_environments.verifiers import VerifiersConfig

EXAMPLE = Path(__file__).parents[3] / "examples" / "verifiers.yaml"
absent = pytest.mark.skipif(find_spec("verifiers") is not None, reason="verifiers is installed")


def configure(workflow, **settings):
    base = {"experiment_name": "environments", "total_steps": 1, "model": "tiny"}
    return create_config(base | {"rollout": {"workflow": workflow}} | settings)


def test_the_example_names_its_taskset_beside_it(tmp_path):
    """Relative to the configuration; the configuration that a run keeps is equal."""
    config = load_config(EXAMPLE)
    save_config(config, tmp_path / "config.yaml")
    taskset = config.rollout.workflow.plugin.taskset

    assert f"{EXAMPLE.parent}/verifiers_tasks.py:DigitsTaskset" == taskset.id
    assert "verifiers_tasks.py:DigitsTaskset" == Path(config.eval_dataset.plugins["verifiers"].id).name
    assert load_config(tmp_path / "config.yaml") == config


def test_names_alone_are_enough():
    """An absent harness is the taskset's own, and YAML's null is the harness of that name."""
    short = configure({"verifiers": {"taskset": "gsm8k", "harness": "bash"}}).rollout.workflow
    absent = configure({"verifiers": {"taskset": "gsm8k"}}).rollout.workflow.plugin.harness
    unquoted = configure({"verifiers": {"taskset": "gsm8k", "harness": None}}).rollout.workflow.plugin.harness

    wanted = VerifiersConfig(taskset=VerifiersPlugin(id="gsm8k"), harness=VerifiersPlugin(id="bash"))
    assert PluginWorkflow(plugins={"verifiers": wanted}) == short
    assert ("default", None) == (absent.id, unquoted)


def test_problems_are_those_of_the_taskset_unless_a_dataset_is_named():
    """An agent of another kind has no problems of its own."""
    workflow = {"verifiers": {"taskset": {"id": "gsm8k", "options": {"split": "train"}}}}

    found = configure(workflow).training_sets[""].plugins
    assert {"verifiers": VerifiersPlugin(id="gsm8k", options={"split": "train"})} == found
    assert "a.jsonl" == Path(configure(workflow, dataset={"jsonl": "a.jsonl"}).training_sets[""].source).name
    assert {} == configure("module:Agent").training_sets


@pytest.mark.parametrize(
    ("workflow", "complaint"),
    [
        ({"verifers": {"taskset": "a"}}, "verifers is not a setting; did you mean verifiers?"),
        ({"verifiers": {"tasket": "a"}}, "verifiers.tasket is not a setting; did you mean taskset?"),
        ({"verifiers": {"taskset": {"options": {}}}}, "verifiers.taskset.id is missing"),
        ({"verifiers": {"taskset": "a"}, "command": ["sh"]}, "needs a type|is not a setting"),
    ],
)
def test_misspelt_settings_name_the_nearest(workflow, complaint):
    """Of the kinds of agents, the one that is nearest to what was written."""
    with pytest.raises(ConfigError, match=complaint.replace("?", "\\?")):
        configure(workflow)


@absent
def test_an_absent_package_is_named_before_the_first_step(tmp_path):
    """With the line that installs it; there is no run directory."""
    result = CliRunner().invoke(cli, ["train", str(EXAMPLE), "--run-dir", str(tmp_path / "run")])

    assert 2 == result.exit_code
    assert "pip install 'areal-actors-environments[verifiers]'" in result.stderr
    assert not (tmp_path / "run").exists()
