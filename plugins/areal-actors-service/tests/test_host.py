"""A host as a real process, with a real service for each trial: what users notice of it, and what is left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import psutil
import pytest

from areal_actors.client import AgentRunner
from areal_actors.config import create_config
from areal_actors.dashboard import RunDirectory
from areal_actors.errors import ConfigError
from areal_actors_service.host import check_host

ROOT = Path(__file__).parents[3]
MAX_SECONDS = 240.0
QUICK = ("logging.trackers=[]", "logging.display=plain", "engine.num_threads=1", "batch_size=4")


@contextmanager
def host(fileroot: Path, *more: str) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """The command line, and its administrator."""
    command = ["host", str(ROOT / "examples/serve.yaml"), "host.port=0", f"fileroot={fileroot}", *QUICK, *more]
    # In the abstract namespace, whose names are short whatever the directory.
    name = f"areal-host-{os.getpid()}"
    variables = {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "NOTIFY_SOCKET": f"@{name}"}
    environment = os.environ | variables
    log = fileroot.with_suffix(".log")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"\0{name}")
        manager.settimeout(MAX_SECONDS)
        with log.open("a") as errors:
            running = subprocess.Popen(
                [sys.executable, "-m", "areal_actors", *command],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        try:
            assert running.stdout is not None
            found = re.match(r"Listening at (\S+); the admin key is in (\S+)\.$", running.stdout.readline())
            assert found, log.read_text()
            assert "starting the host; services load" in log.read_text()
            assert manager.recv(64) == b"READY=1"
            headers = {"authorization": f"Bearer {Path(found[2]).read_text().strip()}"}
            with httpx.Client(base_url=found[1], headers=headers, timeout=MAX_SECONDS) as admin:
                yield running, admin
        finally:
            running.kill()
            running.communicate()


def pids(admin: httpx.Client) -> dict[str, int]:
    return {each["id"]: each["pid"] for each in admin.get("/services").json()["data"] if each["pid"]}


def ask(admin: httpx.Client, key: str) -> httpx.Response:
    """A turn, as an SDK asks for it: again, when it is told to."""
    question = {"model": "policy", "max_tokens": 4, "messages": [{"role": "user", "content": "say 7"}]}
    deadline = time.monotonic() + MAX_SECONDS
    while True:
        headers = {"authorization": f"Bearer {key}"}
        answer = admin.post("/v1/chat/completions", json=question, headers=headers)
        if answer.status_code != 503 or time.monotonic() > deadline:
            return answer
        time.sleep(float(answer.headers["retry-after"]))


async def train(url: str, key: str) -> int:
    """Eight episodes by the runner, which is given what an environment gives; how many of them failed."""

    async def agent(item: int) -> float:
        async with httpx.AsyncClient(timeout=MAX_SECONDS) as client:
            question = {"model": "policy", "max_tokens": 8, "messages": [{"role": "user", "content": f"say {item}"}]}
            answer = await client.post(f"{url}/v1/chat/completions", json=question)
            text = answer.raise_for_status().json()["choices"][0]["message"]["content"] or ""
            return sum(letter.isdigit() for letter in text) / 8

    environment = {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": key}
    batch = await AgentRunner(environment=environment, is_quiet=True, max_concurrent=4).run(agent, range(8))
    return sum(result.error is not None for result in batch.results)


def num_steps(fileroot: Path, name: str) -> int:
    path = RunDirectory(path=fileroot / name).metrics
    return len(path.read_text().splitlines()) if path.exists() else 0


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + MAX_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def start(admin: httpx.Client, headers: dict[str, str]) -> dict[str, str]:
    """A session, as soon as there is capacity: the last groups of the batch may still be waiting to be trained."""
    deadline = time.monotonic() + MAX_SECONDS
    while True:
        answer = admin.post("/rl/start_session", json={"task_id": "mine"}, headers=headers)
        if answer.status_code not in (429, 503):
            return answer.raise_for_status().json()  # type: ignore[no-any-return]
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_host_trains_two_users_at_one_url(tmp_path: Path):
    """The whole story of a host.

    Each user's key trains the user's own experiment. A killed service comes back with its sessions while the other one
    goes on; a revoked key opens nothing; a killed host leaves no process, and its successor wakes a session's service.
    """
    fileroot = tmp_path / "runs"
    failed: dict[str, int] = {}
    # The file of all services may name a port for the page, where only one could listen.
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        host(fileroot, f"logging.page_port={taken.getsockname()[1]}") as (running, admin),
    ):
        issued = {user: admin.post("/keys", json={"user": user, "experiment": user}).json() for user in ("ada", "bob")}

        async def train_both() -> None:
            async def run(user: str) -> None:
                failed[user] = await train(str(admin.base_url), issued[user]["key"])

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(run, "ada")
                tasks.start_soon(run, "bob")

        anyio.run(train_both)
        wait_until(lambda: num_steps(fileroot, "ada/trial") and num_steps(fileroot, "bob/trial"))
        headers = {"authorization": f"Bearer {issued['ada']['key']}"}
        session = start(admin, headers)
        first = ask(admin, session["api_key"])
        before = pids(admin)
        os.kill(before["ada/trial"], signal.SIGKILL)
        others = ask(admin, issued["bob"]["key"])
        second = ask(admin, session["api_key"])
        after = pids(admin)
        admin.delete(f"/keys/{issued['bob']['id']}").raise_for_status()
        refused = ask(admin, issued["bob"]["key"])
        services = [psutil.Process(pid) for pid in after.values()]
        running.kill()
        psutil.wait_procs(services, timeout=20)

    assert {"ada": 0, "bob": 0} == failed
    assert [200] * 3 == [answer.status_code for answer in (first, others, second)]
    assert (before["bob/trial"], 401) == (after["bob/trial"], refused.status_code)
    assert before["ada/trial"] != after["ada/trial"]
    assert [] == [each for each in services if each.is_running()]
    with host(fileroot) as (running, admin):
        woken = ask(admin, session["api_key"])
        stranger = ask(admin, f"{session['api_key']}x")
        (pid,) = pids(admin).values()
        running.send_signal(signal.SIGINT)
        running.communicate(timeout=MAX_SECONDS)

    assert (200, 401, 0) == (woken.status_code, stranger.status_code, running.returncode)
    assert not psutil.pid_exists(pid)
    assert any(RunDirectory(path=fileroot / "ada/trial").checkpoints.iterdir())


def test_host_answers_with_the_weights_of_a_finished_trial(tmp_path: Path):
    """After its training, and after a restart of the host, which neither trains it again nor sets it aside.

    With ``serve.exit_when_trained`` its user gets 410, and no process is started for it.
    """
    fileroot, once = tmp_path / "runs", ("total_steps=1", "logging.page=false", "trainer.optimizer.learning_rate=0.1")
    record = RunDirectory(path=fileroot / "ada/trial").record

    def answer(admin: httpx.Client) -> list[float]:
        """The log-probabilities of the likeliest tokens: the same weights give the same."""
        body = {"model": "policy", "max_tokens": 4, "temperature": 0.0, "logprobs": True}
        body["messages"] = [{"role": "user", "content": "say 7"}]
        said = admin.post("/v1/chat/completions", json=body, headers=headers).raise_for_status().json()
        return [token["logprob"] for token in said["choices"][0]["logprobs"]["content"]]

    with host(fileroot, *once) as (running, admin):
        key = admin.post("/keys", json={"user": "ada", "experiment": "ada"}).json()["key"]
        headers = {"authorization": f"Bearer {key}"}
        untrained = answer(admin)
        anyio.run(train, str(admin.base_url), key)
        wait_until(lambda: json.loads(record.read_text())["status"] == "serving")
        trained = answer(admin)
        running.send_signal(signal.SIGINT)
        running.communicate(timeout=MAX_SECONDS)
    with host(fileroot, *once) as (running, admin):
        restarted = answer(admin)
        session = start(admin, headers)
        asked = ask(admin, session["api_key"])
        running.send_signal(signal.SIGINT)
        running.communicate(timeout=MAX_SECONDS)
    with host(fileroot, *once, "serve.exit_when_trained=true") as (_, admin):
        refused = [ask(admin, key), ask(admin, key)]
        started = pids(admin)

    assert trained == pytest.approx(restarted)
    assert trained != pytest.approx(untrained)
    assert (200, 1) == (asked.status_code, num_steps(fileroot, "ada/trial"))
    assert ["trial"] == [path.name for path in (fileroot / "ada").iterdir() if path.is_dir()]
    assert ([410, 410], {}) == ([answer.status_code for answer in refused], started)


BARE = {"experiment_name": "bare", "total_steps": 1, "model": "tiny"}


@pytest.mark.parametrize(
    ("section", "settings"),
    [
        ("journal.enabled", {"journal": {"enabled": False}}),
        ("journal.path", {"journal": {"path": "j.sqlite"}}),
        ("host.admin_key", {"host": {"host": "0.0.0.0"}}),
    ],
)
def test_host_refuses_settings_of_a_single_service(section: str, settings: dict[str, Any]):
    """It is refused before anything is written."""
    with pytest.raises(ConfigError, match=section):
        check_host(create_config(BARE | settings))
