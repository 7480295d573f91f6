"""The controller opens the roles of a run, and ends them however far they came."""

from __future__ import annotations

import json
from pathlib import Path

import anyio
import pytest

from areal_actors.config import create_config
from areal_actors.errors import ActorStopped, EngineError
from areal_actors.kernel import root_cause
from areal_actors.run.controller import after_its_cause
from areal_actors.run.training import Trainer

CONVERSATION = {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}


class Agent:
    """An agent that is never run."""

    async def run(self, data: dict, **extra: object) -> float:
        raise AssertionError(f"{data} {extra}")


@pytest.mark.anyio
async def test_controller_does_not_wait_for_role_that_never_opens(tmp_path: Path):
    """The runner of agents waits for a proxy whose worker never becomes ready, as one in the queue of a cluster."""
    python, conversations = tmp_path / "python", tmp_path / "conversations.jsonl"
    python.write_text("#!/bin/sh\nexec sleep 600\n")
    python.chmod(0o755)
    conversations.write_text(json.dumps(CONVERSATION) + "\n")
    settings = {
        "experiment_name": "e",
        "model": "tiny",
        "total_steps": 1,
        "phases": ["sft"],
        "sft": {"jsonl": str(conversations), "batch_size": 1},
        "logging": {"display": "none", "trackers": []},
        "scheduler": {"roles": {"proxy": {"python": str(python)}}, "local": {"oversubscribe": True}},
    }
    with anyio.fail_after(60):
        summary = await Trainer(create_config(settings)).run(Agent(), run_dir=tmp_path / "run")

    assert 1 == summary.steps
    assert (tmp_path / "run" / "weights" / "config.json").exists()


@pytest.mark.anyio
async def test_error_that_follows_from_another_one_does_not_hide_it():
    """It is held back until the role that failed first has cleaned up; a cancelled clean-up would replace its error."""

    async def fail_first() -> None:
        try:
            raise EngineError("the cause")
        finally:
            await anyio.sleep(0.01)

    async def follow() -> None:
        async with after_its_cause(has_workers=False):
            raise ActorStopped("engine")

    with pytest.raises(ExceptionGroup) as caught:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fail_first)
            tasks.start_soon(follow)

    assert "the cause" == str(root_cause(caught.value))
