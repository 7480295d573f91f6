"""Runs on several sources of problems: each with its agent, its share, its size of groups, its metrics."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from areal_actors import Trainer, create_config
from areal_actors.dashboard import RunDirectory
from areal_actors.errors import ConfigError, DatasetError, EpisodeError

HERE = Path(__file__)
SCRIPT = """
import json, os, sys, urllib.request
data = json.load(sys.stdin)
body = {"model": "policy", "messages": [{"role": "user", "content": data["text"]}], "max_tokens": 3}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode())
request.add_header("authorization", "Bearer " + os.environ["OPENAI_API_KEY"])
request.add_header("content-type", "application/json")
print(len(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]) % 3)
"""


def problems(num: int, seed: int) -> Any:
    """Prompts that differ by a number."""
    return ({"text": f"say {seed + index}"} for index in range(num))


class Asker:
    """One answer; its reward is the length of what it says, times a factor."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor

    async def run(self, data: dict[str, Any], base_url: str, http_client: Any, **extra_kwargs: Any) -> float:
        body = {"model": "policy", "messages": [{"role": "user", "content": data["text"]}], "max_tokens": 6}
        response = await http_client.post(f"{base_url}/chat/completions", json=body)
        return len(response.json()["choices"][0]["message"]["content"]) * self.factor


class Broken:
    """It always fails."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        raise ValueError("no environment")


def source(**settings: Any) -> dict[str, Any]:
    defaults = {"dataset": {"python": f"{HERE}:problems", "size": 4, "seed": 0}, "workflow": f"{HERE}:Asker"}
    return defaults | settings


def settings_of(sources: dict[str, dict[str, Any]], **settings: Any) -> dict[str, Any]:
    return {
        "experiment_name": "sources",
        "model": "tiny",
        "total_steps": 2,
        "batch_size": 4,
        "sources": sources,
        "rollout": {"group_size": 2, "max_head_offpolicyness": 0},
        "engine": {"deterministic": True, "dtype": "float32", "num_threads": 1, "max_length": 256},
        "trainer": {"dtype": "float32"},
        "logging": {"display": "none", "tensorboard": False, "page": False},
    } | settings


def train(
    path: Path, sources: dict[str, dict[str, Any]], *, resume: bool = False, **settings: Any
) -> list[dict[str, Any]]:
    Trainer(create_config(settings_of(sources, **settings))).train(run_dir=path, resume=resume)
    lines = RunDirectory(path=path).metrics.read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["step"]]


def test_each_source_has_its_agent_its_share_and_its_groups(tmp_path: Path) -> None:
    """Two agents in this process and a command; a set of held-out problems is run by the agent of its name."""
    command = [sys.executable, "-c", SCRIPT]
    steps = train(
        tmp_path / "run",
        {
            "plain": source(weight=2.0),
            "scaled": source(workflow_kwargs={"factor": 100.0}, group_size=3),
            "script": source(workflow={"command": command}, group_size=4, episode_timeout_seconds=60),
        },
        eval_datasets={"scaled": {"python": f"{HERE}:problems", "size": 2, "seed": 90}},
    )

    for row in steps:
        assert {"plain": 2, "scaled": 1, "script": 1} == {
            name: row[f"source/{name}/groups"] for name in ("plain", "scaled", "script")
        }
        assert (4, 3, 4) == tuple(row[f"source/{name}/episodes"] for name in ("plain", "scaled", "script"))
        assert row["source/scaled/reward"] >= 100.0 > row["source/plain/reward"]
        assert 0 == row["source/script/failed_episodes"]
    assert steps[-1]["eval/scaled/reward"] >= 100.0


def test_a_resumed_run_goes_on_with_the_same_problems(tmp_path: Path) -> None:
    """The numbers of each source are those of a run that was not interrupted."""
    sources = {"a": source(), "b": source(weight=3.0, workflow_kwargs={"factor": 2.0})}
    whole = train(tmp_path / "whole", sources, total_steps=3)
    train(tmp_path / "half", sources, total_steps=1)
    resumed = train(tmp_path / "half", sources, total_steps=3, resume=True)

    def rewards(steps: list[dict[str, Any]]) -> list[tuple[float, ...]]:
        return [tuple(row[f"source/{name}/reward"] for name in "ab") for row in steps]

    assert rewards(whole) == rewards(resumed)


def test_a_source_whose_groups_are_all_replaced_keeps_its_numbers(tmp_path: Path) -> None:
    """Its rewards are all equal, so that none of its groups is trained; the verdict needs to know."""
    sources = {"good": source(), "equal": source(workflow_kwargs={"factor": 0.0})}
    trainer = {"dtype": "float32", "advantages": {"drop_zero_variance": True, "max_refills": 1}}
    (row,) = train(tmp_path / "run", sources, total_steps=1, trainer=trainer)

    assert row["source/equal/replaced_groups"] > 0
    assert 0.0 == row["source/equal/reward"]
    replaced = sum(row[f"source/{name}/replaced_groups"] for name in sources)
    assert row["replaced_groups"] == replaced
    episodes = sum(row[f"source/{name}/episodes"] for name in sources)
    assert row["episodes"] + 2 * replaced == episodes


def test_an_empty_source_is_named(tmp_path: Path) -> None:
    """Among several, the one that has no problems."""
    (tmp_path / "none.jsonl").touch()
    with pytest.raises(DatasetError, match=r"^sources\.none: "):
        train(tmp_path / "run", {"some": source(), "none": source(dataset={"jsonl": str(tmp_path / "none.jsonl")})})


def test_a_source_that_always_fails_is_named(tmp_path: Path) -> None:
    """The others succeed all the time, which does not hide it."""
    with pytest.raises(EpisodeError, match=r"(?s)16 groups of source bad failed.*Broken.run raised ValueError"):
        train(tmp_path / "run", {"good": source(), "bad": source(workflow=f"{HERE}:Broken")}, total_steps=100)


@pytest.mark.parametrize(
    ("sources", "settings", "complaint"),
    [
        ({"a/b": source()}, {}, "sources has the name 'a/b'"),
        ({"a": source(dataset=None)}, {}, "sources has no dataset for a"),
        ({"a": source()}, {"dataset": {"jsonl": "x.jsonl"}}, "sources are given, and there is dataset"),
        ({"a": source(weight=0)}, {}, "weight must be > 0"),
        ({"a": source(workflow=None, workflow_kwargs={"factor": 1})}, {}, "has workflow_kwargs for a, and no workflow"),
        (
            {"a": source()},
            {"eval_dataset": {"jsonl": "x.jsonl"}},
            "no agent for the held-out problems of eval_dataset",
        ),
        ({"a": source()}, {"rollout": {"difficulty": {"enabled": True}}}, "rollout.difficulty draws from one dataset"),
    ],
)
def test_sources_that_cannot_be_run_are_refused(
    sources: dict[str, dict[str, Any]], settings: dict[str, Any], complaint: str
) -> None:
    """By name, before anything starts."""
    with pytest.raises(ConfigError) as raised:
        create_config(settings_of(sources, **settings))

    assert complaint in str(raised.value)


def test_a_source_without_an_agent_has_that_of_the_run(tmp_path: Path) -> None:
    """And a run without either is refused before it begins."""
    with pytest.raises(ConfigError, match="workflow is missing"):
        train(tmp_path / "none", {"a": source(workflow=None)})
    rollout = {"workflow": f"{HERE}:Asker", "group_size": 2, "max_head_offpolicyness": 0}
    (row,) = train(tmp_path / "run", {"a": source(workflow=None)}, rollout=rollout, total_steps=1)

    assert 8 == row["source/a/episodes"]
