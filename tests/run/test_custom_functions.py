"""Functions that a configuration names: they train, in workers too, and a wrong one fails by name and costs nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from areal_actors.cli import cli
from areal_actors.dashboard import RunDirectory
from areal_actors.training.stored_checkpoints import find_checkpoints

EXAMPLES = Path(__file__).parents[2] / "examples"
CONFIG = EXAMPLES / "tiny.yaml"
SMALL = (
    "total_steps=2",
    "batch_size=2",
    "rollout.group_size=4",
    "eval_dataset.size=2",
    "engine.max_concurrent=16",
    "engine.num_threads=1",
    "logging.trackers=[]",
    "logging.display=plain",
    "trainer.dtype=float32",
)
RULE = f"{EXAMPLES}/property_test.py:best_continuation"


def train(run_dir: Path, *overrides: str) -> Result:
    return CliRunner().invoke(cli, ["train", str(CONFIG), *SMALL, *overrides, "--run-dir", str(run_dir)])


def steps_of(run_dir: Path) -> list[int]:
    path = RunDirectory(path=run_dir).metrics
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def write(tmp_path):
    """Writes a module and returns the reference of its ``f``."""

    def write(body: str) -> str:
        path = tmp_path / "mine.py"
        path.write_text(body)
        return f"{path}:f"

    return write


# ------------------------------------------------------------------------------------------------- reward rule


def test_custom_reward_rule_is_trained_with(tmp_path):
    """The example that Hypothesis attacks is named in the configuration; the run tries it at its start."""
    result = train(tmp_path / "run", f"rollout.openai.reward_rule={RULE}")

    assert result.exit_code == 0, result.output
    assert [0, 1, 2] == steps_of(tmp_path / "run")
    log = RunDirectory(path=tmp_path / "run").log.read_text()
    assert "works on the examples" in log


WRONG_RULES = {
    "def f(tree, discount):\n    return tree.rewards[1:]\n": "returned 0 numbers, []; a rule returns one number",
    "def f(tree, discount):\n    pass\n": "returned None of type NoneType; a rule returns one number for each of the 1",
    "def f(tree, discount):\n    return [float('nan')] * len(tree.ids)\n": "returned nan for interaction 0",
    "def f(tree, discount):\n    return [10**400] * len(tree.ids)\n": "for interaction 0; a return is a number",
    "def f(tree, discount):\n    tree.rewards[0] += 1\n    return tree.rewards\n": "must not change what it is given",
    "def f(tree):\n    return tree.rewards\n": "raised TypeError: f() takes 1 positional argument",
    "def g(tree, discount):\n    return tree.rewards\n": "has no 'f'; it has: g",
    "async def f(tree, discount):\n    return tree.rewards\n": "must be a plain 'def'",
    "1/0\n": "raised ZeroDivisionError",
}


@pytest.mark.parametrize("body", WRONG_RULES)
def test_wrong_reward_rule_fails_before_anything_is_written(tmp_path, write, body):
    """The run of the same name that is there already is untouched."""
    earlier = tmp_path / "run" / "metrics.jsonl"
    earlier.parent.mkdir()
    earlier.write_text("kept")
    result = train(tmp_path / "run", f"rollout.openai.reward_rule={write(body)}")

    assert result.exit_code != 0
    assert "rollout.openai.reward_rule: " in result.output
    assert "mine.py" in result.output
    assert WRONG_RULES[body] in " ".join(result.output.split())
    assert [earlier] == [path for path in earlier.parent.parent.rglob("*") if path.suffix == ".jsonl"]
    assert "kept" == earlier.read_text()


def test_failing_reward_rule_ends_run_before_step(tmp_path, write):
    """The message names the function, what it returned and the session; nothing was trained."""
    body = "def f(tree, discount):\n    return None if 'chatcmpl' in tree.ids[0] else tree.rewards\n"
    result = train(tmp_path / "run", f"rollout.openai.reward_rule={write(body)}", "eval_dataset=null")
    text = " ".join(result.output.split())

    assert result.exit_code != 0
    assert "mine.py:f returned None of type NoneType" in text
    assert "It was asked for session train-" in text
    assert [] == steps_of(tmp_path / "run")


# ------------------------------------------------------------------------------- advantages, policy loss, metrics

MINE = """
import numpy as np


