"""The documented names of Python, row by row; whole examples are in the modules beside this one."""

from __future__ import annotations

import math
import os
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import anyio
import httpx
import numpy as np
import pytest
import torch
from tests.client.service import open_service
from tests.compat import agents
from tests.compat.scoring import twice
from tests.compat.tiny_model import DATA, MESSAGES, open_tiny

from areal_actors import (
    ArealOpenAI,
    AsyncRewardWrapper,
    GenerationConfig,
    GroupedRolloutWorkflow,
    Inference,
    ModelRequest,
    OpenAIProxyClient,
    OpenAIProxyWorkflow,
    RolloutWorkflow,
)
from areal_actors.errors import EpisodeError, InvalidRequest, NotFound
from areal_actors.workflows import placeholder_keys, workflow_context

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "areal.md"


def names_of_the_page() -> list[str]:
    """The second column of its table."""
    return re.findall(r"^\| `[\w.]+` \| `([\w.]+)` \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("name", names_of_the_page())
def test_every_name_of_the_page_is_there(name: str) -> None:
    """Where it says."""
    module, _, attribute = name.rpartition(".")

    assert hasattr(import_module(module), attribute)


def test_core_has_the_clients_of_a_service() -> None:
    """At the path from which agents import them."""
    from areal_actors import client, core

    assert (client.AgentSession, client.AgentRunner) == (core.AgentSession, core.AgentRunner)


def test_the_page_has_a_table() -> None:
    """With the names that are documented as public."""
    names = {name.rpartition(".")[2] for name in names_of_the_page()}

    assert {"ArealOpenAI", "InteractionWithTokenLogpReward", "OpenAIProxyClient", "OpenAIProxyWorkflow"} <= names
    assert {"AgentSession", "AgentRunner", "RemoteSGLangEngine", "ProxyWorkflow", "Trainer"} <= names


# ----------------------------------------------------------------------------------------------------------- agents


class Returning:
    """Asks once and returns what it was made with; ``"id"`` as a key stands for the completion's id."""

    def __init__(self, result: Any) -> None:
        self.result = result
        self.injected: dict[str, Any] = {}

    async def run(self, data: Any, **extra_kwargs: Any) -> Any:
        self.injected = extra_kwargs
        http, url = extra_kwargs["http_client"], extra_kwargs["base_url"]
        answer = (await http.post(f"{url}/chat/completions", json={"messages": data["messages"]})).json()
        if isinstance(self.result, dict):
            return {answer["id"] if name == "id" else name: value for name, value in self.result.items()}
        return self.result


def wrapped(inference: Inference, agent: Any) -> OpenAIProxyWorkflow:
    return OpenAIProxyWorkflow(
        agent=agent, proxy_addr=inference.endpoint.url, admin_key=inference.endpoint.admin_key, discount=0.9
    )


@pytest.mark.anyio
@pytest.mark.parametrize("result", [1, 1.0, True, np.float32(1), torch.tensor(1.0), {"id": 1.0}])
async def test_agent_return_values_become_rewards(result: Any) -> None:
    """Anything like a float, or a dict of such by completion id, is the reward; the URL ends in ``/v1``."""
    agent = Returning(result)
    async with open_service() as inference:
        interactions = await wrapped(inference, agent).arun_episode(None, DATA)

    assert [(1.0, 1.0)] == [(row.reward, row.assigned_reward) for row in interactions.values()]
    assert agent.injected["base_url"].endswith("/v1")
    assert {"base_url", "api_key", "http_client"} == set(agent.injected)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("result", "error"),
    [
        ("good", EpisodeError),
        (None, EpisodeError),
        (math.nan, InvalidRequest),
        ({"id": math.nan}, InvalidRequest),
        ({"chatcmpl-unknown": 1.0}, NotFound),
    ],
)
async def test_invalid_reward_is_refused(result: Any, error: type[Exception]) -> None:
    """By name; through the wrapper and by hand alike, an episode of it is not trained."""
    async with open_service() as inference, inference.rollouts() as engine:
        with pytest.raises(error):
            await wrapped(inference, Returning(result)).arun_episode(None, DATA)
        with pytest.raises(EpisodeError):
            await engine.submit(DATA, Returning(result))


