"""Clients of a proxy over HTTP: sessions, batches of sessions, and HTTP clients for agents."""

from __future__ import annotations

from areal_actors.client.agent_runner import AgentRunner as AgentRunner
from areal_actors.client.agent_runner import BatchResult as BatchResult
from areal_actors.client.agent_runner import ItemResult as ItemResult
from areal_actors.client.agent_session import AgentSession as AgentSession
from areal_actors.client.attribution import role_base_url as role_base_url
from areal_actors.client.http import RetryPolicy as RetryPolicy
from areal_actors.client.http import create_agent_http_client as create_agent_http_client
from areal_actors.client.http import create_http_client as create_http_client
from areal_actors.client.session import OpenAIProxyClient as OpenAIProxyClient
from areal_actors.interchange.episodes import format_episode as format_episode
from areal_actors.interchange.episodes import parse_episode as parse_episode
