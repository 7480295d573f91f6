"""Agents of whom only so many can run at once: each episode takes a seat first, and time counts from then on."""

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
        """What messages call it."""

    @abstractmethod
    def seat(self) -> AbstractAsyncContextManager[Agent]:
        """Wait for a seat. What is entered is the agent for one episode; the seat is free again when it is left."""

    async def run(self, data: Any, **extra_kwargs: Any) -> Any:
        """One episode, from the wait for a seat to the reward. Raises ``EpisodeError``."""
        async with self.seat() as agent:
            return await agent.run(data, **extra_kwargs)


def name_of(agent: object) -> str:
    """What messages call an agent or a workflow."""
    return agent.agent_name if isinstance(agent, SeatedAgent) else type(agent).__name__


def seat_of(agent: Agent | SeatedAgent) -> AbstractAsyncContextManager[Agent]:
    """A seat of an agent that has seats; any other one runs as often as it is asked to."""
    return agent.seat() if isinstance(agent, SeatedAgent) else nullcontext(agent)
