"""The documented rollout workflows: several turns, a tool call, a custom one with its dump. Run by hand and trained."""

from __future__ import annotations

import json
import uuid
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.compat.tiny_model import DATA, GCONFIG, open_tiny
from tests.run.scoring import share_of_letters
from transformers import AutoTokenizer

from areal_actors import (
    ArealOpenAI,
    AsyncRewardWrapper,
    InteractionWithTokenLogpReward,
    ModelRequest,
    RolloutWorkflow,
    Trainer,
    create_config,
)
from areal_actors.models import resolve_model
from areal_actors.workflows import workflow_context

pytestmark = pytest.mark.filterwarnings("ignore:Async generator 'openai:ResourceWarning")  # trio, of the SDK's streams


class MultiTurnWorkflow(RolloutWorkflow):
    """Asks again until the answer is good, in the deprecated form."""

    def __init__(self, reward_fn: Any, gconfig: Any, tokenizer: Any, max_turns: int = 2) -> None:
        self.gconfig, self.tokenizer, self.max_turns = gconfig, tokenizer, max_turns
        self.turn_discount = 0.9
        self.reflection_msg = {"role": "user", "content": "Think again."}
        self.async_reward_fn = AsyncRewardWrapper(reward_fn)
        self.comp_data: Any = None

    async def _run_one_episode(self, engine: Any, data: Any, rid: str) -> Any:
        client = ArealOpenAI(engine=engine, tokenizer=self.tokenizer)
        messages = deepcopy(data["messages"])
        t = reward = 0
        discount = 1.0
        while reward == 0 and t < self.max_turns:
            completion = await client.chat.completions.create(
                messages=messages,
                temperature=self.gconfig.temperature,
                max_completion_tokens=self.gconfig.max_new_tokens,
                store=True,
            )
            comp_data = client.get_completions(completion.id)
            response, tokens = completion.choices[0].message.content, comp_data.model_response
            score = await self.async_reward_fn(
                data["prompt"], response, tokens.input_tokens, tokens.output_tokens, answer_key=data["answer"]
            )
            t += 1
            reward = 1 + int(score) if t == self.max_turns else 0
            if reward == 0 and t < self.max_turns:
                messages.append({"role": "assistant", "content": completion.choices[0].message.content})
                messages.append(self.reflection_msg)
                discount *= self.turn_discount
        client.set_reward(completion.id, min(reward, 1) * discount)
        self.comp_data = comp_data
        return client.export_completions(turn_discount=0.9), comp_data


@pytest.mark.anyio
async def test_several_turns() -> None:
    """Completions with rewards that flow back, and their tensors; the pair that is returned is accepted."""
    async with open_tiny() as inference, inference.rollouts() as engine:
        workflow = MultiTurnWorkflow(share_of_letters, GCONFIG, inference.renderer)
        completions = await workflow.arun_episode(engine, dict(DATA))
        tensors = await engine.submit(DATA, workflow)

    assert completions is not None
    first, second = completions.values()
    assert isinstance(second, InteractionWithTokenLogpReward)
    assert (pytest.approx(0.81), 0.9) == (first.reward, second.reward)
    assert first is not second.parent is not None
    assert first.interaction_id == second.parent.interaction_id
    assert workflow.comp_data.messages[-1]["content"] == "Think again."
    assert 2 == len(tensors["input_ids"])
    assert {"input_ids", "loss_mask", "logprobs", "versions", "attention_mask", "rewards"} <= set(
        first.to_tensor_dict()
    )


@pytest.mark.anyio
@pytest.mark.parametrize("choice", ["auto", "none", "required"])
async def test_a_tool_call(choice: str) -> None:
    """A function with a schema; it is not called where it is switched off, and is called where it must be."""
    place = {"type": "object", "properties": {"location": {"enum": ["Paris", "Rome"]}}, "required": ["location"]}
    weather = {"name": "get_weather", "description": "Get weather information", "parameters": place, "strict": True}
    async with open_tiny() as inference:
        client = ArealOpenAI(engine=inference)
        completion = await client.chat.completions.create(
            messages=DATA["messages"],
            tools=[{"type": "function", "function": weather}],
            tool_choice=choice,
            parallel_tool_calls=False,
            max_completion_tokens=64,
        )
        client.set_last_reward(1.0)
        (interaction,) = client.export_interactions(style="individual").values()
    calls = completion.choices[0].message.tool_calls or []

    assert (completion.id, 1.0) == (interaction.interaction_id, interaction.reward)
    assert choice != "none" or calls == []
    # The arguments of a call that max_completion_tokens cuts are incomplete.
    if choice == "required" and completion.choices[0].finish_reason != "length":
        assert [json.loads(call.function.arguments)["location"] in ("Paris", "Rome") for call in calls] == [True]


