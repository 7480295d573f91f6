"""How a run ended, as a tracker hears it: the client of the tracker is a package on the path of the run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

CLIENT = """
import os, pathlib

class api:
    api_key = "key"

class Settings:
    def __init__(self, **options): ...

class Run:
    def log(self, metrics, step): ...
    def finish(self, exit_code): pathlib.Path(os.environ["TOLD"]).write_text(str(exit_code))

def init(**options):
    pathlib.Path(os.environ["TOLD"]).write_text("open")
    return Run()
"""
AGENT = """
from areal_actors import RolloutWorkflow

class Fails:
    async def run(self, data, **kwargs):
        raise ValueError("broken")

class Waits(RolloutWorkflow):
    async def arun_episode(self, engine, data):
        import anyio
        await anyio.sleep_forever()
"""


@pytest.mark.parametrize(("workflow", "exit_code"), [("Fails", "1"), ("Waits", "255")])
def test_tracker_shows_runs_that_failed_or_were_interrupted(tmp_path: Path, workflow: str, exit_code: str) -> None:
    """By the exit code that wandb shows as failed or killed; 0 is a run that finished."""
    told = tmp_path / "told"
    (tmp_path / "clients").mkdir()
    (tmp_path / "clients" / "wandb.py").write_text(CLIENT)
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"question": f"say {number}"}) + "\n" for number in range(8)))
    (tmp_path / "run.yaml").write_text(
        "experiment_name: told\nmodel: tiny\ntotal_steps: 2\nbatch_size: 2\ndataset: {jsonl: p.jsonl}\n"
        f"rollout: {{workflow: 'agent.py:{workflow}', group_size: 2}}\n"
        "logging: {display: none, trackers: [wandb]}\n"
    )
    path = os.pathsep.join(filter(None, [str(tmp_path / "clients"), os.environ.get("PYTHONPATH")]))
    run = subprocess.Popen(
        [sys.executable, "-m", "areal_actors", "train", "run.yaml"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path, "TOLD": str(told), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 120
        while exit_code == "255" and not told.exists() and time.monotonic() < deadline:
            time.sleep(0.1)  # until the tracker is open
        if exit_code == "255":
            run.send_signal(signal.SIGINT)
        _, log = run.communicate(timeout=120)
    finally:
        run.kill()
        run.wait()

    assert exit_code == told.read_text(), log
