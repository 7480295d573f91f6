"""Clients of a proxy over HTTP: sessions, batches of sessions, and HTTP clients for agents."""

from __future__ import annotations

from areal_actors.client.agent_runner import AgentRunner, BatchResult, ItemResult
from areal_actors.client.agent_session import AgentSession
from areal_actors.client.attribution import role_base_url
from areal_actors.client.http import RetryPolicy, create_agent_http_client, create_http_client
from areal_actors.client.session import OpenAIProxyClient
from areal_actors.interchange.episodes import format_episode, parse_episode

__all__ = [
    "AgentRunner",
    "AgentSession",
    "BatchResult",
    "ItemResult",
    "OpenAIProxyClient",
    "RetryPolicy",
    "create_agent_http_client",
    "create_http_client",
    "format_episode",
    "parse_episode",
    "role_base_url",
]
