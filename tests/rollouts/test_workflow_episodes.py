"""Rollout workflows in the runner: each return kind, whatever goes wrong, and what becomes of a group then."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
import torch
from tests.stacks.inference_stack import InferenceStack, encode, open_inference_stack, renderer
from tests.stacks.rollout_stack import Episode, Notebook, open_rollout_stack, problems

from areal_actors.client import create_http_client
from areal_actors.domain import Problem
from areal_actors.kernel import Ref
from areal_actors.messages import (
    DescribeCapacity,
    Endpoint,
    EpisodeFinished,
    Evaluate,
    LeaseGroups,
    Rollouts,
    RunProblem,
)
from areal_actors.rollouts.runner import Peers, RolloutRunner, RolloutsConfig
from areal_actors.rollouts.staleness import CapacityLimits
from areal_actors.testing.engines import EchoEngine
from areal_actors.workflows import (
    EpisodeEngine,
    GroupedRolloutWorkflow,
    InteractionWithTokenLogpReward,
    ModelRequest,
    RolloutWorkflow,
    workflow_context,
)

pytestmark = pytest.mark.anyio

Act = Callable[[EpisodeEngine, int], Awaitable[Any]]


class Acting(RolloutWorkflow):
    """A workflow of one function of the engine and the member's number."""

    def __init__(self, act: Act) -> None:
        self.act = act

    async def arun_episode(self, engine: EpisodeEngine, data: dict[str, Any]) -> Any:
        return await self.act(engine, workflow_context.get().member)


async def tensors(engine: EpisodeEngine, reward: float, *, num_rows: int = 1) -> dict[str, Any]:
    """Ask once, and say so in tensors."""
    response = await engine.agenerate(ModelRequest(input_ids=[5, 6]))
    ids = [*response.input_tokens, *response.output_tokens]
    mask = [0] * response.input_len + [1] * response.output_len
    row = {
        "input_ids": torch.tensor([ids], dtype=torch.int32),
        "attention_mask": torch.ones(1, len(ids), dtype=torch.bool),
        "loss_mask": torch.tensor([mask], dtype=torch.int32),
        "logprobs": torch.tensor([[0.0] * response.input_len + response.output_logprobs]),
        "versions": torch.tensor([[-1] * response.input_len + response.output_versions]),
        "rewards": torch.tensor([reward]),
    }
    return {name: torch.cat([value] * num_rows) for name, value in row.items()}


async def interactions(engine: EpisodeEngine, reward: float) -> dict[str, Any]:
    response = await engine.agenerate(ModelRequest(input_ids=[5, 6]))
    return {"turn": InteractionWithTokenLogpReward(interaction_id="turn", model_response=response, reward=reward)}


@asynccontextmanager
async def open_stage(
    workflow: RolloutWorkflow, *, is_producing: bool = False, config: RolloutsConfig | None = None, **options: Any
) -> AsyncIterator[tuple[InferenceStack, Ref[Rollouts], Notebook]]:
    async with open_inference_stack(**options) as inference, create_http_client() as http_client:
        notebook = Notebook()
        progress = await inference.system.spawn(notebook, name="progress")
        runner = RolloutRunner(
            {"": workflow},
            peers=Peers(
                sessions=inference.sessions, exports=inference.exports, capacity=inference.capacity, progress=progress
            ),
            endpoint=Endpoint(url="http://proxy", admin_key="key"),
            http_client=http_client,
            engine=EpisodeEngine(inference.generation, renderer()),
            configs={"": config or RolloutsConfig(group_size=2, episode_timeout_seconds=60)},
            train={"": problems(1_000)} if is_producing else None,
            held_out={"": problems(2)},
        )
        yield inference, await inference.system.spawn(runner, name="rollouts"), notebook


async def play(act: Act, *, num_episodes: int = 1, **options: Any) -> Any:
    async with open_stage(Acting(act), **options) as (_, runner, _notebook):
        problem = Problem(position=0, data={"question": "what?"})
        return (await runner.ask(RunProblem(problem=problem, num_episodes=num_episodes))).episodes


async def test_tensors_are_rows_of_their_group():
    """With the tokens that were sampled, their versions, the reward as the return of each, and a session."""
    episodes = await play(lambda engine, member: tensors(engine, 0.5 + member), num_episodes=2)
    rows = [row for episode in episodes for row in episode.trajectories]

    assert ["hand-1-0-0", "hand-1-0-1"] == [episode.session for episode in episodes] == [row.session for row in rows]
    assert [0.5, 1.5] == [episode.reward for episode in episodes] == [row.reward for row in rows]
    assert [5, 6, *encode("42")] == rows[0].input_ids.tolist()
    assert [0.0, 0.0, *[0.5] * len(encode("42"))] == rows[0].returns.tolist()
    assert (0, 0, len(encode("42"))) == (rows[0].head_version, rows[0].tail_version, rows[0].num_trained_tokens)


async def raise_error(engine: EpisodeEngine) -> Any:
    await tensors(engine, 1.0)
    raise ValueError("the tool broke")


async def return_none(engine: EpisodeEngine) -> Any:
    return None


async def return_number(engine: EpisodeEngine) -> Any:
    return 1.0


async def forget_versions(engine: EpisodeEngine) -> Any:
    return {"input_ids": [[1, 2]], "attention_mask": [[1, 1]], "loss_mask": [[0, 1]], "logprobs": [[0.0, -1.0]]}


