"""The trainer actor: the order of a step, when it stops, what it saves, and what it says about it.

The steps are real ones, of a tiny model on a thread, and so is the time: a virtual clock would run past the thread.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from attrs import define, evolve
from tests.stacks import rollout_stack
from tests.stacks.inference_stack import InferenceStack, encode
from tests.stacks.rollout_stack import RolloutStack, open_rollout_stack
from transformers import LlamaConfig, LlamaForCausalLM

from areal_actors.dashboard.metrics import STEP_KEYS
from areal_actors.domain import (
    DataPosition,
    Episode,
    Group,
    GroupId,
    InteractionId,
    Problem,
    SessionId,
    Snapshot,
    Trajectory,
)
from areal_actors.errors import EngineError, TrainingDiverged, TrainingStalled
from areal_actors.kernel import Ref
from areal_actors.messages import (
    AwaitTraining,
    DeliverGroup,
    DescribeCapacity,
    EvaluationFinished,
    GroupsTrained,
    PhaseChanged,
    RequestStop,
    StepFinished,
    Training,
)
from areal_actors.rollouts.staleness import CapacityLimits
from areal_actors.run.loop import train
from areal_actors.testing.engines import EchoEngine
from areal_actors.training.actor import TrainerActor, TrainingPeers
from areal_actors.training.config import CheckpointConfig, EvaluationConfig, StopConfig, TrainerConfig, TrainingPlan
from areal_actors.training.publication import DiskPublisher, Publisher
from areal_actors.training.stored_checkpoints import find_checkpoints, parse_position
from areal_actors.training.trainer import PolicyTrainer

pytestmark = pytest.mark.anyio

PLAN = TrainingPlan(total_steps=2, batch_size=2, max_staleness=9)


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Real time."""
    return str(request.param)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


