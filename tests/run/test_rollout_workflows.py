"""Rollout workflows as they are documented, on the tiny model: run by hand, and trained on for a step."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from transformers import AutoTokenizer

from areal_actors import (
    ArealOpenAI,
    GenerationConfig,
    GroupedRolloutWorkflow,
    ModelRequest,
    RolloutWorkflow,
    Trainer,
    create_config,
    open_inference,
)
from areal_actors.dashboard import RunDirectory, RunSummary
from areal_actors.errors import EpisodeError, WorkflowError
from areal_actors.models import resolve_model
from areal_actors.workflows import workflow_context

pytestmark = pytest.mark.filterwarnings("ignore:Async generator 'openai:ResourceWarning")  # trio, of the SDK's streams

HERE = Path(__file__)


def problems(num: int, seed: int) -> Any:
    """Prompts that differ by a number."""
    return (
        {"prompt": f"say {seed + index}", "messages": [{"role": "user", "content": f"say {seed + index}"}]}
        for index in range(num)
    )


# ------------------------------------------------------------------------------------------ documented workflows


class MyWorkflow(RolloutWorkflow):
    """Tensors, from the ids of a prompt."""

    def __init__(self, tokenizer: Any, gconfig: Any, **kwargs: Any) -> None:
        self.tokenizer = tokenizer
        self.gconfig = gconfig
        self.scopes = kwargs.get("scopes", set())

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, Any] | None:
        ctx = workflow_context.get()
        self.scopes.add((workflow_context.stat_scope(), ctx.is_eval))
        req = ModelRequest(
            rid=uuid.uuid4().hex,
            input_ids=self.tokenizer.encode(data["prompt"]),
            gconfig=self.gconfig,
            tokenizer=self.tokenizer,
        )
        resp = await engine.agenerate(req)
        reward = self.compute_reward(resp, data)
        if reward < 0:
            return None
        return self.build_tensor_dict(resp, reward)

    def compute_reward(self, resp: Any, data: dict[str, Any]) -> float:
        return (sum(resp.output_tokens) % 7) / 7

    def build_tensor_dict(self, resp: Any, reward: float) -> dict[str, Any]:
        num_prompt, num_output = resp.input_len, resp.output_len
        return {
            "input_ids": torch.tensor([resp.input_tokens + resp.output_tokens], dtype=torch.int32),
            "attention_mask": torch.ones(1, num_prompt + num_output, dtype=torch.bool),
            "loss_mask": torch.tensor([[0] * num_prompt + [1] * num_output], dtype=torch.int32),
            "logprobs": torch.tensor([[0.0] * num_prompt + resp.output_logprobs], dtype=torch.float32),
            "rewards": torch.tensor([reward], dtype=torch.float32),
            "versions": torch.tensor([[-1] * num_prompt + resp.output_versions], dtype=torch.int32),
        }


class RejectingWorkflow(MyWorkflow):
    """Rejects the first member of every group."""

    def compute_reward(self, resp: Any, data: dict[str, Any]) -> float:
        is_first = workflow_context.get().member == 0 and not workflow_context.get().is_eval
        return -1.0 if is_first else super().compute_reward(resp, data)


class ToolWorkflow(RolloutWorkflow):
    """A call that the model is made to make, rewarded by the place that it names."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        client = ArealOpenAI(engine=engine)
        parameters = {"type": "object", "properties": {"location": {"enum": ["Paris", "Rome"]}}}
        weather = {"name": "get_weather", "description": "Get weather information", "parameters": parameters}
        completion = await client.chat.completions.create(
            messages=data["messages"],
            tools=[{"type": "function", "function": weather | {"strict": True}}],
            tool_choice="required",
            parallel_tool_calls=False,
            max_completion_tokens=64,
            model="default",
        )
        calls = completion.choices[0].message.tool_calls or []  # none, where its tokens were too few
        client.set_last_reward(float(any("Paris" in call.function.arguments for call in calls)))
        return client.export_interactions(style="concat")


class Asking:
    """An agent, for comparison."""

    async def run(self, data: dict[str, Any], base_url: str, api_key: str, http_client: Any, **extra: Any) -> float:
        answer = await http_client.post(
            f"{base_url}/chat/completions", json={"model": "policy", "messages": data["messages"], "max_tokens": 6}
        )
        return float(len(answer.json()["choices"][0]["message"]["content"]) % 3)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(resolve_model("tiny").path)


# ------------------------------------------------------------------------------------------------------- training


def train(
    tmp_path: Path, workflow: Any = None, workflow_kwargs: Any = None, *, backend: str = "asyncio", **rollout: Any
) -> tuple[RunSummary, RunDirectory]:
    """One step on two groups of three."""
    settings = {
        "experiment_name": "my_exp",
        "model": "tiny",
        "total_steps": 1,
        "batch_size": 2,
        "fileroot": str(tmp_path),
        "dataset": {"python": f"{HERE}:problems", "size": 8},
        "eval_dataset": {"python": f"{HERE}:problems", "size": 2, "seed": 100},
        "gconfig": {"max_new_tokens": 6},
        "rollout": {"workflow": f"{HERE}:ToolWorkflow", "group_size": 3, "max_head_offpolicyness": 0} | rollout,
        "engine": {"num_threads": 1, "max_length": 512},
        "trainer": {"optimizer": {"learning_rate": 0.01}},
        "logging": {"trackers": [], "display": "plain"},
    }
    trainer = Trainer(create_config(settings))
    if callable(workflow_kwargs):
        workflow_kwargs = workflow_kwargs(trainer.config)
    summary = trainer.train(workflow, workflow_kwargs, backend=backend)
    return summary, trainer.config.run_directory


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def dumped(directory: RunDirectory) -> list[dict[str, Any]]:
    """What began under the first weights; after the last step, other groups may have begun."""
    return [row for path in sorted((directory.rollouts / "0").glob("*.jsonl")) for row in read(path)]