async def invent_an_id(engine: EpisodeEngine) -> Any:
    return await tensors(engine, 1.0) | {"input_ids": torch.full((1, 2 + len(encode("42"))), 1 << 20)}


async def hang(engine: EpisodeEngine) -> Any:
    await anyio.sleep_forever()


@pytest.mark.parametrize(
    ("act", "complaint"),
    [
        (raise_error, "Acting.arun_episode raised ValueError: the tool broke"),
        (return_none, "returned None: the episode is rejected"),
        (return_number, "returned a float"),
        (forget_versions, "there are no versions"),
        (invent_an_id, "an id 1048576"),
        (hang, "took longer than 60 s"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_failed_member_costs_no_sibling(act: Callable[[EpisodeEngine], Awaitable[Any]], complaint: str):
    """It has a reason and no rows; the others are trained. Only ``None`` counts as rejected."""

    async def act_if_first(engine: EpisodeEngine, member: int) -> Any:
        return await (act(engine) if member == 0 else tensors(engine, 0.5))

    failed, *others = await play(act_if_first, num_episodes=3)

    assert complaint in failed.failure
    assert ((), act is return_none) == (failed.trajectories, failed.is_rejected)
    assert [(0.5, None)] * 2 == [(episode.reward, episode.failure) for episode in others]


async def test_cancelled_request_cancels_the_workflow():
    """Nothing runs on in the engine."""
    engine = EchoEngine(lambda _: encode("42"), is_gated=True)
    with anyio.move_on_after(1):
        await play(lambda engine, _: tensors(engine, 1.0), engine=engine)

    assert (0, 1) == (engine.statistics().waiting, engine.statistics().aborted)


# ------------------------------------------------------------------------------------------------ training groups


LIMITS = CapacityLimits(max_concurrent=8, batch_size=1)


async def test_rejected_group_is_refunded_and_counted():
    """Another problem takes its place; rejections, however many in a row, are not failures that end the run."""

    async def act(engine: EpisodeEngine, _: int) -> Any:
        return None if int(workflow_context.get().task_id) < 5 else await tensors(engine, 1.0)

    config = RolloutsConfig(group_size=2, max_failed_groups=2)
    async with open_stage(Acting(act), is_producing=True, config=config, limits=LIMITS) as (inference, _, notebook):
        lease = await inference.exports.ask(LeaseGroups(num_groups=1, version=0, max_staleness=0))
        await anyio.wait_all_tasks_blocked()
        view = await inference.capacity.ask(DescribeCapacity())
        rejected = [item for item in notebook.news if isinstance(item, EpisodeFinished) and item.episode.is_rejected]

    assert [5] == [group.problem.position for group in lease.groups]
    assert (10, 0, 1) == (len(rejected), view.running, view.accepted)


async def test_rows_without_anything_to_train_fail_by_name():
    """Refunds would go on without end otherwise; an evaluation takes them."""

    async def act(engine: EpisodeEngine, _: int) -> Any:
        if workflow_context.stat_scope() == "rollout" and workflow_context.get().task_id != "0":
            return await tensors(engine, 1.0)
        return {"input_ids": [[1, 2]], "attention_mask": [[1, 1]], "rewards": [0.5]}

    async with open_stage(Acting(act), is_producing=True, limits=LIMITS) as (inference, runner, notebook):
        await inference.exports.ask(LeaseGroups(num_groups=1, version=0, max_staleness=0))
        evaluated = await runner.ask(Evaluate(version=0))
        failures = [item.episode.failure for item in notebook.news if isinstance(item, EpisodeFinished)]

    assert "nothing is to be trained" in failures[0]
    assert [0.5, 0.5] == [group.episodes[0].reward for group in evaluated]


async def test_grouped_workflow_is_taken_apart():
    """Its members are episodes with rewards of their own, whatever the configured size."""
    workflow = GroupedRolloutWorkflow(Acting(tensors), group_size=3)
    async with open_stage(workflow, is_producing=True, limits=LIMITS) as (inference, _, _notebook):
        (group,) = (await inference.exports.ask(LeaseGroups(num_groups=1, version=0, max_staleness=0))).groups

    assert [0.0, 1.0, 2.0] == [episode.reward for episode in group.episodes]


async def act_and_fail(episode: Episode) -> float:
    """An agent that answers, is rewarded half-way, and breaks if it is the first."""
    await episode.ask("first")
    if episode.context.member == 0 and episode.context.task_id == "0":
        raise ValueError("the tool broke")
    return 1.0


async def test_failing_member_is_dropped_and_its_siblings_are_trained():
    config = RolloutsConfig(group_size=2, episode_timeout_seconds=60)
    async with open_rollout_stack(act_and_fail, is_producing=True, config=config, limits=LIMITS) as rollout_stack:
        wanted = LeaseGroups(num_groups=1, version=0, max_staleness=0)
        (group,) = (await rollout_stack.inference.exports.ask(wanted)).groups
        told = [item.episode for item in rollout_stack.notebook.news if isinstance(item, EpisodeFinished)]
    first, second = group.episodes

    assert (0, 1.0, 1) == (group.problem.position, second.reward, len(second.trajectories))
    assert any("the tool broke" in str(episode.failure) for episode in told)
    assert ("Acting.run raised ValueError: the tool broke", ()) == (first.failure, first.trajectories)
