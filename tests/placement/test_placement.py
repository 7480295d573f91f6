"""A run in several processes is the run in one. The rest of the plays is ``nox -s placement``."""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import sys

import pytest
from tools.placement.play import ROOT, Play, marked, perform

from areal_actors.config import create_config
from areal_actors.errors import ConfigError
from areal_actors.run.training import Trainer

FLOAT32 = ("engine.dtype=float32", "trainer.dtype=float32")
SETTINGS = {"experiment_name": "e", "total_steps": 2, "model": "tiny"}


def test_run_continues_when_a_worker_is_killed(tmp_path):
    """A worker is killed or stopped, as ``FAULTS_SEED`` draws it: each step is made once, and nothing is left.

    The sessions are lost with all that was open, and a new attempt begins. The groups of the first step are not sampled
    again.
    """
    draw = random.Random(int(os.environ.get("FAULTS_SEED", "1")))  # 1: the sessions are killed
    roles = ("sessions", "proxy", "generation")
    lost, fault = draw.choice(roles), draw.choice((signal.SIGKILL, signal.SIGSTOP))
    settings = ("checkpoint.every_steps=9",)
    play = Play(roles=roles, kills=[(1, f"{lost}-0")], steps=3, settings=settings, signal=fault)
    outcome = perform(play, tmp_path)

    assert 0 == outcome.code, outcome.output
    assert [1, 2, 3] == [record["step"] for record in outcome.metrics]
    assert 1 + (lost == "sessions") == outcome.attempts
    assert (lost == "sessions") == (0 == outcome.metrics[0]["sampled_tokens"])
    assert [] == marked(play.mark)


def test_workers_keep_their_leases_while_they_import(tmp_path):
    """Also where that takes longer than a lease: they are not replaced, again and again."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexec {shlex.quote(sys.executable)} -m tools.placement.slow_worker\n")
    python.chmod(0o755)
    roles = ("trainer", "generation")
    settings = (*FLOAT32, "scheduler.lease_seconds=8", *(f"scheduler.roles.{role}.python={python}" for role in roles))
    outcome = perform(Play(roles=roles, steps=1, settings=settings), tmp_path)

    assert 0 == outcome.code, outcome.output
    assert 1 == outcome.attempts
    assert "has not been heard of" not in outcome.output


def test_worker_starts_servers(tmp_path):
    """An inference server is started by the worker that generates, learns of every version, and ends with it."""
    command = [sys.executable, str(ROOT / "tools/placement/serve_tiny.py")]
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
    servers = json.dumps({"command": command, "environment": environment})
    play = Play(roles=("generation",), steps=2, settings=("rollout.backend=sglang", f"sglang={servers}", *FLOAT32))
    outcome = perform(play, tmp_path)

    assert 0 == outcome.code, outcome.output
    assert [1, 2] == [record["step"] for record in outcome.metrics]
    assert all(record["behaviour_gap_max"] < 1e-4 for record in outcome.metrics)
    assert [] == marked(play.mark)


def test_agent_object_cannot_run_in_a_worker(tmp_path):
    """An agent that was made here is refused for a rollout that lives elsewhere, by name."""
    settings = {
        **SETTINGS,
        "dataset": {"python": f"{tmp_path}/none.py:problems"},
        "scheduler": {"roles": {"rollout": {}}},
    }
    with pytest.raises(ConfigError, match=r"scheduler\.roles\.rollout"):
        Trainer(create_config(settings)).train(object(), run_dir=tmp_path / "run")
