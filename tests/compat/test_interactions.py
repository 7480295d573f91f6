"""Interactions under AReaL's names: as tensors at any time, over HTTP, and made by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import openai
import pytest
import torch
from tests.client.service import open_service
from tests.compat.tiny_model import DATA, MESSAGES

from areal_actors import (
    ArealOpenAI,
    InteractionWithTokenLogpReward,
    ModelResponse,
    OpenAIProxyClient,
    RolloutWorkflow,
)
from areal_actors.domain import SessionId
from areal_actors.errors import ConfigError, ExportError
from areal_actors.workflows import parse_rollout


@pytest.mark.anyio
async def test_an_answer_is_tensors_before_it_is_exported() -> None:
    """``get_completions(id).to_tensor_dict()``: prompt, answer, log-probabilities, versions, and the reward so far."""
    async with open_service() as inference:
        client: Any = ArealOpenAI(inference, inference.renderer, tool_call_parser="qwen25", chat_template_type="hf")
        answer = await client.chat.completions.create(messages=MESSAGES)
        unrewarded = client.get_completions(answer.id).to_tensor_dict()
        client.set_reward(answer.id, 0.5)
        tensors = client.get_completions(answer.id).to_tensor_dict()
        (exported,) = client.export_completions().values()

    assert (0.0, 0.5) == (unrewarded["rewards"].item(), tensors["rewards"].item())
    for name, tensor in exported.to_tensor_dict().items():
        assert torch.equal(tensors[name], tensor), name


@pytest.mark.anyio
async def test_a_client_bounds_prompt_and_answer() -> None:
    """``engine_max_tokens``; a bound that no prompt fits in is refused by name."""
    async with open_service() as inference:
        short: Any = ArealOpenAI(engine=inference, engine_max_tokens=3)
        with pytest.raises(openai.BadRequestError, match="context"):
            await short.chat.completions.create(messages=MESSAGES)
        with pytest.raises(ConfigError, match="engine_max_tokens"):
            ArealOpenAI(engine=inference, engine_max_tokens=0)


class SeedProxyWorkflow(RolloutWorkflow):
    """``OpenAIProxyWorkflow`` as AReaL's documents show it."""

    def __init__(self, agent: Any, endpoint: Any) -> None:
        self.agent, self.endpoint = agent, endpoint

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        """Run the agent in a session, assign its rewards, and export."""
        proxy_client = OpenAIProxyClient(self.endpoint.url, admin_key=self.endpoint.admin_key)
        async with proxy_client:
            rewards = await self.agent(proxy_client.session_url, data)
            if isinstance(rewards, float):
                await proxy_client.set_last_reward(rewards)
            elif isinstance(rewards, dict):
                for id, reward in rewards.items():  # noqa: A001 - as in the documents
                    await proxy_client.set_reward(id, reward)
        return await proxy_client.export_interactions(discount=0.9, style="individual")


@pytest.mark.anyio
async def test_interactions_of_a_session_over_http_are_trained() -> None:
    """With their tokens, parents and rewards; as the result of a workflow, they count what was assigned."""

    async def agent(url: str, data: dict[str, Any]) -> dict[str, float]:
        async with openai.AsyncOpenAI(base_url=url, api_key="DUMMY") as client:
            first = await client.chat.completions.create(model="default", messages=data["messages"])
            echo = {"role": "assistant", "content": first.choices[0].message.content}
            more = [*data["messages"], echo, {"role": "user", "content": "Sure?"}]
            second = await client.chat.completions.create(model="default", messages=more)
        return {first.id: 0.25, second.id: 1.0}

    async with open_service() as inference:
        workflow = SeedProxyWorkflow(agent, inference.endpoint)
        interactions = await workflow.arun_episode(None, DATA)

    first, second = interactions.values()
    assert [pytest.approx(1.15), 1.0] == [first.reward, second.reward]
    assert [0.25, 1.0] == [first.assigned_reward, second.assigned_reward]
    assert (None, first) == (first.parent, second.parent)
    tokens, row = second.model_response, second.to_tensor_dict()
    assert row["input_ids"][0].tolist() == tokens.input_tokens + tokens.output_tokens
    assert row["logprobs"][0].tolist()[tokens.input_len :] == pytest.approx(tokens.output_logprobs)
    assert tokens.output_len == row["loss_mask"].sum()
    (sample,) = parse_rollout(interactions, session=SessionId("s"))
    assert (1.25, 2) == (sample.reward, sample.num_turns)


def test_interactions_are_made_by_hand_without_an_id() -> None:
    """Their completion has one; a workflow's own result names them."""
    response = ModelResponse(input_tokens=[1, 2], output_tokens=[3], output_logprobs=[-0.5], output_versions=[4])
    bare = InteractionWithTokenLogpReward(model_response=response, reward=1.0)
    named = InteractionWithTokenLogpReward(completion=SimpleNamespace(id="chatcmpl-1"))

    assert ("", "chatcmpl-1") == (bare.interaction_id, named.interaction_id)
    assert [[1, 2, 3]] == bare.to_tensor_dict()["input_ids"].tolist()
    with pytest.raises(ExportError, match="chatcmpl-1 has neither"):
        named.to_tensor_dict()
    (sample,) = parse_rollout({"a": bare, "b": bare}, session=SessionId("s"))
    assert (2.0, 2) == (sample.reward, len(sample.trajectories))
