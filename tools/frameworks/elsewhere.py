"""An agent of a framework without a run: it finds a server in its environment, as it would find any other.

``python elsewhere.py CONFIG``, in the environment of the framework. It imports the library and nothing of the tests: an
environment may have a package of that name.
"""

from __future__ import annotations

import inspect
import os
import sys
from pathlib import Path
from typing import Any

import anyio
from anyio import to_thread

from areal_actors import open_inference
from areal_actors.config import load_config
from areal_actors.lib.references import import_reference


async def run_elsewhere(config: Path) -> None:
    """Run the agent of ``config`` on its first problem, with nothing given to it but that."""
    settings = load_config(config)
    workflow, source = settings.rollout.workflow, settings.dataset.python
    agent = import_reference(workflow, directory=config.parent)()
    problem = next(import_reference(source, directory=config.parent)(1, 0))
    async with open_inference("tiny") as inference, inference.session("elsewhere") as session:
        os.environ |= {"OPENAI_BASE_URL": session.base_url, "OPENAI_API_KEY": session.api_key}
        reward = await _run(agent, problem)
        await session.set_reward(reward)  # refused, if the agent asked somebody else


async def _run(agent: Any, problem: Any) -> float:
    if inspect.iscoroutinefunction(agent.run):
        return float(await agent.run(problem))
    return float(await to_thread.run_sync(agent.run, problem))


if __name__ == "__main__":
    anyio.run(run_elsewhere, Path(sys.argv[1]))
