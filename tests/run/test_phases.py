"""Runs of several phases on the tiny model: one axis of steps, stopped and resumed in the middle of any of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from attrs import evolve
from safetensors.torch import load_file

from areal_actors.config import create_config, load_config
from areal_actors.dashboard import RunDirectory
from areal_actors.errors import ConfigError, DatasetError
from areal_actors.run import Server, Trainer

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = (
    "batch_size=2",
    "rollout.group_size=2",
    "eval_dataset.size=2",
    "sft.batch_size=4",
    "engine={max_concurrent: 8, max_length: 128, deterministic: true, num_threads: 1}",
    "logging={tensorboard: false, display: plain}",
    "trainer.dtype=float32",
    "trainer.optimizer.num_warmup_steps=1",
    "checkpoint.every_steps=1",
)


def configure(*more):
    """The warm start, made small."""
    return load_config(EXAMPLES / "warm_start.yaml", (*SMALL, *more))


def read_metrics(run_dir):
    """The records of all steps."""
    return [json.loads(line) for line in RunDirectory(path=run_dir).metrics.read_text().splitlines()]


def weights(run_dir):
    """The exported weights."""
    return load_file(RunDirectory(path=run_dir).weights / "model.safetensors")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of three supervised steps and two on rewards."""
    path = tmp_path_factory.mktemp("phases") / "whole"
    Trainer(configure("sft.steps=3", "total_steps=5", "evaluation.every_steps=2")).train(run_dir=path)
    return path


def test_phases_share_one_axis(whole):
    """Steps are counted on; each is named; no agent samples in a supervised one, which has no reward."""
    records = read_metrics(whole)

    assert [(record["step"], record["phase"]) for record in records] == [
        (0, None), (1, "sft"), (2, "sft"), (3, "sft"), (4, "rl"), (5, "rl"),
    ]  # fmt: skip
    assert [record["reward"] is None for record in records] == [True] * 4 + [False] * 2
    assert [record["step"] for record in records if record["eval_reward"] is not None] == [0, 2, 3, 4, 5]
    assert records[1]["loss"] > records[3]["loss"] > 0
    assert all(record["behaviour_gap_mean"] is None and record["staleness_mean"] is None for record in records[:4])
    assert all(record["behaviour_gap_mean"] < 1e-4 for record in records[4:] if record["num_updates"])
    assert records[1]["trained_episodes"] == 4
    assert [record["learning_rate"] for record in records[3:]] == [0.004, 0.001, 0.001]


@pytest.mark.parametrize("stopped", [2, 4])
def test_a_run_resumes_within_any_phase(whole, tmp_path, stopped):
    """Ended after a step and resumed, the run has the weights of the one that was not."""
    path = tmp_path / "run"
    settings = ("sft.steps=3", "total_steps=5", "evaluation.every_steps=2")
    config = configure(*settings)
    steps = config.sft.steps if stopped > 3 else stopped
    phases = config.phases if stopped > 3 else config.phases[:1]
    short = evolve(config, total_steps=stopped, sft=evolve(config.sft, steps=steps), phases=phases)
    Trainer(short).train(run_dir=path)

    Trainer(config).train(run_dir=path, resume=True)

    expected = weights(whole)
    assert [record["step"] for record in read_metrics(path)] == [0, 1, 2, 3, 4, 5]
    for name, weight in weights(path).items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-6)


def test_conversations_alone_need_no_agent(tmp_path):
    """A file and a model are enough; the weights are exported."""
    settings = {
        "experiment_name": "sft",
        "model": "tiny",
        "phases": ["sft"],
        "sft": {"jsonl": str(EXAMPLES / "warm_start.jsonl")},
        "total_steps": 2,
        "engine": {"max_length": 128},
        "logging": {"tensorboard": False, "display": "plain"},
    }

    summary = Trainer(create_config(settings)).train(run_dir=tmp_path / "run")

    assert summary.steps == 2
    assert [record["phase"] for record in read_metrics(tmp_path / "run")] == ["sft", "sft"]
    assert weights(tmp_path / "run")


def test_rollouts_of_a_run_warm_up_another(whole, tmp_path):
    """With the ids that were sampled; all of them here, as none has a reward."""
    data = f"sft={{run: {whole}, steps: 1, batch_size: 4}}"

    summary = Trainer(configure(data, "total_steps=1", "phases=[sft]")).train(run_dir=tmp_path / "run")

    assert summary.steps == 1
    with pytest.raises(DatasetError, match="None of the 8 episodes"):
        bad = configure(f"sft={{run: {whole}, min_reward: 0.5}}", "total_steps=1", "phases=[sft]")
        Trainer(bad).train(run_dir=tmp_path / "bad")


def test_mistakes_in_the_data_change_nothing_on_disk(whole, tmp_path):
    """An earlier run in the same directory stays where it is."""
    data = tmp_path / "data.jsonl"
    data.write_text('{"messages": []}\n')
    before = sorted(whole.parent.iterdir())

    with pytest.raises(DatasetError, match="line 1: messages must be a list of at least one"):
        Trainer(configure(f"sft.jsonl={data}")).train(run_dir=whole)
    with pytest.raises(
        DatasetError, match=r"sft.batch_size is 81, and there are 80 conversations in .*warm_start.jsonl"
    ):
        Trainer(configure("sft.batch_size=81")).train(run_dir=whole)
    with pytest.raises(DatasetError, match="conversations are longer than the 20 tokens that can be sampled"):
        Trainer(configure("engine.max_length=20")).train(run_dir=whole)

    assert sorted(whole.parent.iterdir()) == before


def test_a_service_has_no_phases(tmp_path):
    """It says how to use the others."""
    with pytest.raises(
        ConfigError, match=r"a service trains in the phase rl only, not \[sft, rl\]; run the others with"
    ):
        Server(configure()).serve(run_dir=tmp_path)
