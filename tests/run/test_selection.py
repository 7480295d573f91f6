"""Which episodes are trained, over whole runs: full batches, masked answers, problems by difficulty, and no waste."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from areal_actors import Trainer, create_config
from areal_actors.cli.commands import cli
from areal_actors.dashboard import RunDirectory
from areal_actors.dashboard.records import read_records

HERE = Path(__file__)
TINY = HERE.parents[2] / "examples" / "tiny.yaml"
_SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
_FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}}


def problems(num: int, seed: int) -> Any:
    """Prompts that differ by a number."""
    return ({"text": f"say {seed + index}", "number": index} for index in range(num))


class Asker:
    """One answer of eight tokens; only problems of an odd number tell good answers from bad ones."""

    def __init__(self) -> None:
        self.run_problems: list[int] = []

    async def run(self, data: dict[str, Any], base_url: str, http_client: Any, **extra_kwargs: Any) -> float:
        self.run_problems.append(data["number"])
        answer = await ask(base_url, http_client, data["text"], max_tokens=8)
        return float(len(answer.encode()) % 2) if data["number"] % 2 else 1.0


class Hurried:
    """A first answer that is cut after two tokens, and a second one that comes to its end."""

    async def run(self, data: dict[str, Any], base_url: str, http_client: Any, **extra_kwargs: Any) -> float:
        first = await ask(base_url, http_client, data["text"], max_tokens=2)
        second = await ask(base_url, http_client, "say it in JSON", max_tokens=64, response_format=_FORMAT)
        return float("1" in second) + len(first) / 100


async def ask(base_url: str, http_client: Any, text: str, **options: Any) -> str:
    body = {"model": "policy", "messages": [{"role": "user", "content": text}]}
    response = await http_client.post(f"{base_url}/chat/completions", json=body | options)
    response.raise_for_status()
    return response.json()["choices"][0]["message"]["content"] or ""


def train(path: Path, agent: Any, *, steps: int = 1, resume: bool = False, **settings: Any) -> RunDirectory:
    """Steps of the tiny job, that every number depends on the seed alone."""
    config = create_config(
        {
            "experiment_name": "selection",
            "model": "tiny",
            "total_steps": steps,
            "batch_size": 2,
            "fileroot": str(path),
            "dataset": {"python": f"{HERE}:problems", "size": 6},
            "rollout": {"group_size": 4, "max_head_offpolicyness": 0} | settings.pop("rollout", {}),
            "engine": {"num_threads": 1, "max_length": 256, "deterministic": True},
            "trainer": {"dtype": "float32", "optimizer": {"learning_rate": 0.01}} | settings.pop("trainer", {}),
            "logging": {"trackers": [], "display": "none"},
        }
        | settings
    )
    Trainer(config).train(agent, resume=resume)
    return config.run_directory


def steps_of(directory: RunDirectory) -> list[dict[str, Any]]:
    return [json.loads(line) for line in directory.metrics.read_text().splitlines()]


def test_groups_without_signal_are_replaced_by_others(tmp_path: Path):
    """Half of the problems say nothing: the batches are full of the others, and the reward counts both."""
    agent = Asker()
    records = steps_of(train(tmp_path, agent, steps=2, trainer={"advantages": {"drop_zero_variance": True}}))

    for step in records:
        assert (step["episodes"], step["zero_variance_groups"]) == (8, 0)
        assert step["drawn_episodes"] == 8 + 4 * step["replaced_groups"]
    assert sum(step["replaced_groups"] for step in records) > 0
    assert len(agent.run_problems) == sum(step["drawn_episodes"] for step in records)


@pytest.mark.parametrize("style", ["individual", "concat", "tree"])
def test_truncated_answers_are_not_trained(tmp_path: Path, style: str):
    """With ``masks_truncated``, the second answers of all episodes are; the report says why the first are not."""
    directory = train(
        tmp_path,
        Hurried(),
        trainer={"objective": {"masks_truncated": True}},
        rollout={"openai": {"export_style": style}},
    )
    (step,) = steps_of(directory)
    sessions = [json.loads(line) for line in directory.sessions.read_text().splitlines()]
    untrained = Counter(entry["reason"] for session in sessions for entry in session["untrained"])

    assert 0 < step["truncated_turns"] <= 8
    assert step["truncated_tokens"] == 2 * step["truncated_turns"]
    assert step["trained_tokens"] == 8 * step["drawn_tokens_mean"] - step["truncated_tokens"]
    assert {"truncated"} == set(untrained)


@pytest.mark.parametrize(
    ("stop", "num_begun", "num_trained"), [("stop.reward=null", 16, 16), ("stop.reward=-1", None, 8)]
)
def test_every_episode_is_trained_or_listed(tmp_path: Path, stop: str, num_begun: int | None, num_trained: int):
    """None is begun for a step beyond the last; those that a run leaves when it stops early are listed."""
    words = ["train", str(TINY), f"fileroot={tmp_path}", "rollout.max_head_offpolicyness=4", "total_steps=2", stop]
    quick = ["batch_size=2", "rollout.group_size=4", "eval_dataset=null", "logging.display=none", "logging.page=false"]
    result = CliRunner().invoke(cli, [*words, *quick], catch_exceptions=False)
    run = RunDirectory(path=tmp_path / "tiny" / "trial")
    sampled = [row for path in run.rollouts.rglob("*.jsonl") for row in read_records(path)]
    num_episodes = sum(step["trained_episodes"] or 0 for step in read_records(run.metrics))
    listed = list(read_records(run.untrained))

    assert result.exit_code == 0, result.output
    assert (len(sampled), num_episodes) == (num_begun or len(sampled), num_trained)
    assert len(sampled) == num_trained + len(listed)
    places = {(row["task_id"], row["sample_idx"]) for row in listed}
    assert places <= {(str(row["task_id"]), row["sample_idx"]) for row in sampled}
    assert {"run_ended"} >= {row["reason"] for row in listed}
