"""A service under a supervisor: one command that is right at each start, also after ``kill -9``."""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path

import httpx
from tests.stacks.commands import start_command

CONFIG = """\
experiment_name: supervised
model: tiny
total_steps: 5
rollout: {group_size: 2}
engine: {max_length: 128}
logging: {display: none}
"""


@contextmanager
def served(where: Path):
    """The service, and where it listens. It is killed in the end."""
    words = ("serve", str(where / "job.yaml"), "--json", "--resume=auto", "--run-dir", str(where / "run"))
    with start_command(*words, log=where / "log") as process:
        yield json.loads(process.stdout.readline())


def test_killed_service_resumes_with_its_keys_and_sessions(tmp_path: Path):
    """The same command starts it and starts it again, here before the first checkpoint."""
    (tmp_path / "job.yaml").write_text(CONFIG)
    sessions, keys = [], []
    for _ in range(2):
        with served(tmp_path) as place:
            keys.append(Path(place["admin_key_file"]).read_text().strip())
            client = httpx.Client(base_url=place["url"], headers={"authorization": f"Bearer {keys[-1]}"})
            with client:
                if not sessions:
                    sessions.append(client.post("/rl/start_session", json={"task_id": "one"}).json())
                key = sessions[0]["api_key"]
                body = {"messages": [{"role": "user", "content": "say"}], "model": "policy", "max_tokens": 2}
                answer = client.post(
                    "/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"}, timeout=60
                )
                assert 200 == answer.status_code, answer.text

    assert keys[0] == keys[1]
    assert [] == list(tmp_path.glob("run.*"))
