"""The online service: it trains on what agents elsewhere do, as a run over a dataset would, and ends as asked."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx
import psutil
import pytest
from anyio import to_thread
from attrs import evolve
from tests.stacks.commands import Command, start_command

from areal_actors.client import OpenAIProxyClient, create_agent_http_client
from areal_actors.config import RunConfig, load_config
from areal_actors.dashboard import RunDirectory
from areal_actors.dashboard.run_record import RunRecord, read_record, write_record
from areal_actors.datasets import Problems, load_problems
from areal_actors.domain import RunStatus
from areal_actors.lib.references import import_reference
from areal_actors.messages import Endpoint
from areal_actors.run import openers
from areal_actors.run.serving import Server
from areal_actors.run.training import Trainer
from areal_actors.training.stored_checkpoints import find_checkpoints

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
MAX_SECONDS = 240.0
QUICK = ("logging.trackers=[]", "logging.display=plain", "engine.num_threads=1")


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    path = RunDirectory(path=run_dir).metrics
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


# ------------------------------------------------------------------------------------------ equal rows, equal losses


def essence(run_dir: Path) -> list[dict[str, Any]]:
    """What a run learnt, without the time that it took, and what was sampled meanwhile."""
    took = ("seconds", "per_second", "sampled_tokens")
    return [{k: v for k, v in row.items() if not k.endswith(took)} for row in read_metrics(run_dir)]


def rollouts(run_dir: Path) -> dict[str, list[str]]:
    """The dumped rows of both steps, by version and task; episodes of a group end in any order."""
    root = RunDirectory(path=run_dir).rollouts
    files = [path for path in root.rglob("*.jsonl") if path.parent.name in ("0", "1")]
    return {str(path.relative_to(root)): sorted(path.read_text().splitlines()) for path in files}


class Driver:
    """Runs the agent of a configuration on its problems, by way of a service elsewhere."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.agent = import_reference("tiny_agent.py:TinyAgent", directory=EXAMPLES)()

    async def drive(self, endpoint: Endpoint, problems: Problems) -> None:
        """The batches one after another; a service that is synchronous has room for no more than one."""
        size, members = self.config.batch_size, range(self.config.rollout.group_size)
        async with create_agent_http_client() as http:
            for step in range(self.config.total_steps):
                async with anyio.create_task_group() as tasks:
                    for position in range(step * size, (step + 1) * size):
                        for member in members:
                            tasks.start_soon(self._play, endpoint, http, problems, position, member)

    async def _play(
        self, endpoint: Endpoint, http: httpx.AsyncClient, problems: Problems, position: int, member: int
    ) -> None:
        client = OpenAIProxyClient(
            endpoint.url,
            admin_key=endpoint.admin_key,
            group_id=f"problem-{position}",
            group_size=self.config.rollout.group_size,
            position=position,
            member=member,
            seed=self.config.seed,
        )
        async with client as session:
            data = dict(problems.at(position).data)
            injected = {"base_url": session.base_url, "api_key": session.api_key, "http_client": http}
            await session.end_session(await self.agent.run(data, **injected))


@pytest.mark.parametrize("backend", ["trio"])
def test_a_service_learns_what_a_run_over_the_dataset_learns(tmp_path: Path, backend: str):
    """The same problems, seed and agent, synchronously: every dumped row and every figure of every step is equal."""
    settings = ("total_steps=2", "batch_size=3", "rollout.group_size=4", "engine.deterministic=true")
    more = ("trainer.dtype=float32", "eval_dataset=null", "engine.max_concurrent=12", *QUICK)
    config = load_config(EXAMPLES / "tiny.yaml", (*settings, *more))
    problems = load_problems(config.dataset, import_reference=import_reference, shuffle_seed=config.seed)
    inline, served = tmp_path / "inline", tmp_path / "served"
    Trainer(config).train(run_dir=inline, backend=backend)
    driver = Driver(config)

    async def serve() -> None:
        async with anyio.create_task_group() as tasks:

            def announce(endpoint: Endpoint, _directory: RunDirectory) -> None:
                tasks.start_soon(driver.drive, endpoint, problems)

            ending = evolve(config, serve=evolve(config.serve, exit_when_trained=True))
            await Server(ending).run(run_dir=served, announce=announce)
            tasks.cancel_scope.cancel()

    anyio.run(serve, backend=backend)

    assert 6 == len(rollouts(inline))
    assert rollouts(inline) == rollouts(served)
    assert essence(inline)[-2:] == essence(served)[-2:]
    assert all(row["loss"] and row["grad_norm"] for row in essence(served)[-2:])


