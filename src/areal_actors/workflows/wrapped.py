"""An agent as a rollout workflow: each episode is a session at a proxy, from its start to its training rows.

A training run needs no wrapper: it accepts agents directly. This one is for programs that have a proxy's URL and need
episodes in the form that rollout workflows return.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal_actors.client import OpenAIProxyClient, create_agent_http_client
from areal_actors.domain import Episode
from areal_actors.workflows import context as workflow_context
from areal_actors.workflows.agents import Injected, Reward, run_agent
from areal_actors.workflows.interactions import InteractionWithTokenLogpReward
from areal_actors.workflows.placeholders import placeholder_keys
from areal_actors.workflows.resolve import resolve_agent
from areal_actors.workflows.rollout import RolloutWorkflow

__all__ = ["OpenAIProxyWorkflow"]


class OpenAIProxyWorkflow(RolloutWorkflow):
    """Runs ``agent`` in this event loop, with a separate session for each episode.

    ::

        workflow = OpenAIProxyWorkflow(agent=MyAgent(), proxy_addr=url, admin_key=key, discount=0.9)
        interactions = await workflow.arun_episode(None, data)
    """

    def __init__(
        self,
        agent: Any,
        proxy_addr: str,
        *,
        admin_key: str,
        discount: float | None = None,
        export_style: str | None = None,
        agents_may_reward: bool = False,
    ) -> None:
        """Configure the episodes; nothing is sent yet.

        Args:
            agent: an instance, a class, or its dotted name.
            proxy_addr: the proxy's URL, with or without ``/v1``.
            admin_key: authorises the routes that start and export sessions; a user's key does so, too.
            discount: how rewards are propagated to earlier turns; ``None`` uses the proxy's setting.
            export_style: ``individual``, ``concat`` or ``tree``; ``None`` uses the proxy's setting.
            agents_may_reward: whether the agent may also reward its session over HTTP. It gets the session's key then;
                otherwise a key that only authorises completions.

        Raises:
            WorkflowError: there is no such agent.
        """
        self.agent = resolve_agent(agent)
        self._address = proxy_addr
        self._admin_key = admin_key
        self._discount = discount
        self._style = export_style
        self._agents_may_reward = agents_may_reward

    async def arun_episode(
        self,
        engine: Any,  # noqa: ARG002 - the proxy has an engine
        data: dict[str, Any],
    ) -> dict[str, InteractionWithTokenLogpReward]:
        """Run one episode; return its training rows, each by the completion that it ends, without messages or parents.

        Raises:
            EpisodeError: the agent raised, or returned something that is not a reward. Its session is ended in any
                case.
            InvalidRequest: a reward is not finite, or there is no completion that it could apply to.
            NotFound: the agent rewarded a completion that its session does not have.
        """
        current = workflow_context.get()
        task = f"task-{current.task_id or 0}-{current.member}"
        client = OpenAIProxyClient(self._address, admin_key=self._admin_key, task_id=task)
        async with create_agent_http_client() as http_client, client as session:
            key = session.api_key if self._agents_may_reward else session.completion_key
            injected = Injected(base_url=session.base_url, api_key=key, http_client=http_client)
            with placeholder_keys():
                reward = await run_agent(self.agent, data, injected)
            assigned = await _assign(session, reward)
        episode = await session.export_interactions(discount=self._discount, style=self._style)
        return _interactions(episode, assigned)


async def _assign(session: OpenAIProxyClient, reward: Reward) -> dict[str, float]:
    """Set the rewards that an agent returned; return them by completion."""
    assigned: dict[str, float] = {}
    for interaction, value in reward.by_interaction.items():
        await session.set_reward(interaction, value)
        assigned[interaction] = value
    if reward.last is not None:
        assigned[await session.set_last_reward(reward.last)] = reward.last
        await session.end_session(reward.last)  # marks the number as the reward of the whole episode
    return assigned


def _interactions(episode: Episode, assigned: Mapping[str, float]) -> dict[str, InteractionWithTokenLogpReward]:
    return {
        row.interactions[-1]: InteractionWithTokenLogpReward(
            interaction_id=row.interactions[-1],
            reward=row.reward,
            assigned_reward=_sum_of(assigned, row.interactions),
            row=row,
        )
        for row in episode.trajectories
    }


def _sum_of(assigned: Mapping[str, float], interactions: tuple[Any, ...]) -> float | None:
    """Return the sum assigned to a row's turns: a row of several turns stands for all of them, having no parents."""
    found = [assigned[name] for name in interactions if name in assigned]
    return sum(found) if found else None
