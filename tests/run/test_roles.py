"""Calls of a user simulator and of a judge: attributed by URL, header and key, and never trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner, Result
from tests.run.trained import ENGINE

from areal_actors.cli import cli
from areal_actors.client import role_base_url
from areal_actors.errors import ConfigError
from areal_actors.rollouts.exporter import ExportConfig
from areal_actors.run.inference import InferenceConfig, open_inference

HERE = Path(__file__).parent
CONFIG = HERE.parents[1] / "examples" / "tiny.yaml"
SMALL = (
    "total_steps=1",
    "batch_size=2",
    "rollout.group_size=3",
    "eval_dataset=null",
    "engine.max_concurrent=8",
    "engine.num_threads=1",
    "logging.trackers=[]",
    "logging.display=plain",
    "trainer.dtype=float32",
    "trainer.optimizer.num_warmup_steps=0",
)
ASKED = {"model": "policy", "messages": [{"role": "user", "content": "Say 7."}], "max_tokens": 4}


def train(run_dir: Path, *overrides: str) -> Result:
    agent = f"rollout.workflow={HERE / 'role_agents.py'}:Simulated"
    return CliRunner().invoke(cli, ["train", str(CONFIG), *SMALL, agent, *overrides, "--run-dir", str(run_dir)])


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_untrained_roles_are_not_trained(tmp_path):
    """Each token of the agent is trained once, with the episode's reward; the report says why others are not."""
    result = train(tmp_path / "run", "rollout.train_roles=[agent]", "rollout.openai.export_style=tree")
    assert 0 == result.exit_code, result.output
    sessions = read(tmp_path / "run" / "sessions.jsonl")
    rows = [row for path in (tmp_path / "run" / "rollout").rglob("*.jsonl") for row in read(path)]
    page = (tmp_path / "run" / "report.html").read_text()

    assert sessions
    for session in sessions:
        others = {turn["id"] for turn in session["turns"] if turn["tag"]}
        assert [None, "user", None, "judge"] == [turn["tag"] for turn in session["turns"]]
        trained = [sum(value * num for value, num in turn["mask"]) for turn in session["turns"]]
        assert [0 if turn["tag"] else turn["num_tokens"] for turn in session["turns"]] == trained
        assert others == {one["interaction"] for one in session["untrained"]}
        assert {"other_role"} == {one["reason"] for one in session["untrained"]}
        # The judge has the last answer, and with it the reward; it counts for the agent's answers all the same.
        assert {session["reward"]} == {turn["return"] for turn in session["turns"] if not turn["tag"]}
    total = sum(turn["num_tokens"] for one in sessions for turn in one["turns"] if not turn["tag"])
    kept = {(one["task_id"], one["sample_idx"]) for one in sessions}
    spans = [row["trained"] for row in rows if (str(row["task_id"]), row["sample_idx"]) in kept]
    assert total == sum(last - first for row in spans for first, last in row)
    assert "other role" in page


def test_episode_without_trained_role_is_reported(tmp_path):
    """Otherwise, the run would wait for groups that have nothing to train."""
    result = train(tmp_path / "run", "rollout.train_roles=[solver]", "rollout.group_size=1", "batch_size=1")

    assert 1 == result.exit_code
    assert "No turn of the episode has a role of rollout.train_roles (solver)" in result.stderr


@pytest.mark.parametrize(("roles", "complaint"), [("[]", "names no role"), ("[a/b]", "has the role 'a/b'")])
def test_wrong_roles_are_refused(tmp_path, roles, complaint):
    """Before the run begins."""
    result = train(tmp_path / "run", f"rollout.train_roles={roles}")

    assert 2 == result.exit_code
    assert complaint in result.stderr


@pytest.mark.anyio
async def test_role_of_key_ignores_headers():
    """It answers completions and rewards nothing; export lists the turns that are not trained, with the reason."""
    config = InferenceConfig(engine=ENGINE, export=ExportConfig(train_roles=("agent",)))
    async with open_inference("tiny", config) as inference, httpx.AsyncClient() as client:
        url, admin = inference.endpoint.url, {"authorization": f"Bearer {inference.endpoint.admin_key}"}
        wanted = {"task_id": "game", "roles": ["user", "judge"]}
        started = (await client.post(f"{url}/rl/start_session", json=wanted, headers=admin)).raise_for_status().json()
        keys, session = started["role_keys"], started["session_id"]
        as_user = {"authorization": f"Bearer {keys['user']}", "x-areal-agent": "agent"}
        chat = f"{url}/v1/chat/completions"
        answers = [
            await client.post(chat, json=ASKED, headers={"x-api-key": started["completion_key"]}),
            await client.post(chat, json=ASKED, headers=as_user),
            await client.post(f"{url}/{session}@judge/v1/chat/completions", json=ASKED),
        ]
        names = [answer.raise_for_status().json()["id"] for answer in answers]
        forged = await client.post(f"{url}/rl/set_reward", json={"reward": 9}, headers={"x-api-key": keys["judge"]})
        bad = await client.post(f"{url}/rl/start_session", json={"roles": ["a b"]}, headers=admin)
        own = {"authorization": f"Bearer {started['api_key']}"}
        (await client.post(f"{url}/rl/finalize", json={"final_reward": 1.0}, headers=own)).raise_for_status()
        exported = await client.post(f"{url}/export_trajectories", json={"session_id": session}, headers=admin)
    document = exported.raise_for_status().json()

    assert {"user", "judge"} == set(keys)
    assert 5 == len({session, started["api_key"], started["completion_key"], *keys.values()})
    assert 403 == forged.status_code
    assert (400, "roles") == (bad.status_code, bad.json()["error"]["param"])
    assert [names[:1]] == [list(row["interaction_ids"]) for row in document["trajectories"]]
    assert {names[1]: "other_role", names[2]: "other_role"} == {
        one["interaction_id"]: one["reason"] for one in document["untrained"]
    }


def test_role_url_equals_session_url():
    """Wherever ``/v1`` stands; a role replaces another, and a URL without a session has none."""
    assert "http://h:1/task-x@judge/v1" == role_base_url("http://h:1/task-x/v1", "judge")
    assert "http://h:1/p/task-x@judge/v1" == role_base_url("http://h:1/p/task-x@user/v1", "judge")
    with pytest.raises(ConfigError, match="names no session"):
        role_base_url("http://h:1/v1", "judge")
