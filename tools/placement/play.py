"""The tiny job with its roles in processes, which are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import psutil
from attrs import field, frozen

ROOT = Path(__file__).parents[2]
MARK = "AREAL_TEST_RUN"
ROLES = ("proxy", "sessions", "generation", "trainer", "rollout")
COMPARED = ("step", "reward", "eval_reward", "tokens", "trained_tokens", "staleness_max", "episodes")
"""What a run with kills has in common with one without: what is sampled depends on the seed alone."""


@frozen(kw_only=True)
class Play:
    """One run. ``kills`` are (step, worker): the worker is sent ``signal`` once that step is done.

    The processes that a worker trains with are called ``<worker>/rank``.
    """

    roles: Sequence[str]
    kills: Sequence[tuple[int, str]] = ()
    signal: signal.Signals = signal.SIGKILL
    """SIGSTOP lets the process live but do nothing, as one that hangs."""
    steps: int = 4
    example: str = "tiny.yaml"
    settings: Sequence[str] = ()
    """More of them, as on the command line."""
    mark: str = field(factory=lambda: uuid4().hex)


@frozen(kw_only=True)
class Outcome:
    """How a run ended."""

    code: int
    output: str
    attempts: int
    metrics: list[dict]
    """The records of all steps."""
    recoveries: list[float]
    """The seconds from each kill to the end of the next step."""

    @property
    def compared(self) -> list[dict]:
        """What is the same in all runs of a seed."""
        return [{key: record[key] for key in COMPARED} for record in self.metrics]


def perform(play: Play, path: Path, *, timeout: float = 500.0) -> Outcome:
    """Run it to its end. Raises ``AssertionError`` if it hangs."""
    recoveries: list[float] = []
    with running(play, path) as (process, directory):
        deadline = time.monotonic() + timeout
        for step, worker in play.kills:
            wait_until(lambda step=step: step in steps_of(directory), process, deadline)
            wait_until(lambda worker=worker: worker in processes_of(directory), process, deadline)
            os.kill(processes_of(directory)[worker], play.signal)
            killed_at = time.monotonic()
            wait_until(lambda step=step: any(done > step for done in steps_of(directory)), process, deadline)
            recoveries.append(time.monotonic() - killed_at)
        try:
            output, _ = process.communicate(timeout=max(deadline - time.monotonic(), 1))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it hangs; {(directory / 'logs' / 'run.jsonl').read_text()[-4000:]}") from None
    events = [event["event"] for event in events_of(directory)]
    return Outcome(
        code=process.returncode,
        output=output,
        attempts=1 + events.count("attempt_restarted"),
        metrics=list(_records(directory / "metrics.jsonl")),
        recoveries=recoveries,
    )


@contextmanager
def running(play: Play, path: Path) -> Iterator[tuple[subprocess.Popen, Path]]:
    """The run's process and directory; both home and workers carry the mark of the play."""
    directory = path / "run"
    roles = json.dumps({role: {} for role in play.roles})
    command = [
        *(sys.executable, "-m", "areal_actors", "train", str(ROOT / "examples" / play.example)),
        *(f"total_steps={play.steps}", "rollout.group_size=4", "checkpoint.every_steps=1", "eval_dataset=null"),
        *([f"scheduler.roles={roles}"] if play.example == "tiny.yaml" else []),
        *("scheduler.local.oversubscribe=true", "logging.trackers=[]"),
        *play.settings,
        *("--run-dir", str(directory)),
    ]
    environment = {**os.environ, MARK: play.mark, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=path
    )
    try:
        yield process, directory
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def wait_until(is_true, process: subprocess.Popen, deadline: float) -> None:
    """Look again and again."""
    while not is_true():
        if process.poll() is not None:
            raise AssertionError(f"it ended too early: {process.communicate()[0]}")
        if time.monotonic() > deadline:
            raise AssertionError("it took too long")
        time.sleep(0.02)


def steps_of(directory: Path) -> set[int]:
    """Those that have been written down."""
    return {record["step"] for record in _records(directory / "metrics.jsonl")}


def events_of(directory: Path) -> list[dict]:
    """What the run has logged."""
    return list(_records(directory / "logs" / "run.jsonl"))


def workers_of(directory: Path) -> dict[str, int]:
    """The processes of the workers that serve and live."""
    found: dict[str, int] = {}
    for event in events_of(directory):
        if event["event"] == "worker_serves" and "where" in event:
            found[event["worker"]] = int(event["where"].removeprefix("process "))
    return {worker: pid for worker, pid in found.items() if is_alive(pid)}


def processes_of(directory: Path) -> dict[str, int]:
    """Those, and the last rank that each of them has started."""
    workers = workers_of(directory)
    found = {
        f"{worker}/rank": child.pid
        for worker, pid in workers.items()
        for child in psutil.Process(pid).children()
        if "areal_actors.worker" in child.cmdline()
    }
    return workers | found


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def marked(mark: str) -> list[int]:
    """Every process that carries the mark of a play."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            environment = path.read_bytes()
        except OSError:
            continue
        if wanted in environment.split(b"\0") and is_alive(int(path.parent.name)):
            found.append(int(path.parent.name))
    return found


def _records(path: Path) -> Iterator[dict]:
    if not path.exists():
        return
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            continue