@pytest.mark.parametrize("backend", ["asyncio"])
def test_a_restarted_service_answers_before_its_trainer_is_open(
    tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch
):
    """With the weights of its checkpoint: the tokens are those that it sampled before. Only then is the trainer loaded.

    The record says that it was killed too often before it reached the next checkpoint.
    """
    more = ("total_steps=9", "batch_size=3", "rollout.group_size=4", "checkpoint.every_steps=1", "eval_dataset=null")
    more += ("trainer.dtype=float32", "engine.deterministic=true", "proxy.admin_key=the-admin-key-of-this-test")
    config = load_config(EXAMPLES / "tiny.yaml", (*more, *QUICK))
    directory = RunDirectory(path=tmp_path / "run")
    problems = load_problems(config.dataset, import_reference=import_reference, shuffle_seed=config.seed)
    driver, may_load, is_loaded = Driver(evolve(config, total_steps=1)), threading.Event(), threading.Event()
    load = openers.create_policy

    def load_later(*args: Any, **kwargs: Any) -> Any:
        assert may_load.wait(MAX_SECONDS)
        is_loaded.set()
        return load(*args, **kwargs)

    async def ask(url: str) -> Any:
        named = {"position": 99, "member": 0, "seed": config.seed}
        async with OpenAIProxyClient(url, admin_key=config.proxy.admin_key, **named) as session:
            body = {"messages": [{"role": "user", "content": "say 7"}], "max_tokens": 8, "logprobs": True}
            headers = {"authorization": f"Bearer {session.api_key}"}
            async with create_agent_http_client() as http:
                answer = await http.post(f"{session.base_url}/chat/completions", json=body, headers=headers)
            return answer.json()["choices"][0]

    async def first() -> tuple[str, Any]:
        async with anyio.create_task_group() as tasks:
            announced: list[str] = []
            ready = anyio.Event()

            def announce(endpoint: Endpoint, _directory: RunDirectory) -> None:
                announced.append(endpoint.url)
                tasks.start_soon(driver.drive, endpoint, problems)
                ready.set()

            tasks.start_soon(partial(Server(config).run, run_dir=directory.path, announce=announce))
            await ready.wait()
            await to_thread.run_sync(wait_until, lambda: find_checkpoints(directory.checkpoints))
            found = announced[0], await ask(announced[0])
            tasks.cancel_scope.cancel()
        return found

    async def second(url: str) -> Any:
        again = evolve(config, proxy=evolve(config.proxy, port=int(url.rsplit(":", 1)[1])))
        async with anyio.create_task_group() as tasks:
            ready = anyio.Event()
            serve = partial(Server(again).run, run_dir=directory.path, resume=True)
            tasks.start_soon(partial(serve, announce=lambda _endpoint, _directory: ready.set()))
            await to_thread.run_sync(wait_until, lambda: is_listening(again.proxy.port))
            answer = await ask(url)
            assert not is_loaded.is_set()
            assert not ready.is_set()
            may_load.set()
            await ready.wait()
            assert answer == await ask(url)
            tasks.cancel_scope.cancel()
        return answer

    url, before = anyio.run(first, backend=backend)
    write_record(directory, RunRecord(status=RunStatus.RUNNING, is_service=True))
    with directory.metrics.open("a", encoding="utf-8") as metrics:
        metrics.write(json.dumps({"step": 2}) + "\n")
    monkeypatch.setattr(openers, "create_policy", load_later)

    assert before == anyio.run(second, url, backend=backend)
    assert is_loaded.is_set()
    assert [1] == [row["step"] for row in read_metrics(directory.path)]


# ---------------------------------------------------------------------------------------------- as a real process


def settings(run_dir: Path, *more: str) -> list[str]:
    given = ["batch_size=4", "serve.exit_when_trained=true", *QUICK, *more]
    return ["serve", str(EXAMPLES / "serve.yaml"), *given, "--run-dir", str(run_dir)]