@pytest.mark.anyio
@pytest.mark.filterwarnings("ignore:Async generator 'openai:ResourceWarning")
async def test_an_agent_without_a_key_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the SDK insists on one, there is a placeholder; afterwards the environment is as it was."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    async with open_service() as inference:
        interactions = await wrapped(inference, agents.MyAgent()).arun_episode(None, DATA)

    assert [0.5] == [row.reward for row in interactions.values()]
    assert "OPENAI_API_KEY" not in os.environ


def test_placeholders_last_as_long_as_someone_needs_them() -> None:
    """Blocks may overlap in any way; what was set before, or meanwhile, is left alone."""
    environment = {"ANTHROPIC_API_KEY": "mine"}
    one, two = placeholder_keys(environment), placeholder_keys(environment)
    one.__enter__()
    two.__enter__()
    one.__exit__(None, None, None)
    assert "OPENAI_API_KEY" in environment
    two.__exit__(None, None, None)
    assert {"ANTHROPIC_API_KEY": "mine"} == environment
    with placeholder_keys(environment):
        environment["OPENAI_API_KEY"] = "theirs"

    assert {"ANTHROPIC_API_KEY": "mine", "OPENAI_API_KEY": "theirs"} == environment


# ------------------------------------------------------------------------------------------------ rollout workflows


class Tensors(RolloutWorkflow):
    """The two fields that are required, as many tokens as its member says; the last one is rejected."""

    async def arun_episode(self, engine: Any, data: Any) -> Any:
        length = 1 + workflow_context.get().member
        if length == 4:
            return None
        return {
            "input_ids": torch.ones(1, length, dtype=torch.int32),
            "attention_mask": torch.ones(1, length, dtype=torch.bool),
        }


@pytest.mark.anyio
async def test_groups() -> None:
    """Rejected members are dropped and the others padded; all rejected is ``None``; interactions are merged."""

    class Rejecting(RolloutWorkflow):
        async def arun_episode(self, engine: Any, data: Any) -> Any:
            return None

    async with open_service() as inference, inference.rollouts() as engine:
        three = await GroupedRolloutWorkflow(Tensors(), 4).arun_episode(engine, {})
        none = await GroupedRolloutWorkflow(Rejecting(), 2).arun_episode(engine, {})
        merged = await GroupedRolloutWorkflow(wrapped(inference, Returning(1.0)), 4).arun_episode(engine, DATA)

    assert three is not None
    assert (3, 3) == tuple(three["input_ids"].shape)
    assert [1, 2, 3] == three["attention_mask"].sum(1).tolist()
    assert none is None
    assert merged is not None
    assert 4 == len(merged)


@pytest.mark.anyio
async def test_the_context_of_an_episode() -> None:
    """Whether it is an evaluation, of which task, and under which name statistics are kept; each has its own."""
    seen: list[tuple[Any, ...]] = []

    class Looking(RolloutWorkflow):
        async def arun_episode(self, engine: Any, data: Any) -> Any:
            await anyio.lowlevel.checkpoint()
            context = workflow_context.get()
            seen.append((context.task_id, context.is_eval, workflow_context.stat_scope(), data["index"]))

    async with open_service() as inference, inference.rollouts() as engine:
        for rollout in [engine.submit({"index": index}, Looking()) for index in range(3)]:
            assert await rollout is None

    assert 3 == len({task for task, *_ in seen})
    assert {(False, "rollout")} == {(is_eval, scope) for _, is_eval, scope, _ in seen}


@pytest.mark.anyio
async def test_tokens_from_the_engine() -> None:
    """Ids in; ids, log-probabilities, versions and the reason of the end out."""
    gconfig = GenerationConfig(temperature=0.7, top_p=0.9, max_new_tokens=4, stop=["!"])
    async with open_tiny() as inference, inference.rollouts() as engine:
        response = await engine.agenerate(ModelRequest(rid="one", input_ids=[5, 6, 7], gconfig=gconfig, tokenizer=None))

    assert [5, 6, 7] == response.input_tokens
    assert 4 >= len(response.output_tokens) == len(response.output_logprobs) == len(response.output_versions) >= 1
    assert response.stop_reason in ("stop", "length")


