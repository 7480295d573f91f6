"""The HTTP proxy: OpenAI-compatible and Anthropic-compatible endpoints in front of the actors."""

from __future__ import annotations

from areal_actors.proxy.actor import ProxyServer
from areal_actors.proxy.app import create_app
from areal_actors.proxy.config import ProxyConfig

__all__ = ["ProxyConfig", "ProxyServer", "create_app"]