@contextmanager
def process(arguments: list[str], log: Path, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """A Python that is killed when the block is left."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"} | variables
    with log.open("a") as errors:
        running = subprocess.Popen(
            [sys.executable, *arguments], env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        try:
            yield running
        finally:
            running.kill()
            running.communicate()


def is_listening(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def service(run_dir: Path, *more: str) -> Iterator[tuple[Command, dict[str, str]]]:
    """The command line, and the environment that it prints for agents, as a shell would read it."""
    log = run_dir.parent / f"{run_dir.name}.log"
    # In the abstract namespace, whose names are short whatever the directory.
    name = f"areal-{run_dir.parent.name}-{os.getpid()}"
    variables = {"PYTHONPATH": str(ROOT / "src"), "NOTIFY_SOCKET": f"@{name}"}
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager,
        start_command(*settings(run_dir, *more), log=log, variables=variables) as running,
    ):
        manager.bind(f"\0{name}")
        manager.settimeout(MAX_SECONDS)
        printed = "".join(line for _, line in zip(range(3), running.stdout, strict=False))
        assert "Listening at" in printed, log.read_text()
        assert manager.recv(64) == b"READY=1"
        shown = subprocess.run(
            ["sh", "-c", f'{printed.splitlines()[-1]}\necho "$OPENAI_BASE_URL $OPENAI_API_KEY"'],
            check=True,
            capture_output=True,
            text=True,
        )
        url, key = shown.stdout.split()
        yield running, {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": key}


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + MAX_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def agents(tmp_path: Path, num: int, variables: dict[str, str]) -> Any:
    return process([str(EXAMPLES / "serve_agent.py"), str(num)], tmp_path / "agent.log", **variables)


def test_service_trains_external_agent(tmp_path: Path):
    """The example, both sides as processes of their own: two steps, a summary as the last line, and the weights."""
    run_dir = tmp_path / "run"
    with service(run_dir, "total_steps=2", "batch_size=12") as (running, variables), agents(tmp_path, 60, variables):
        output, _ = running.communicate(timeout=MAX_SECONDS)
    summary = json.loads(output.splitlines()[-1])
    directory = RunDirectory(path=run_dir)

    assert (0, 2, 2) == (running.returncode, summary["steps"], summary["version"])
    assert any(row["loss"] and row["grad_norm"] for row in read_metrics(run_dir))
    assert directory.weights.is_dir()
    assert directory.report.is_file()
    assert 0o600 == directory.admin_key.stat().st_mode & 0o777


def test_trained_service_continues_to_answer(tmp_path: Path):
    """After the last step: any number of sessions get answers of the trained weights, and are forgotten at their end.

    Resumed, it answers at once. Ctrl-C ends it with the summary of the run.
    """
    run_dir = tmp_path / "run"
    directory = RunDirectory(path=run_dir)
    settings = ("total_steps=1", "serve.exit_when_trained=false", "rollout.max_concurrent_rollouts=4")

    def finish(running: Command) -> dict[str, Any]:
        running.send_signal(signal.SIGINT)
        output, _ = running.communicate(timeout=MAX_SECONDS)
        assert 0 == running.returncode
        return json.loads(output.splitlines()[-1])

    with service(run_dir, *settings) as (running, variables):
        with agents(tmp_path, 4, variables) as first:
            assert 0 == first.wait(timeout=MAX_SECONDS)
        wait_until(lambda: (found := read_record(directory)) is not None and found.status is RunStatus.SERVING)
        # More than the budget of the last version, and more at once than there may be live sessions.
        with agents(tmp_path, 24, variables) as second:
            output, _ = second.communicate(timeout=MAX_SECONDS)
        assert 24 == output.count("\n")
        assert directory.weights.is_dir()
        summary = finish(running)
    assert (1, 1) == (summary["steps"], summary["version"])
    assert RunStatus.FINISHED is read_record(directory).status

    with service(run_dir, *settings, "--resume") as (running, later), agents(tmp_path, 8, later) as third:
        output, _ = third.communicate(timeout=MAX_SECONDS)
        assert 8 == output.count("\n")
        wait_until(lambda: read_record(directory).status is RunStatus.SERVING)
        assert 1 == finish(running)["version"]


def test_interrupted_service_resumes(tmp_path: Path):
    """Ctrl-C: a checkpoint, a summary, exit code 0, no process left; resumed, it knows its agents' key."""
    run_dir = tmp_path / "run"
    with service(run_dir) as (running, variables), agents(tmp_path, 400, variables):
        wait_until(lambda: running.poll() is not None or read_metrics(run_dir))
        children = psutil.Process(running.pid).children(recursive=True)
        running.send_signal(signal.SIGINT)
        output, _ = running.communicate(timeout=MAX_SECONDS)
    summary = json.loads(output.splitlines()[-1])
    saved = [checkpoint.step for checkpoint in find_checkpoints(RunDirectory(path=run_dir).checkpoints)]

    assert 0 == running.returncode
    assert summary["steps"] == saved[-1] >= 1
    assert [] == [child for child in children if child.is_running()]
    # Agents that were killed with the service left sessions behind, which hold permits until they expire.
    more = (f"total_steps={saved[-1] + 1}", "sessions.lifetimes.idle_seconds=3")
    with service(run_dir, *more, "--resume") as (running, later), agents(tmp_path, 400, later):
        output, _ = running.communicate(timeout=MAX_SECONDS)

    assert saved[-1] + 1 == json.loads(output.splitlines()[-1])["steps"]
    assert variables["OPENAI_API_KEY"] == later["OPENAI_API_KEY"]
