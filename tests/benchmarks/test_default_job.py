"""The plain loop that the default job is compared with: it reads what a run dumps, and trains on it."""

from __future__ import annotations

import torch
from benchmarks.default_job import PlainLoop, read_calls

from areal_actors.config import load_config
from areal_actors.run import Trainer


def test_the_plain_loop_trains_on_the_episodes_of_a_run(tmp_path):
    settings = ["total_steps=1", "eval_dataset=null", "logging.display=none", "logging.trackers=[]"]
    config = load_config("examples/tiny.yaml", settings)
    Trainer(config).train(run_dir=tmp_path / "run")
    (directory,) = (tmp_path / "run" / "rollout").iterdir()
    calls = list(read_calls(directory))
    assert len({call.episode for call in calls}) == config.batch_size * config.rollout.group_size
    assert all(0 < call.prompt_length < len(call.ids) for call in calls)
    loop = PlainLoop(tmp_path / "run" / "weights")
    before = [parameter.clone() for parameter in loop.model.parameters()]
    loop.step(calls)
    assert any(not torch.equal(old, new) for old, new in zip(before, loop.model.parameters(), strict=True))