def advantages(groups):
    result = []
    for group in groups:
        rewards = [episode.reward for episode in group.episodes if episode.failure is None]
        result.append([row.returns - np.mean(rewards) for row in group.rows])
    return result


def surrogate(logprobs, terms):
    return -terms.advantages * logprobs


def metric(step):
    return {"longest": max(row.trajectory.num_tokens for row in step.rows)}
"""


def metrics_of(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in RunDirectory(path=run_dir).metrics.read_text().splitlines()]


def learnt(run_dir: Path) -> list[tuple]:
    return [(row["reward"], row["loss"], row["grad_norm"]) for row in metrics_of(run_dir)[1:]]


def test_custom_functions_train_like_equal_built_in_ones(tmp_path):
    """Dr. GRPO and the plain policy gradient, written anew: rewards, loss and gradient are the same."""
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    options = ("engine.deterministic=true", "rollout.max_head_offpolicyness=0")
    custom = (
        f"trainer.advantages.normalisation={path}:advantages",
        f"trainer.objective.surrogate={path}:surrogate",
        f"trainer.metrics=[{path}:metric]",
    )
    built_in = (
        "trainer.advantages.normalisation=dr_grpo",
        "trainer.advantages.unit=episode",
        "trainer.objective.surrogate=reinforce",
    )
    results = [
        train(tmp_path / "custom", *options, *custom),
        train(tmp_path / "built_in", *options, *built_in),
    ]

    assert [0, 0] == [result.exit_code for result in results], [result.output for result in results]
    assert all(row["custom/longest"] > 10 for row in metrics_of(tmp_path / "custom")[1:])
    # The built-in loss takes a ratio of probabilities, whose gradient is rounded in another place.
    for built_in_step, custom_step in zip(learnt(tmp_path / "built_in"), learnt(tmp_path / "custom"), strict=True):
        assert built_in_step == pytest.approx(custom_step, rel=1e-5)


@pytest.mark.parametrize(
    ("setting", "body", "complaint"),
    [
        (
            "trainer.advantages.normalisation={}",
            "def f(groups):\n    return []\n",
            "returned 0 entries for the 4 groups",
        ),
        ("trainer.objective.surrogate={}", "def f(logprobs, terms):\n    return 0.0\n", "returned 0.0 of type float"),
        ("trainer.metrics=[{}]", "def f(step):\n    return 1.0\n", "returned 1.0 of type float in step 1"),
    ],
)
def test_custom_functions_are_tried_before_anything_is_written(tmp_path, write, setting, body, complaint):
    """The message names the setting; there is no run directory."""
    result = train(tmp_path / "run", setting.format(write(body)))

    assert result.exit_code != 0
    assert setting.partition("=")[0] in result.output
    assert f"mine.py:f {complaint}" in " ".join(result.output.split())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("setting", "body", "complaint"),
    [
        (
            "trainer.advantages.normalisation={}",
            "def f(groups):\n    return [[float('nan') if 'train' in g.id else 0.0 for _ in g.rows] for g in groups]\n",
            "returned nan for token",
        ),
        (
            "trainer.objective.surrogate={}",
            "def f(logprobs, terms):\n    return logprobs / (1 if len(logprobs) <= 5 else 0)\n",
            "returned -inf for a token with the log-probability",
        ),
        (
            "trainer.metrics=[{}]",
            "def f(step):\n    return {'a': float('nan') if 'train' in step.groups[0].id else 0.0}\n",
            "returned nan for 'a' in step 1",
        ),
    ],
)
def test_failing_custom_function_ends_run_before_step(tmp_path, write, setting, body, complaint):
    """The step is not taken: the weights are those of the checkpoint that is left, and the run can be resumed."""
    options = (f"trainer.optimizer.learning_rate={0.01}", "eval_dataset=null")
    result = train(tmp_path / "run", setting.format(write(body)), *options)
    text = " ".join(result.output.split())

    assert result.exit_code != 0
    assert f"mine.py:f {complaint}" in text
    assert "train-0-" in text or "step 1" in text
    assert [] == steps_of(tmp_path / "run")
    assert [0] == [checkpoint.step for checkpoint in find_checkpoints(RunDirectory(path=tmp_path / "run").checkpoints)]

    mended = train(tmp_path / "run", "eval_dataset=null", "--resume")

    assert mended.exit_code == 0, mended.output
    assert [1, 2] == steps_of(tmp_path / "run")
