"""How people bring their agents: what an agent is, how it is found by name, where it runs, and what it knows there."""

from __future__ import annotations

from areal_actors.workflows.agents import Agent, Injected, Reward, parse_result, run_agent
from areal_actors.workflows.commands import CommandAgent, CommandConfig
from areal_actors.workflows.context import EpisodeContext
from areal_actors.workflows.handover import create_handover
from areal_actors.workflows.pool import AgentPool, PoolConfig
from areal_actors.workflows.resolve import import_reference, resolve_agent
from areal_actors.workflows.seats import SeatedAgent, name_of, seat_of

__all__ = [
    "Agent",
    "AgentPool",
    "CommandAgent",
    "CommandConfig",
    "EpisodeContext",
    "Injected",
    "PoolConfig",
    "Reward",
    "SeatedAgent",
    "create_handover",
    "import_reference",
    "name_of",
    "parse_result",
    "resolve_agent",
    "run_agent",
    "seat_of",
]
