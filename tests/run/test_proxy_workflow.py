"""``ProxyWorkflow``: episodes that external agents play, each given to one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from areal_actors import Inference, InferenceConfig, InteractionWithTokenLogpReward, ProxyWorkflow, open_inference
from areal_actors.client import OpenAIProxyClient, create_agent_http_client
from areal_actors.errors import ConfigError, EpisodeError
from areal_actors.sessions.intake import IntakeConfig

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def open_service() -> AsyncIterator[Inference]:
    config = InferenceConfig(intake=IntakeConfig(is_delivering=False))
    with anyio.fail_after(60):
        async with open_inference("tiny", config) as inference:
            yield inference


async def play(inference: Inference, task: str, reward: float) -> None:
    """An agent elsewhere: two turns, rewarded at the end."""
    endpoint = inference.endpoint
    client = OpenAIProxyClient(endpoint.url, admin_key=endpoint.admin_key, task_id=task)
    async with create_agent_http_client() as http, client as session:
        messages = [{"role": "user", "content": task}]
        for _ in range(2):
            body = {"messages": messages, "max_tokens": 4}
            headers = {"authorization": f"Bearer {session.api_key}"}
            answer = await http.post(f"{session.base_url}/chat/completions", json=body, headers=headers)
            messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "more"}]
        await session.end_session(reward)


def last(interactions: dict[str, InteractionWithTokenLogpReward]) -> InteractionWithTokenLogpReward:
    return list(interactions.values())[-1]


async def test_proxy_workflow_returns_next_finished_session():
    """The waiting episode gets its tokens, messages and rewards; the next episode gets the next session."""
    async with open_service() as inference, anyio.create_task_group() as tasks:
        workflow = ProxyWorkflow(inference)
        tasks.start_soon(play, inference, "one", 1.0)
        interactions = await workflow.arun_episode(inference, None)
        tasks.start_soon(play, inference, "two", 0.5)
        others = await workflow.arun_episode(inference, None)

    first, second = interactions.values()
    assert (1.0, 1.0, None) == (first.reward, second.reward, first.assigned_reward)
    assert first is not second
    assert second.parent is not None
    assert first.interaction_id == second.parent.interaction_id
    assert ("one", "two") == (first.messages[0]["content"], last(others).messages[0]["content"])
    assert second.model_response is not None
    assert 4 == second.model_response.output_len
    assert {"input_ids", "loss_mask", "versions"} <= set(second.to_tensor_dict())
    assert 0.5 == last(others).reward


async def test_proxy_workflow_passes_session_of_cancelled_episode_on():
    """However many give up while they wait, and even as it comes: none is lost, none is given twice."""
    async with open_service() as inference:
        workflow = ProxyWorkflow(inference)
        for _ in range(3):
            with anyio.move_on_after(0):
                await workflow.arun_episode(inference, None)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(workflow.arun_episode, inference, None)
            await play(inference, "one", 1.0)
            tasks.cancel_scope.cancel()
        await play(inference, "two", 0.5)
        rewards = [last(await workflow.arun_episode(inference, None)).reward]
        with anyio.move_on_after(0.05):
            rewards.append(last(await workflow.arun_episode(inference, None)).reward)

    # The first may have been taken by who was cancelled afterwards; it was not lost before.
    assert rewards in ([1.0, 0.5], [0.5])


async def test_proxy_workflow_refuses_data_and_inference_without_intake():
    """Data, which external agents have of their own; and an inference that takes no sessions in."""
    async with open_service() as inference:
        with pytest.raises(EpisodeError, match="takes no data"):
            await ProxyWorkflow(inference).arun_episode(inference, {"question": "what?"})
    async with open_inference("tiny") as plain:
        with pytest.raises(ConfigError, match="IntakeConfig"):
            ProxyWorkflow(plain)