@pytest.mark.parametrize(
    ("auto_dtype", "backend"), [("float32", "asyncio"), ("bfloat16", "trio")], indirect=["auto_dtype"]
)
def test_tensors_are_trained_on(tmp_path: Path, tokenizer: Any, backend: str, max_gap: float) -> None:
    """A class with arguments: one step, with evaluations beside it, and a dump in the documented layout."""
    scopes: set[Any] = set()
    summary, directory = train(
        tmp_path,
        MyWorkflow,
        lambda config: {"tokenizer": tokenizer, "gconfig": config.gconfig, "scopes": scopes},
        backend=backend,
    )
    _, step = read(directory.metrics)
    rows = dumped(directory)
    (path, *_) = sorted((tmp_path / "my_exp" / "trial" / "rollout" / "0").iterdir())
    (evaluated,) = read(tmp_path / "my_exp" / "trial" / "eval-rollout" / "1" / "0.jsonl")

    assert (1, 6, 0, 0.0) == (summary.steps, step["episodes"], step["failed_episodes"], step["staleness_max"])
    assert step["loss"] is not None
    assert step["behaviour_gap_max"] < max_gap
    assert {("rollout", False), ("eval-rollout", True)} == scopes
    assert [f"{rows[0]['task_id']}.jsonl", "0.jsonl"] == [path.name, f"{evaluated['task_id']}.jsonl"]
    fields = "task_id sample_idx seqlen prompt_len head_version tail_version reward prompt completion token_ids trained"
    assert fields.split() == list(rows[0])
    assert {0, 1, 2} == {row["sample_idx"] for row in rows}
    assert {(0, 0)} == {(row["head_version"], row["tail_version"]) for row in rows}
    assert all(row["prompt_len"] == len(tokenizer.encode(row["prompt"])) < row["seqlen"] for row in rows)


def test_a_workflow_of_the_configuration_is_trained_on(tmp_path: Path) -> None:
    """By a file and a name, as YAML has it; the engine brings what the client needs. Tools are called."""
    _, directory = train(tmp_path)
    _, step = read(directory.metrics)

    assert (6, 0) == (step["episodes"], step["failed_episodes"])
    assert any("get_weather" in row["completion"] for row in dumped(directory))


def test_object_without_workflow_methods_is_refused(tmp_path: Path) -> None:
    """Before anything is started."""
    with pytest.raises(WorkflowError, match="a rollout workflow is a subclass of RolloutWorkflow"):
        train(tmp_path, GenerationConfig)


# -------------------------------------------------------------------------------------------------------- by hand


@pytest.mark.anyio
async def test_submitted_rollouts_are_awaited_in_any_order(tokenizer: Any) -> None:
    """Workflows and agents, in groups; results are awaited as one likes, twice if need be."""
    kwargs = {"tokenizer": tokenizer, "gconfig": GenerationConfig(max_new_tokens=4)}
    one, two, three = problems(3, 0)
    async with open_inference("tiny") as inference, inference.rollouts() as engine:
        by_class = engine.submit(data=one, workflow=MyWorkflow, workflow_kwargs=kwargs, group_size=4)
        agent = engine.submit(two, Asking(), group_size=2)
        partly = engine.submit(three, RejectingWorkflow(**kwargs), group_size=2)
        rejected = engine.submit(one, RejectingWorkflow(**kwargs))
        grouped = engine.submit(one, GroupedRolloutWorkflow(MyWorkflow(**kwargs), 3), group_size=2)
        assert await rejected is None
        few, asked = await partly, await agent
        joined = await grouped
        tensors, again = await by_class, await by_class.result()

    assert tensors is not None
    assert few is not None
    assert asked is not None
    assert joined is not None
    assert (4, 1, 2, 6) == tuple(len(result["input_ids"]) for result in (tensors, few, asked, joined))
    assert torch.equal(tensors["input_ids"], again["input_ids"])
    assert len({tuple(row.tolist()) for row in tensors["input_ids"]}) > 1
    assert tensors["attention_mask"].dtype is torch.bool
    assert by_class.is_over


@pytest.mark.anyio
async def test_failed_and_cancelled_rollouts_raise_for_their_awaiters(tokenizer: Any) -> None:
    """Others are not disturbed, and leaving the block cancels running ones."""

    class Hanging(RolloutWorkflow):
        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
            await anyio.sleep_forever()

    class Failing(RolloutWorkflow):
        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
            raise ValueError("broken")

    async with open_inference("tiny") as inference:
        async with inference.rollouts(gconfig=GenerationConfig(max_new_tokens=4)) as engine:
            cancelled, left = engine.submit({}, Hanging()), engine.submit({}, Hanging())
            with pytest.raises(EpisodeError, match=r"Failing\.arun_episode raised ValueError: broken"):
                await engine.submit({}, Failing())
            cancelled.cancel()
            with pytest.raises(EpisodeError, match="cancelled before it was over"):
                await cancelled
            response = await engine.agenerate(ModelRequest(input_ids=[5, 6]))
        with pytest.raises(EpisodeError, match="cancelled before it was over"):
            await left

    assert 4 >= response.output_len >= 1