class MyWorkflow(RolloutWorkflow):
    """Ids in, tensors out."""

    def __init__(self, tokenizer: Any, gconfig: Any, **kwargs: Any) -> None:
        self.tokenizer, self.gconfig = tokenizer, gconfig

    async def arun_episode(self, engine: Any, data: Any) -> Any:
        input_ids = self.tokenizer.encode(data["prompt"])
        req = ModelRequest(rid=uuid.uuid4().hex, input_ids=input_ids, gconfig=self.gconfig, tokenizer=self.tokenizer)
        resp = await engine.agenerate(req)
        reward = self.compute_reward(resp, data)
        if reward < 0:
            return None
        return self.build_tensor_dict(resp, reward)

    def compute_reward(self, resp: Any, data: Any) -> float:
        return -1.0 if data.get("is_bad") else float(workflow_context.get().member)

    def build_tensor_dict(self, resp: Any, reward: float) -> dict[str, Any]:
        ids = resp.input_tokens + resp.output_tokens
        return {
            "input_ids": torch.tensor([ids], dtype=torch.int32),
            "attention_mask": torch.ones(1, len(ids), dtype=torch.bool),
            "loss_mask": torch.tensor([[0] * resp.input_len + [1] * resp.output_len], dtype=torch.int32),
            "logprobs": torch.tensor([[0.0] * resp.input_len + resp.output_logprobs], dtype=torch.float32),
            "rewards": torch.tensor([reward], dtype=torch.float32),
            "versions": torch.tensor([[-1] * resp.input_len + resp.output_versions], dtype=torch.int32),
        }


def problems(num: int, seed: int) -> Any:
    """Prompts that differ by a number."""
    return ({"prompt": f"say {seed + index}"} for index in range(num))


def test_a_custom_workflow_is_trained_and_dumped(tmp_path: Path) -> None:
    """A class with arguments; the dump lies where it is documented, with the documented fields."""
    tokenizer_path = resolve_model("tiny").path
    settings = {
        "experiment_name": "my_exp",
        "trial_name": "trial1",
        "model": "tiny",
        "total_steps": 1,
        "batch_size": 1,
        "dataset": {"python": f"{Path(__file__)}:problems", "size": 8},
        "eval_dataset": None,
        "gconfig": {"max_new_tokens": 4},
        "rollout": {
            "workflow": f"{Path(__file__)}:MyWorkflow",
            "group_size": 4,
            "dump_to_file": True,
            "fileroot": str(tmp_path / "logs"),
            "tokenizer_path": str(tokenizer_path),
            "max_head_offpolicyness": 0,
        },
        "engine": {"num_threads": 1, "max_length": 256},
        "trainer": {"dtype": "float32"},
        "logging": {"trackers": [], "display": "plain"},
    }
    trainer = Trainer(create_config(settings))
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
    trainer.train(workflow=MyWorkflow, workflow_kwargs={"tokenizer": tokenizer, "gconfig": trainer.config.gconfig})
    (path, *_) = sorted((tmp_path / "logs" / "my_exp" / "trial1" / "rollout" / "0").glob("*.jsonl"))
    rows = [json.loads(line) for line in path.read_text().splitlines()]

    assert [0, 1, 2, 3] == sorted(row["sample_idx"] for row in rows)
    assert {path.stem} == {str(row["task_id"]) for row in rows}
    names = "task_id sample_idx seqlen prompt_len head_version tail_version reward prompt completion token_ids trained"
    assert names.split() == list(rows[0])
    assert all(row["prompt"].endswith(f"say {path.stem}") or row["prompt"].startswith("say") for row in rows)


@pytest.mark.anyio
async def test_a_workflow_is_grouped_by_hand() -> None:
    """Four members of one row each are four rows, padded to the longest; a rejected problem is ``None``."""
    async with open_tiny() as inference, inference.rollouts() as engine:
        kwargs = {"tokenizer": AutoTokenizer.from_pretrained(resolve_model("tiny").path), "gconfig": GCONFIG}
        rejected = engine.submit({"prompt": "no", "is_bad": True}, MyWorkflow, kwargs, group_size=2)
        grouped = engine.submit(data=DATA, workflow=MyWorkflow, workflow_kwargs=kwargs, group_size=4)
        tensors, nothing = await grouped, await rejected

    assert nothing is None
    assert 4 == len(tensors["input_ids"])
    assert [0.0, 1.0, 2.0, 3.0] == sorted(tensors["rewards"].tolist())