def create_policy() -> PolicyTrainer:
    """A model so small that a step takes milliseconds."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=32,
                hidden_size=8,
                intermediate_size=16,
                num_hidden_layers=1,
                num_attention_heads=1,
                max_position_embeddings=32,
            )
        )
    return PolicyTrainer(model, TrainerConfig(dtype="float32"))


def make_group(position: int, *, version: int = 0, rewards: tuple[float, ...] = (0.0, 1.0)) -> Group:
    """Episodes of one row each, of a prompt of two tokens and an answer of two."""
    episodes = []
    for member, reward in enumerate(rewards):
        row = Trajectory(
            session=SessionId(f"s{position}-{member}"),
            interactions=(InteractionId("turn"),),
            input_ids=[1, 2, 3 + member, 4 + position % 8],
            loss_mask=[0, 0, 1, 1],
            logprobs=[0.0, 0.0, -3.4, -3.4],
            versions=[-1, -1, version, version],
            returns=[0.0, 0.0, reward, reward],
            turns=[-1, -1, 0, 0],
            reward=reward,
        )
        episodes.append(Episode(session=row.session, member=member, reward=reward, trajectories=(row,)))
    return Group(id=GroupId(f"train-{position}"), problem=Problem(position=position, data={}), episodes=tuple(episodes))


class LoadingEngine(EchoEngine):
    """Notes, at each load, which version capacity is counted for."""

    def __init__(self, **options: Any) -> None:
        super().__init__(lambda _: encode("42"), **options)
        self.inference: InferenceStack | None = None
        self.loads: list[tuple[int, int]] = []

    async def load(self, snapshot: Snapshot) -> None:
        assert self.inference is not None
        view = await self.inference.capacity.ask(DescribeCapacity())
        self.loads.append((snapshot.version, view.version))
        await super().load(snapshot)


@define
class School:
    """A trainer, and what can be seen of it."""

    rollout_stack: RolloutStack
    training: Ref[Training]
    policy: PolicyTrainer
    engine: LoadingEngine
    checkpoints: Path

    @property
    def inference(self) -> InferenceStack:
        return self.rollout_stack.inference

    async def deliver(self, *positions: int, **options: Any) -> None:
        for position in positions:
            await self.inference.exports.ask(DeliverGroup(group=make_group(position, **options)))

    def told(self, kind: type) -> list[Any]:
        return [news for news in self.rollout_stack.notebook.news if isinstance(news, kind)]

    @property
    def saved(self) -> list[str]:
        return [news.detail for news in self.told(PhaseChanged) if news.phase == "saving a checkpoint"]


async def answer_rightly(episode: rollout_stack.Episode) -> float:
    await episode.ask()
    return 1.0


@asynccontextmanager
async def open_school(
    checkpoints: Path,
    plan: TrainingPlan = PLAN,
    *,
    policy: PolicyTrainer | None = None,
    counters: Mapping[str, Any] | None = None,
    act: rollout_stack.Act = answer_rightly,
    engine: LoadingEngine | None = None,
    held_out: int = 0,
    publisher: Publisher | None = None,
) -> AsyncIterator[School]:
    engine, policy = engine or LoadingEngine(), policy or create_policy()
    limits = CapacityLimits(max_concurrent=64, batch_size=64)
    start = parse_position(counters)
    async with open_rollout_stack(
        act, held_out=held_out, engine=engine, limits=limits, start=start, max_seconds=100
    ) as stage:
        engine.inference = stage.inference
        actor = TrainerActor(
            policy=policy,
            peers=TrainingPeers(
                exports=stage.inference.exports,
                generation=stage.inference.generation,
                capacity=stage.inference.capacity,
                rollouts=stage.runner,
                progress=stage.progress,
            ),
            plan=plan,
            loop=train,
            checkpoints=checkpoints,
            counters=counters,
            publisher=publisher,
        )
        yield School(stage, await stage.inference.system.spawn(actor, name="trainer"), policy, engine, checkpoints)


async def test_run_trains_evaluates_and_saves(tmp_path: Path):
    """Two steps: evaluations before and after, one checkpoint at the end, and a record of each step."""
    async with open_school(tmp_path, held_out=2) as school:
        await school.deliver(0, 1, 2, 3)
        summary = await school.training.ask(AwaitTraining())
        position = parse_position(find_checkpoints(tmp_path)[-1].counters["caller"])
    first, last = school.told(StepFinished)

    assert (2, 2, True, None) == (summary.steps, summary.version, summary.is_finished, summary.stop_reason)
    assert [(0, 1.0), (2, 1.0)] == [(news.version, news.reward) for news in school.told(EvaluationFinished)]
    assert (1, 2) == (first.step, last.step)
    assert (0.5, None, 1.0) == (first.metrics["reward"], first.metrics["eval_reward"], last.metrics["eval_reward"])
    assert (0, 16, 8, 4) == tuple(
        first.metrics[key] for key in ("staleness_max", "tokens", "trained_tokens", "episodes")
    )
    assert set(first.metrics) == set(STEP_KEYS) - {"elapsed_seconds", "phase"}
    assert json.dumps(dict(last.metrics), allow_nan=False)
    assert DataPosition(next=4) == position


async def test_weights_are_served_before_they_are_announced(tmp_path: Path):
    """A group that starts under version v must find v in the engine: publication comes first."""
    async with open_school(tmp_path) as school:
        await school.deliver(0, 1, 2, 3)
        await school.training.ask(AwaitTraining())
        view = await school.inference.capacity.ask(DescribeCapacity())

    assert [(0, 0), (1, 0), (2, 1)] == school.engine.loads
    assert 2 == view.version


async def test_next_step_begins_while_engines_load_a_copy(tmp_path: Path):
    """Capacity advances only when they have loaded it, and the publication after that waits for them."""
    loading, loaded = anyio.Event(), anyio.Event()

    class SlowEngine(LoadingEngine):
        async def load(self, snapshot: Snapshot) -> None:
            await super().load(snapshot)
            if snapshot.version == 1:
                loading.set()
                await loaded.wait()

    publisher = DiskPublisher(root=tmp_path / "published")
    async with open_school(tmp_path, engine=SlowEngine(), publisher=publisher) as school:
        await school.deliver(0, 1, 2, 3)
        await loading.wait()
        while school.policy.version < 2:
            await anyio.lowlevel.checkpoint()
        view = await school.inference.capacity.ask(DescribeCapacity())
        loaded.set()
        await school.training.ask(AwaitTraining())

    assert 0 == view.version
    assert [(0, 0), (1, 0), (2, 1)] == school.engine.loads


@pytest.mark.parametrize("is_async", [False, True])
async def test_news_of_a_step_comes_before_its_checkpoint(tmp_path: Path, is_async):
    """A run that resumes from a checkpoint finds the record of its step: it was written first."""
    plan = evolve(PLAN, total_steps=3, checkpoint=CheckpointConfig(every_steps=2, keep=1, is_async=is_async))
    async with open_school(tmp_path, plan) as school:
        await school.deliver(*range(6))
        await school.training.ask(AwaitTraining())
    heard = [item for item in school.rollout_stack.notebook.news if not isinstance(item, GroupsTrained)]
    news = [item.step if isinstance(item, StepFinished) else item.detail for item in heard]

    assert [1, 2, "step 2", 3, "step 3"] == [item for item in news if item in (1, 2, 3) or item.startswith("step")]
    assert [3] == [checkpoint.step for checkpoint in find_checkpoints(tmp_path)]


async def test_a_stop_while_groups_are_awaited_makes_no_step(tmp_path: Path):
    """The trainer saves where it stands and tells why; groups that came in part are not lost."""
    async with open_school(tmp_path) as school:
        await school.deliver(0, 1, 2)
        summaries = []

        async def wait() -> None:
            summaries.append(await school.training.ask(AwaitTraining()))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            tasks.start_soon(wait)
            while not school.told(StepFinished):
                await anyio.wait_all_tasks_blocked()
            await school.training.tell(RequestStop(reason="asked to stop"))
            await school.training.tell(RequestStop(reason="and again"))
        position = parse_position(find_checkpoints(tmp_path)[-1].counters["caller"])

    assert summaries[0] == summaries[1]
    assert (1, False, "asked to stop") == (
        summaries[0].steps,
        summaries[0].is_finished,
        summaries[0].stop_reason,
    )
    assert DataPosition(next=2) == position


async def test_stop_cuts_an_evaluation_short(tmp_path: Path):
    """A stop does not wait for an evaluation; its episodes are aborted."""
    engine = LoadingEngine(is_gated=True)
    async with open_school(tmp_path, engine=engine, held_out=2) as school:
        while engine.statistics().waiting < 2:
            await anyio.wait_all_tasks_blocked()
        await school.training.tell(RequestStop(reason="enough"))
        summary = await school.training.ask(AwaitTraining())
        while engine.statistics().waiting:
            await anyio.wait_all_tasks_blocked()

    assert (0, False, "enough") == (summary.steps, summary.is_finished, summary.stop_reason)
    assert [] == school.told(EvaluationFinished)


async def test_training_ends_early_when_the_reward_is_good_enough(tmp_path: Path):
    """The moving average decides, not before ``min_steps``; the goal counts as finished."""
    stop = StopConfig(reward=0.4, smoothing=0.5, min_steps=2)
    async with open_school(tmp_path, evolve(PLAN, total_steps=9, stop=stop), held_out=1) as school:
        await school.deliver(*range(6))
        summary = await school.training.ask(AwaitTraining())

    assert (2, True) == (summary.steps, summary.is_finished)
    assert "moving average reached 0.4" in summary.stop_reason
    assert [0, 2] == [news.version for news in school.told(EvaluationFinished)]


async def test_evaluations_come_as_often_as_planned_and_count_failures_as_zero(tmp_path: Path):
    """An agent that breaks on a problem has not solved it."""

    async def act(episode: rollout_stack.Episode) -> float:
        if episode.context.task_id == "0":
            raise ValueError("broken")
        await episode.ask()
        return 1.0

    plan = evolve(PLAN, total_steps=3, evaluation=EvaluationConfig(every_steps=2))
    async with open_school(tmp_path, plan, act=act, held_out=4) as school:
        await school.deliver(*range(6))
        await school.training.ask(AwaitTraining())
    evaluations = school.told(EvaluationFinished)

    assert [0, 2, 3] == [news.version for news in evaluations]
    assert [(0.75, 4, 1)] * 3 == [(news.reward, news.num_episodes, news.num_failed) for news in evaluations]
    assert [None, 0.75, 0.75] == [news.metrics["eval_reward"] for news in school.told(StepFinished)]


async def test_every_sampled_token_is_counted_in_one_step(tmp_path: Path):
    """Those of evaluations too: the speed is what the engine did, over all the time that it had."""
    plan = evolve(PLAN, evaluation=EvaluationConfig(every_steps=1))
    async with open_school(tmp_path, plan, held_out=2) as school:
        await school.deliver(0, 1, 2, 3)
        await school.training.ask(AwaitTraining())
    steps = [news.metrics for news in school.told(StepFinished)]

    assert [2 * len(encode("42"))] * 2 == [metrics["sampled_tokens"] for metrics in steps]
    assert all(metrics["tokens_per_second"] > 0 for metrics in steps)


async def test_resumed_trainer_goes_on_where_the_checkpoint_was_written(tmp_path: Path):
    """Version, position and moving average; the model was evaluated before, so there is no first evaluation."""
    async with open_school(tmp_path, evolve(PLAN, total_steps=1)) as school:
        await school.deliver(0, 1)
        await school.training.ask(AwaitTraining())
    policy = create_policy()
    counters = policy.restore(tmp_path)
    async with open_school(tmp_path, policy=policy, counters=counters, held_out=1) as resumed:
        await resumed.deliver(0, 1, 2, 3, version=1)
        summary = await resumed.training.ask(AwaitTraining())

    assert [2] == [news.step for news in resumed.told(StepFinished)]
    assert [2] == [news.version for news in resumed.told(EvaluationFinished)]
    assert [(1, 0), (2, 0)] == resumed.engine.loads
    assert (2, True) == (summary.steps, summary.is_finished)


async def expect_crash(school_or_error: type[Exception], opening: Any, *positions: int) -> Exception:
    with pytest.raises(ExceptionGroup) as crash:
        async with opening as school:
            await school.deliver(*positions)
            await school.training.ask(AwaitTraining())
    assert isinstance(crash.value.exceptions[0], school_or_error), crash.value
    assert 1 == len(crash.value.exceptions)
    return crash.value.exceptions[0]


async def test_diverging_ends_the_run_with_the_reason(tmp_path: Path):
    """One error, the cause and nothing of what followed from it; no checkpoint of broken weights."""
    policy = create_policy()
    with torch.no_grad():
        policy.model.lm_head.weight.fill_(float("nan"))
    error = await expect_crash(TrainingDiverged, open_school(tmp_path, policy=policy), 0, 1)

    assert "step 1" in str(error)
    assert () == find_checkpoints(tmp_path)


async def test_waiting_too_long_for_groups_ends_the_run_with_advice(tmp_path: Path):
    """The configured limit is kept, and the error says which step waited for what."""
    plan = evolve(PLAN, max_step_seconds=0.01)
    error = await expect_crash(TrainingStalled, open_school(tmp_path, plan), 0)

    assert "Step 1 waited 0.01 s for its 2 groups" in str(error)
    assert "max_step_seconds" in str(error)


async def test_weights_that_the_engine_does_not_serve_end_the_run(tmp_path: Path):
    """Tokens could not be attributed to a version any more."""

    class StubbornEngine(LoadingEngine):
        async def load(self, snapshot: Snapshot) -> None:
            if snapshot.version == 0:
                await super().load(snapshot)

    error = await expect_crash(EngineError, open_school(tmp_path, engine=StubbornEngine()), 0, 1)

    assert "serves version 0 after loading version 1" in str(error)
