"""What the page of a run costs the process that serves it, while the run writes its files and a browser is open.

``areal-actors view`` serves a run directory with a long past in a separate process, so that its CPU time is that of the
page alone; ``train`` and ``serve`` serve the same page from the process of the run. A writer adds what a run of eight
groups of eight writes: a file of texts whenever a group ends, a line of metrics with each step. A client does what
``page.js`` does with each event, for the view that is open. The figures are shares of one core.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import psutil
from benchmarks.harness import Result

_GATE_PERCENT = 1.0
_SECONDS_PER_STEP = 5.0
"""Those of the default job on two cores. On GPUs, steps take longer."""
_NUM_GROUPS, _GROUP_SIZE = 8, 8
_TEXT = "What the model reads and writes, some hundreds of words of it. " * 60


def _write_group(directory: Path, version: int, task: int) -> None:
    row = {"task_id": task, "reward": task % 3 / 2, "prompt": _TEXT, "completion": _TEXT, "seqlen": 2000}
    row |= {"prompt_len": 1000, "trained": [[1000, 2000]], "token_ids": list(range(2000))}
    path = directory / "rollout" / str(version) / f"{task}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row | {"sample_idx": member}) + "\n" for member in range(_GROUP_SIZE)))


def _write_step(directory: Path, step: int) -> None:
    metrics = {"step": step, "version": step, "phase": "rl", "reward": 0.5, "eval_reward": None}
    metrics |= {f"metric_{index}": index / 7 for index in range(60)}
    with (directory / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(metrics) + "\n")


def _create_past(directory: Path, num_steps: int) -> None:
    (directory / "logs").mkdir(parents=True)
    (directory / "config.yaml").write_text("experiment_name: bench\n" + "".join(f"key_{i}: {i}\n" for i in range(500)))
    for step in range(1, num_steps + 1):
        _write_step(directory, step)
        (directory / "rollout" / str(step)).mkdir(parents=True)
    tokens = [["word", -0.5]] * 1000
    turn = {
        "id": "a",
        "parent": None,
        "messages": [{"role": "user", "content": _TEXT}],
        "tokens": tokens,
        "mask": [[1, 1000]],
    }
    session = {"task_id": "1", "version": 1, "reward": 1.0, "failure": None, "is_eval": False, "turns": [turn]}
    (directory / "sessions.jsonl").write_text((json.dumps(session) + "\n") * 120)
    failure = {
        "task_id": "1",
        "version": 1,
        "failure": "ValueError: no",
        "traceback": "line\n" * 20,
        "outcome": "failed",
    }
    (directory / "failures.jsonl").write_text((json.dumps(failure) + "\n") * 2000)


def _read_metrics(client: httpx.Client, cursor: str) -> str:
    while True:
        found = client.get("/api/metrics", params={"run": "bench/run", "after": cursor}).json()
        cursor = found["cursor"]
        if not found["records"]:
            return str(cursor)


def _browse(
    client: httpx.Client, view: str, version: list[int], is_open: threading.Event, stopping: threading.Event
) -> None:
    """Request what the page requests with each event."""
    run, cursor = {"run": "bench/run"}, _read_metrics(client, "")
    shown = {"curves": "metrics", "groups": "groups", "conversations": "sessions", "failures": "failures"}
    is_open.set()  # what opening the page reads is not counted
    with client.stream("GET", "/api/events", timeout=60) as events:
        for line in events.iter_lines():
            if stopping.is_set():
                return
            if not line.startswith("data: "):
                continue
            parts = json.loads(line.removeprefix("data: ")).get("parts", [])
            if "metrics" in parts:
                cursor = _read_metrics(client, cursor)
            if "metrics" in parts or "record" in parts or view == "groups":
                client.get("/api/run", params=run)
            if view != "curves" and shown[view] in parts:
                client.get(f"/api/{shown[view]}", params=run | {"kind": "rollout", "version": version[0]})


def _measure(view: str | None, *, num_steps: int, seconds: float) -> float:
    """Percent of one core that the serving process uses with ``view`` open; ``None``: with no browser."""
    with TemporaryDirectory() as root:
        directory = Path(root, "bench", "run")
        _create_past(directory, num_steps)
        command = [sys.executable, "-m", "areal_actors", "view", str(directory)]
        serving = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        is_open, stopping, version = threading.Event(), threading.Event(), [num_steps]
        browser: threading.Thread | None = None
        try:
            assert serving.stdout is not None
            url = next(found[0] for text in serving.stdout if (found := re.search(r"http://\S+", text)))
            base, _, token = url.partition("/?token=")
            with httpx.Client(base_url=base, headers={"authorization": f"Bearer {token}"}, timeout=30) as client:
                if view is not None:
                    browser = threading.Thread(target=_browse, args=(client, view, version, is_open, stopping))
                    browser.start()
                    is_open.wait()
                time.sleep(1.0)
                process = psutil.Process(serving.pid)
                used, began = sum(process.cpu_times()[:2]), time.monotonic()
                while time.monotonic() - began < seconds:
                    for task in range(_NUM_GROUPS):
                        _write_group(directory, version[0], task)
                        time.sleep(_SECONDS_PER_STEP / _NUM_GROUPS)
                    version[0] += 1
                    _write_step(directory, version[0])
                percent = 100 * (sum(process.cpu_times()[:2]) - used) / (time.monotonic() - began)
                stopping.set()
                _write_step(directory, version[0] + 1)  # an event, by which the browser sees that it is over
                if browser is not None:
                    browser.join()
                return percent
        finally:
            serving.terminate()
            serving.communicate()


def run(quick: bool) -> list[Result]:  # noqa: FBT001 - the protocol of all benchmarks
    """The share of a core with each view open after 500 steps, and that of the curves after 5,000."""
    seconds = 10.0 if quick else 40.0
    measured = [(None, 500), ("curves", 500), ("groups", 500)]
    if not quick:
        measured += [("conversations", 500), ("failures", 500), ("curves", 5000)]
    results = []
    for view, num_steps in measured:
        percent = _measure(view, num_steps=num_steps, seconds=seconds)
        detail: dict[str, Any] = {"steps": num_steps, "seconds_per_step": _SECONDS_PER_STEP, "seconds": seconds}
        shown = f"CPU of the page after {num_steps} steps, {view or 'no browser'}"
        gate = _GATE_PERCENT if num_steps <= 500 else None
        results.append(Result(benchmark="page", name=shown, value=percent, unit="%", gate=gate, detail=detail))
    return results


if __name__ == "__main__":
    for result in run(quick="--quick" in sys.argv):
        print(f"{result.name:60} {result.value:9.3f} {result.unit} {result.detail}")
