"""The documented agents, trained for a step: only the model and the imports are changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.compat import agents

from areal_actors import Trainer, create_config

pytestmark = pytest.mark.filterwarnings("ignore:Async generator 'openai:ResourceWarning")  # trio, of the SDK's streams


def problems(num: int, seed: int) -> Any:
    """Questions that differ by a number."""
    return (
        {"messages": [{"role": "user", "content": f"What is {seed + index}+2?"}], "answer": "4"} for index in range(num)
    )


def train(path: Path, workflow: Any, **openai: Any) -> dict[str, Any]:
    """What the one step measured."""
    settings = {
        "experiment_name": "agents",
        "model": "tiny",
        "eval_dataset": None,
        "total_steps": 1,
        "batch_size": 2,
        "dataset": {"python": f"{Path(__file__)}:problems", "size": 8},
        "rollout": {"workflow": "tests.compat.agents.MyAgent", "group_size": 2, "openai": openai},
        "proxy": {"default_max_tokens": 4},
        "engine": {"num_threads": 1, "max_length": 256},
        "trainer": {"dtype": "float32"},
        "logging": {"trackers": [], "display": "plain"},
    }
    trainer = Trainer(create_config(settings))
    trainer.train(workflow, run_dir=path)
    step: dict[str, Any] = json.loads((path / "metrics.jsonl").read_text().splitlines()[-1])
    return step


@pytest.mark.parametrize("name", ["MyAgent", "KeyedAgent"])
def test_an_agent_is_trained_by_its_dotted_name(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the injected client and URL; the first one passes no key, and none is set."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    step = train(tmp_path, f"tests.compat.agents.{name}", mode="inline")

    assert (4, 0) == (step["episodes"], step["failed_episodes"])
    assert 0.5 <= step["reward"] <= 1.0


def test_a_synchronous_agent_is_trained_in_a_child_process(tmp_path: Path) -> None:
    """With the environment's URL, and a key that says nothing."""
    step = train(tmp_path, agents.MySyncAgent, mode="subproc", subproc_max_workers=1)

    assert (4, 0) == (step["episodes"], step["failed_episodes"])
    assert 0.5 <= step["reward"] <= 1.0


def test_rewards_by_completion_are_trained(tmp_path: Path) -> None:
    """Two completions, each with its own; an episode weighs their sum."""
    step = train(tmp_path, agents.PerCompletionAgent(), turn_discount=0.9, export_style="individual")

    assert (4, 0, 1.5) == (step["episodes"], step["failed_episodes"], step["reward"])
