"""Agents with a limited number of seats: each episode first takes a seat, and its time limit starts from then on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

from areal_actors.workflows.agents import Agent

__all__ = ["SeatedAgent", "name_of", "seat_of"]


class SeatedAgent(ABC):
    """An agent that runs in processes; the number of seats is the number of processes."""

    @property
    @abstractmethod
    def agent_name(self) -> str:
        """Name of the agent in messages."""

    @abstractmethod
    def seat(self) -> AbstractAsyncContextManager[Agent]:
        """Wait for a seat and yield the agent for one episode. Leaving the block frees the seat."""

    async def run(self, data: Any, **extra_kwargs: Any) -> Any:
        """Run one episode, including the wait for a seat, and return its reward. Raises ``EpisodeError``."""
        async with self.seat() as agent:
            return await agent.run(data, **extra_kwargs)


def name_of(agent: object) -> str:
    """Return the name of an agent or a workflow for messages."""
    return agent.agent_name if isinstance(agent, SeatedAgent) else type(agent).__name__


def seat_of(agent: Agent | SeatedAgent) -> AbstractAsyncContextManager[Agent]:
    """Take a seat of an agent that has seats; other agents are not limited."""
    return agent.seat() if isinstance(agent, SeatedAgent) else nullcontext(agent)
