"""Agents and rollout workflows: their interfaces, how they are resolved and run, and the context that they see."""

from __future__ import annotations

from areal_actors.cache.interactions import InteractionWithTokenLogpReward, ModelResponse
from areal_actors.workflows import context as workflow_context
from areal_actors.workflows.agents import (
    Agent,
    Injected,
    LimitedAgent,
    Reward,
    acquire_agent,
    direct_connections,
    name_of,
    parse_result,
    placeholder_keys,
    proxy_variables,
    run_agent,
)
from areal_actors.workflows.commands import (
    BoxedCommand,
    CommandAgent,
    CommandConfig,
    ProblemEnvironment,
    find_environment,
)
from areal_actors.workflows.context import EpisodeContext
from areal_actors.workflows.engine import EpisodeEngine, GenerationConfig, GenerationHyperparameters, ModelRequest
from areal_actors.workflows.interactions import Sample, parse_rollout
from areal_actors.workflows.plugins import PluginWorkflow, WorkflowPlugin
from areal_actors.workflows.pool import AgentPool, PoolConfig, serialize_agent
from areal_actors.workflows.rewards import AsyncRewardWrapper
from areal_actors.workflows.rollout import (
    GroupedRolloutWorkflow,
    OpenAIProxyWorkflow,
    ProxyWorkflow,
    RolloutResult,
    RolloutWorkflow,
    resolve_agent,
    resolve_workflow,
)

__all__ = [
    "Agent",
    "AgentPool",
    "AsyncRewardWrapper",
    "BoxedCommand",
    "CommandAgent",
    "CommandConfig",
    "EpisodeContext",
    "EpisodeEngine",
    "GenerationConfig",
    "GenerationHyperparameters",
    "GroupedRolloutWorkflow",
    "Injected",
    "InteractionWithTokenLogpReward",
    "LimitedAgent",
    "ModelRequest",
    "ModelResponse",
    "OpenAIProxyWorkflow",
    "PluginWorkflow",
    "PoolConfig",
    "ProblemEnvironment",
    "ProxyWorkflow",
    "Reward",
    "RolloutResult",
    "RolloutWorkflow",
    "Sample",
    "WorkflowPlugin",
    "acquire_agent",
    "direct_connections",
    "find_environment",
    "name_of",
    "parse_result",
    "parse_rollout",
    "placeholder_keys",
    "proxy_variables",
    "resolve_agent",
    "resolve_workflow",
    "run_agent",
    "serialize_agent",
    "workflow_context",
]
