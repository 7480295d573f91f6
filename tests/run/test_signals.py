"""Ctrl-C, wherever it comes: what can be saved is saved, everybody is told, and no process is left.

Runs are real processes here, in sessions of their own; whatever they start has a mark in its environment, by which it
is found. What an interrupt does in the middle of training is in ``test_training`` and ``test_serving``, too.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import httpx
import psutil
import pytest
from anyio.abc import TaskStatus

from areal_actors.dashboard import RunDirectory
from areal_actors.training.stored_checkpoints import find_checkpoints

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
MARK = "TEST_SIGNALS_RUN"
ADMIN = {"authorization": "Bearer admin"}
MAX_SECONDS = 120.0
QUICK = ("logging.trackers=[]", "logging.display=plain", "engine.num_threads=1", "batch_size=2")
SUBPROCESS = (
    f"rollout.workflow={Path(__file__).with_name('blocking_agent.py')}:BlockingAgent",
    "rollout.openai.mode=subprocess",
    "rollout.openai.subproc_max_workers=2",
)


pytestmark = pytest.mark.slow


@contextmanager
def running(run_dir: Path, command: str, *settings: str) -> Iterator[subprocess.Popen[str]]:
    """A run as a process; it and everything that it started is killed when the block is left."""
    config = EXAMPLES / ("tiny.yaml" if command == "train" else "serve.yaml")
    variables = {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", MARK: str(run_dir)}
    with (run_dir.parent / f"{run_dir.name}.log").open("a") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "areal_actors", command, str(config), *QUICK, *settings, "--run-dir", str(run_dir)],
            env=os.environ | variables,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            for left in marked(run_dir):
                left.kill()
            process.communicate()


def marked(run_dir: Path) -> list[psutil.Process]:
    """What runs of a run: itself, its children, and whatever became of those."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == str(run_dir) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + MAX_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def last_step(run_dir: Path) -> int:
    path = RunDirectory(path=run_dir).metrics
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("\n")), default=-1)


def saved_step(run_dir: Path) -> int:
    return find_checkpoints(RunDirectory(path=run_dir).checkpoints)[-1].step


def log_of(run_dir: Path) -> str:
    return (run_dir.parent / f"{run_dir.name}.log").read_text()


# ----------------------------------------------------------------------------------------------------- loading


@pytest.mark.parametrize("command", ["train", "serve"])
def test_interrupt_while_loading_leaves_nothing(tmp_path: Path, command: str):
    """There is nothing to save yet: it says that it was interrupted, and leaves with 130."""
    run_dir = tmp_path / "run"
    with running(run_dir, command) as process:
        wait_until(RunDirectory(path=run_dir).config.exists)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=MAX_SECONDS)

        assert (130, "") == (process.returncode, output)
        assert "Interrupted." in log_of(run_dir)
        assert "Traceback" not in log_of(run_dir)
        assert [] == marked(run_dir)


# ------------------------------------------------------------------------------------------- agents in processes


def test_agents_in_processes_end_with_the_run(tmp_path: Path):
    """In the middle of their episodes: the run says where its checkpoint is, and leaves none of them."""
    run_dir = tmp_path / "run"
    with running(run_dir, "train", "total_steps=1000", "rollout.group_size=2", *SUBPROCESS) as process:
        wait_until(lambda: process.poll() is not None or last_step(run_dir) >= 1)
        assert len(marked(run_dir)) > 2
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=MAX_SECONDS)

        assert (0, saved_step(run_dir)) == (process.returncode, json.loads(output.splitlines()[-1])["steps"])
        assert f"--resume goes on from {run_dir / 'checkpoints'}" in log_of(run_dir)
        assert [] == marked(run_dir)


# --------------------------------------------------------------------------------------------------- open streams


class Reader:
    """An external agent that reads a long stream, and asks again when that is over."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.ends: list[str] = []
        """The last line of each stream that was read to its end."""
        self.refusals: list[int | str] = []

    async def read(self, http: httpx.AsyncClient, *, task_status: TaskStatus[None]) -> None:
        opened = (await http.post(f"{self._url}/rl/start_session", headers=ADMIN)).raise_for_status().json()
        own = {"authorization": f"Bearer {opened['api_key']}"}
        question = {"messages": [{"role": "user", "content": "count"}], "stream": True, "max_tokens": 900}
        asked = {**question, "logit_bias": {"2": -100}}  # it never ends its turn
        async with http.stream("POST", f"{self._url}/v1/chat/completions", json=asked, headers=own) as answer:
            lines = aiter(answer.aiter_lines())
            last = await anext(lines)
            task_status.started()
            async for line in lines:
                last = line or last
        self.ends.append(last)
        try:
            again = await http.post(f"{self._url}/v1/chat/completions", json=asked, headers=own)
            self.refusals.append(again.status_code)
        except httpx.TransportError:  # the connection was closed, or is
            self.refusals.append("not listening")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_open_streams_of_external_agents_end_properly(tmp_path: Path, number: signal.Signals):
    """Each ends with its last event or with one that says why, never in the middle; who comes later is refused."""
    run_dir = tmp_path / "run"
    settings = ("batch_size=8", "proxy.admin_key=admin", "proxy.drain_seconds=0.1", "engine.max_length=1024")
    with running(run_dir, "serve", *settings) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[2].rstrip(";")
        reader = Reader(url)

        async def main() -> None:
            async with httpx.AsyncClient(timeout=MAX_SECONDS) as http, anyio.create_task_group() as tasks:
                for _ in range(4):
                    await tasks.start(reader.read, http)
                process.send_signal(number)

        anyio.run(main)
        output, _ = process.communicate(timeout=MAX_SECONDS)

        assert (0, 0) == (process.returncode, json.loads(output.splitlines()[-1])["steps"])
        assert 4 == len(reader.ends)
        assert all(end == "data: [DONE]" or "error" in end for end in reader.ends), reader.ends
        assert set(reader.refusals) <= {503, "not listening"}
        assert [] == marked(run_dir)
