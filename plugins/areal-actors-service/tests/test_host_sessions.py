"""A session at a host of real processes outlives its service, which comes and goes as places are wanted."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from attrs import frozen

from areal_actors.dashboard import RunDirectory
from areal_actors.errors import Unavailable
from areal_actors_service.messages import TrialId
from areal_actors_service.processes import ServiceProcesses

ROOT = Path(__file__).parents[3]
MAX_SECONDS = 240.0
QUICK = ("logging.trackers=[]", "logging.display=plain", "engine.num_threads=1", "host.port=0", "batch_size=4")
NAMES = ("ada", "bob")


@frozen(kw_only=True)
class Host:
    """A host that runs. ``admin`` is a client with the administrator's key."""

    process: subprocess.Popen[str]
    admin: httpx.Client

    @property
    def url(self) -> str:
        """Where it listens."""
        return str(self.admin.base_url).rstrip("/")

    def states(self) -> dict[str, str]:
        """What every service does."""
        listed = self.admin.get("/services").raise_for_status().json()["data"]
        return {each["id"]: each["state"] for each in listed}

    def children(self) -> list[psutil.Process]:
        """All processes that it has started."""
        found: list[psutil.Process] = psutil.Process(self.process.pid).children(recursive=True)
        return found

    def post(self, path: str, key: str, **fields: Any) -> dict[str, Any]:
        """Ask with another's key."""
        answer = self.admin.post(path, json=fields, headers={"authorization": f"Bearer {key}"})
        found: dict[str, Any] = answer.raise_for_status().json()
        return found

    def turn(self, key: str, messages: list[dict[str, Any]]) -> None:
        """One more turn of a conversation, with the SDK's own retries."""
        messages.append({"role": "user", "content": "say 7"})
        with openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=20) as client:
            asked: Any = messages
            answer = client.chat.completions.create(model="policy", messages=asked, max_tokens=8)
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})


@contextmanager
def hosted(root: Path, *more: str) -> Iterator[Host]:
    """The command line, killed when the block is left."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    arguments = ["host", str(ROOT / "examples" / "serve.yaml"), f"fileroot={root}", *QUICK, *more]
    log = root.with_suffix(".log")
    with log.open("a") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "areal_actors", *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "Listening at" in line, log.read_text()
        headers = {"authorization": f"Bearer {(root / 'host.key').read_text().strip()}"}
        url = line.split()[2].rstrip(";")
        with httpx.Client(base_url=url, headers=headers, timeout=MAX_SECONDS, trust_env=False) as admin:
            yield Host(process=process, admin=admin)
    finally:
        process.kill()
        process.communicate()


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for what another process does."""
    deadline = time.monotonic() + MAX_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_session_outlives_its_service(tmp_path: Path):
    """It is stopped when idle, with a checkpoint, and woken by the session's next turn; then it makes room for another.

    What an ordinary SDK sees is one conversation, which is one trajectory; strangers wake nobody meanwhile.
    """
    root = tmp_path / "runs"
    with hosted(root, "host.idle_seconds=1", "host.max_services=1", "host.make_room_seconds=0") as host:
        assert [] == host.children()
        keys = {
            user: host.admin.post("/keys", json={"user": user, "experiment": user}).json() for user in ("ada", "bob")
        }
        ada, bob = keys["ada"]["key"], keys["bob"]["key"]
        session = host.post("/rl/v1/start_session", ada, task_id="task-7")
        own, completing, name = session["api_key"], session["completion_key"], session["session_id"]
        messages: list[dict[str, Any]] = []
        host.turn(own, messages)
        wait_until(lambda: host.states() == {"ada/trial": "stopped"})
        checkpoints = list(RunDirectory(path=root / "ada" / "trial").checkpoints.iterdir())
        guess = host.admin.post(f"/{name[:-4]}0000/v1/chat/completions", headers={"authorization": "Bearer x"}, json={})
        assert ([], 404) == (host.children(), guess.status_code)
        host.turn(completing, messages)
        host.post("/rl/finalize", own, final_reward=1.0)
        rows = host.post("/export_trajectories", ada, session_id=name, discount=1.0, style="concat")
        host.turn(bob, [])

        assert 1 == sum(state in {"starting", "running"} for state in host.states().values())
    assert (1, 2) == (len(rows["trajectories"]), rows["num_turns"])
    assert checkpoints


@pytest.mark.anyio
async def test_host_leaves_another_run_of_that_name_alone(tmp_path: Path):
    """Whoever gets a key for the name of a run over a dataset does not go on with what that has learnt."""
    directory = RunDirectory(path=tmp_path / "sums" / "one")
    directory.path.mkdir(parents=True)
    directory.metrics.write_text("{}\n")
    provider = ServiceProcesses(settings=tmp_path / "host.yaml", fileroot=tmp_path)
    with pytest.raises(Unavailable, match="not a service of a host"):
        async with provider.open(TrialId("sums", "one")):
            pass

    assert [directory.metrics] == list(directory.path.iterdir())