@pytest.mark.anyio
async def test_rewards_are_computed_in_a_process_pool() -> None:
    """In another process than this one."""
    assert 6.0 == await AsyncRewardWrapper(twice)("abc", pid=os.getpid())


# ---------------------------------------------------------------------------------------------- the direct client


@pytest.mark.anyio
@pytest.mark.filterwarnings("ignore:Async generator 'openai:ResourceWarning")
async def test_the_direct_client() -> None:
    """Both of OpenAI's interfaces, rewards at once, discount, and every way to read what was said."""
    async with open_service() as inference:
        client = ArealOpenAI(engine=inference, tokenizer=inference.renderer)
        first = await client.chat.completions.create(model="default", messages=MESSAGES)  # type: ignore[arg-type]
        more = [*MESSAGES, {"role": "assistant", "content": "fine"}, {"role": "user", "content": "Sure?"}]
        second = await client.chat.completions.create(model="default", messages=more)  # type: ignore[arg-type]
        client.set_reward(first.id, 0.5)
        client.set_last_reward(1.0)
        before = client.export_interactions(style="individual")
        client.apply_reward_discount(turn_discount=0.9)
        after = client.export_interactions(style="individual")
        (whole,) = client.export_interactions(style="concat").values()
        completions = client.export_completions(turn_discount=0.5)
        read, same = client.get_interaction(second.id), client.get_completions(second.id)
        response = await client.responses.create(model="default", input="What is 2+2?")

    assert [first.id, second.id] == list(before) == list(after)
    assert [0.5, 1.0] == [row.reward for row in before.values()]
    assert [pytest.approx(1.4), 1.0] == [row.reward for row in after.values()]
    assert [1.0, 1.0] == [row.reward for row in completions.values()]
    assert second.id == whole.interaction_id == read.interaction_id == same.interaction_id
    assert (second, first.id) == (read.completion, read.parent.interaction_id if read.parent else None)
    assert [{"role": "assistant", "content": "fine"}] == [
        {"role": turn["role"], "content": turn["content"]} for turn in read.output_message_list or ()
    ]
    assert "fine" == response.output_text


@pytest.mark.anyio
async def test_the_dtypes_of_tensors() -> None:
    """As documented: ids, masks and versions are int32, log-probabilities and rewards float32, attention bool."""
    async with open_service() as inference:
        interactions = await wrapped(inference, Returning(1.0)).arun_episode(None, DATA)
    (interaction,) = interactions.values()
    tensors = interaction.to_tensor_dict()

    assert {torch.int32} == {tensors[name].dtype for name in ("input_ids", "loss_mask", "versions")}
    assert {torch.float32} == {tensors[name].dtype for name in ("logprobs", "rewards")}
    assert torch.bool is tensors["attention_mask"].dtype
    assert 1 == tensors["rewards"].dim()
    assert {-1} == set(tensors["versions"][tensors["loss_mask"] == 0].tolist())


@pytest.mark.anyio
async def test_the_client_of_a_session() -> None:
    """A context manager with a URL, rewards and an export."""
    async with open_service() as inference:
        endpoint = inference.endpoint
        async with OpenAIProxyClient(endpoint.url, admin_key=endpoint.admin_key, task_id="task-0-0") as session:
            async with Asking(session) as ask:
                one, _ = await ask(), await ask()
            await session.set_reward(one, 0.5)
            await session.set_last_reward(1.0)
        episode = await session.export_episode(discount=0.9, style="individual")

    assert session.session_url.endswith("/v1")
    assert session.session_id.startswith("task-0-0-")
    assert (1.5, 2) == (episode.reward, len(episode.trajectories))


class Asking:
    """Asks a session once for each call."""

    def __init__(self, session: OpenAIProxyClient) -> None:
        self._url, self._http = f"{session.session_url}/chat/completions", httpx.AsyncClient(timeout=30)

    async def __aenter__(self) -> Any:
        async def ask() -> str:
            answer = await self._http.post(self._url, json={"messages": MESSAGES})
            return str(answer.json()["id"])

        return ask

    async def __aexit__(self, *error: object) -> None:
        await self._http.aclose()
