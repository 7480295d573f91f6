"""How people bring their agents: what an agent is, how it is found by name, and what it knows while it runs."""

from __future__ import annotations

from areal_actors.workflows.agents import Agent, Injected, Reward, parse_result, run_agent
from areal_actors.workflows.context import EpisodeContext
from areal_actors.workflows.resolve import import_reference, resolve_agent

__all__ = [
    "Agent",
    "EpisodeContext",
    "Injected",
    "Reward",
    "import_reference",
    "parse_result",
    "resolve_agent",
    "run_agent",
]
