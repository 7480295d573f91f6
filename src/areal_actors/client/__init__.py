"""What talks to a proxy over HTTP: sessions, and the HTTP clients that agents are given."""

from __future__ import annotations

from areal_actors.client.documents import format_episode, parse_episode
from areal_actors.client.http import create_agent_http_client, create_http_client
from areal_actors.client.retries import RetryPolicy
from areal_actors.client.session import OpenAIProxyClient

__all__ = [
    "OpenAIProxyClient",
    "RetryPolicy",
    "create_agent_http_client",
    "create_http_client",
    "format_episode",
    "parse_episode",
]
