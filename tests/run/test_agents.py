"""The agent of a run: where the configuration wants it, and what is wrong with it before there is a run directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.plugins import needs_plugin

from areal_actors.config import create_config
from areal_actors.errors import SandboxError, WorkflowError
from areal_actors.lib.plugins import PluginGroup
from areal_actors.run.job import prepare_agent
from areal_actors.run.training import Trainer
from areal_actors.workflows import AgentPool, CommandAgent

CHILDREN = Path(__file__).parents[1] / "workflows" / "children.py"


def configure(**rollout: Any):
    return create_config(
        {
            "experiment_name": "agents",
            "total_steps": 1,
            "model": "tiny",
            "dataset": {"jsonl": "none.jsonl"},
            "rollout": {"workflow": "nowhere.Agent"} | rollout,
        }
    )


@pytest.mark.anyio
async def test_agent_runs_where_configured(tmp_path: Path):
    """Commands, child processes, or this process; an agent of the caller replaces the configured one."""
    own = configure(openai={"mode": "subproc", "subproc_max_workers": 1})
    async with prepare_agent(
        own.rollout, workflow=f"{CHILDREN}:Sync", workflow_kwargs={"start": 1}, logs=tmp_path
    ) as agent:
        assert isinstance(agent, AgentPool)
        assert 102.0 == await agent.run({"add": 1}, base_url="u/v1", api_key="k")
    command = configure(workflow={"command": ["sh", "-c", "echo 2"]})
    async with prepare_agent(command.rollout, logs=tmp_path) as agent:
        assert isinstance(agent, CommandAgent)
        assert ("sh", 2.0) == (agent.agent_name, await agent.run({}, base_url="u/v1", api_key="k"))


def test_synchronous_agent_error_names_subprocess_mode(tmp_path: Path):
    """Inline it would block the event loop."""
    with pytest.raises(WorkflowError, match="one that blocks needs rollout"):
        prepare_agent(configure().rollout, workflow=f"{CHILDREN}:Sync", logs=tmp_path)


@needs_plugin(PluginGroup.SANDBOXES, "bubblewrap")
def test_sandbox_is_refused_for_python_agents(tmp_path: Path):
    """So is a sandbox that cannot be opened on this machine."""
    with pytest.raises(WorkflowError, match=r"isolates agents that are commands.*Sync runs in a Python process"):
        prepare_agent(configure(openai={"sandbox": "bubblewrap"}).rollout, workflow=f"{CHILDREN}:Sync", logs=tmp_path)
    missing = {"backend": "bubblewrap", "readable": [str(tmp_path / "missing")]}
    with pytest.raises(SandboxError, match=r"bubblewrap (needs|cannot)|missing, which does not exist"):
        prepare_agent(configure(workflow={"command": ["sh"]}, openai={"sandbox": missing}).rollout, logs=tmp_path)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_agent_that_cannot_be_created_ends_run(tmp_path: Path, backend: str):
    """The error is raised before a model is loaded: no model has this name."""
    config = configure(openai={"mode": "subprocess"})
    with pytest.raises(WorkflowError, match="No module named 'nowhere'"):
        Trainer(config).train(run_dir=tmp_path / "run", backend=backend)
