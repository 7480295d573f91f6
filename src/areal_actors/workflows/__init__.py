"""Agents and rollout workflows: their interfaces, how they are resolved and run, and the context that they see."""

from __future__ import annotations

from areal_actors.workflows import context as workflow_context
from areal_actors.workflows.agents import Agent, Injected, Reward, parse_result, run_agent
from areal_actors.workflows.commands import CommandAgent, CommandConfig
from areal_actors.workflows.context import EpisodeContext
from areal_actors.workflows.engine import EpisodeEngine
from areal_actors.workflows.generation import GenerationConfig, GenerationHyperparameters, ModelRequest
from areal_actors.workflows.handover import create_handover
from areal_actors.workflows.interactions import InteractionWithTokenLogpReward, ModelResponse
from areal_actors.workflows.placeholders import placeholder_keys
from areal_actors.workflows.pool import AgentPool, PoolConfig
from areal_actors.workflows.proxy import ProxyWorkflow
from areal_actors.workflows.resolve import resolve_agent, resolve_workflow
from areal_actors.workflows.results import Sample, parse_rollout
from areal_actors.workflows.rewards import AsyncRewardWrapper
from areal_actors.workflows.rollout import GroupedRolloutWorkflow, RolloutResult, RolloutWorkflow
from areal_actors.workflows.seats import SeatedAgent, name_of, seat_of
from areal_actors.workflows.wrapped import OpenAIProxyWorkflow

__all__ = [
    "Agent",
    "AgentPool",
    "AsyncRewardWrapper",
    "CommandAgent",
    "CommandConfig",
    "EpisodeContext",
    "EpisodeEngine",
    "GenerationConfig",
    "GenerationHyperparameters",
    "GroupedRolloutWorkflow",
    "Injected",
    "InteractionWithTokenLogpReward",
    "ModelRequest",
    "ModelResponse",
    "OpenAIProxyWorkflow",
    "PoolConfig",
    "ProxyWorkflow",
    "Reward",
    "RolloutResult",
    "RolloutWorkflow",
    "Sample",
    "SeatedAgent",
    "create_handover",
    "name_of",
    "parse_result",
    "parse_rollout",
    "placeholder_keys",
    "resolve_agent",
    "resolve_workflow",
    "run_agent",
    "seat_of",
    "workflow_context",
]
