"""Runs on several sources of problems: each with its agent, its share, its size of groups, its metrics."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.plugins import needs_plugin

from areal_actors import Trainer, create_config
from areal_actors.dashboard import RunDirectory
from areal_actors.errors import ConfigError, WorkflowError
from areal_actors.lib.plugins import PluginGroup

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
        "logging": {"display": "none", "trackers": [], "page": False},
    } | settings


def train(
    path: Path, sources: dict[str, dict[str, Any]], *, resume: bool = False, **settings: Any
) -> list[dict[str, Any]]:
    Trainer(create_config(settings_of(sources, **settings))).train(run_dir=path, resume=resume)
    lines = RunDirectory(path=path).metrics.read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["step"]]


def test_sources_have_own_agent_share_and_groups(tmp_path: Path) -> None:
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


def test_resumed_run_continues_sources(tmp_path: Path) -> None:
    """The numbers of each source are those of a run that was not interrupted."""
    sources = {"a": source(), "b": source(weight=3.0, workflow_kwargs={"factor": 2.0})}
    whole = train(tmp_path / "whole", sources, total_steps=3)
    train(tmp_path / "half", sources, total_steps=1)
    resumed = train(tmp_path / "half", sources, total_steps=3, resume=True)

    def rewards(steps: list[dict[str, Any]]) -> list[tuple[float, ...]]:
        return [tuple(row[f"source/{name}/reward"] for name in "ab") for row in steps]

    assert rewards(whole) == rewards(resumed)


def drawn_problems(path: Path) -> dict[str, list[tuple[int, str]]]:
    """By source, the position and the text of each problem that was run, in order."""
    found = set()
    for file in RunDirectory(path=path).rollouts.glob("*/*.jsonl"):
        row = json.loads(file.read_text().splitlines()[0])
        (name, _, position), (text,) = row["task_id"].partition("-"), re.findall(r"say \d+", row["prompt"])
        found.add((name, int(position), text))
    return {name: sorted((at, text) for source, at, text in found if source == name) for name, _, _ in found}


def levels(num: int, seed: int) -> Any:
    """The hardest problem is the first."""
    return ({"text": f"say {seed + index}", "level": num - index} for index in range(num))


class Solver(Asker):
    """It solves the two easiest problems always, and the others never."""

    async def run(self, data: dict[str, Any], base_url: str, http_client: Any, **extra_kwargs: Any) -> float:
        length = await super().run(data, base_url, http_client, **extra_kwargs)
        return 1.0 if data["level"] <= 2 else length / 1000


def test_difficulty_of_a_source_is_resumed(tmp_path: Path) -> None:
    """A resumed run draws the same problems, and its pools have the same numbers."""
    own = source(
        dataset={"python": f"{HERE}:levels", "size": 4, "seed": 0},
        workflow=f"{HERE}:Solver",
        difficulty={"enabled": True, "easy_fraction": 0.0},
    )
    sources = {"own": own, "plain": source(dataset={"python": f"{HERE}:problems", "size": 4, "seed": 50})}
    steps = train(tmp_path / "whole", sources, total_steps=4)
    train(tmp_path / "parts", sources, total_steps=2)
    resumed = train(tmp_path / "parts", sources, total_steps=4, resume=True)

    assert steps[-1]["source/own/easy_problems"] > 0
    assert "source/plain/solve_rate" not in steps[0]
    assert drawn_problems(tmp_path / "whole") == drawn_problems(tmp_path / "parts")
    keys = [key for key in steps[0] if not key.endswith(("seconds", "_mean", "per_second", "sampled_tokens"))]
    assert [[row[key] for key in keys] for row in steps] == [[row[key] for key in keys] for row in resumed]


@needs_plugin(PluginGroup.SANDBOXES, "bubblewrap")
def test_error_names_source_of_agent(tmp_path: Path) -> None:
    """With the setting of the source, not that of the run."""
    sources = {"some": source(), "boxed": source(sandbox={"backend": "bubblewrap"})}
    with pytest.raises(WorkflowError, match=r"^sources\.boxed: sources\.boxed\.sandbox: bubblewrap isolates"):
        train(tmp_path / "run", sources)
    with pytest.raises(WorkflowError, match=r"^sources\.lost: "):
        train(tmp_path / "run", {"some": source(), "lost": source(workflow=f"{HERE}:Nothing")})


def trained(path: Path, **settings: Any) -> list[dict[str, Any]]:
    """The numbers of the steps, without those of sources and of time."""
    Trainer(create_config(settings_of(settings.pop("sources", {}), **settings))).train(run_dir=path)
    records = map(json.loads, RunDirectory(path=path).metrics.read_text().splitlines())
    timed = ("seconds", "per_second", "seconds_mean")
    return [
        {key: value for key, value in row.items() if not key.endswith(timed) and not key.startswith("source/")}
        for row in records
    ]


def test_single_source_equals_dataset(tmp_path: Path) -> None:
    """The same problems, samples, gradients and weights, bit by bit."""
    one, rollout = source(), {"group_size": 2, "max_head_offpolicyness": 0}
    plain = trained(
        tmp_path / "plain", dataset=one["dataset"], rollout=rollout | {"workflow": one["workflow"]}, total_steps=3
    )
    single = trained(tmp_path / "single", sources={"only": one}, total_steps=3)
    weights = [(tmp_path / name / "weights" / "model.safetensors").read_bytes() for name in ("plain", "single")]

    assert plain == single
    assert any(row.get("grad_norm") for row in plain)
    assert weights[0] == weights[1]


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
    ],
)
def test_invalid_sources_are_refused(
    sources: dict[str, dict[str, Any]], settings: dict[str, Any], complaint: str
) -> None:
    """By name, before anything starts."""
    with pytest.raises(ConfigError) as raised:
        create_config(settings_of(sources, **settings))

    assert complaint in str(raised.value)
