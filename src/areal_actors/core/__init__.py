"""What agents of a service import from AReaL's path: ``from areal_actors.core import AgentSession, AgentRunner``."""

from __future__ import annotations

from areal_actors.client import AgentRunner, AgentSession

__all__ = ["AgentRunner", "AgentSession"]
