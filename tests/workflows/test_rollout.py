"""Rollout workflows by themselves: the engine that they are given, their groups, and what counts as a result."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
import torch
from tests.stacks.inference_stack import encode, open_inference_stack, renderer

from areal_actors.cache import to_tensors
from areal_actors.direct import ArealOpenAI
from areal_actors.domain import PauseMode, SampleKey, SamplingDistribution, SessionId, Snapshot, as_ints
from areal_actors.errors import ConfigError, ContextLengthExceeded, EpisodeError, ExportError, InvalidRequest
from areal_actors.messages import PauseGeneration, PublishWeights, ResumeGeneration
from areal_actors.testing.engines import EchoEngine, echo_logprob
from areal_actors.workflows import (
    EpisodeEngine,
    GenerationConfig,
    GroupedRolloutWorkflow,
    InteractionWithTokenLogpReward,
    ModelRequest,
    ModelResponse,
    RolloutWorkflow,
    parse_rollout,
    workflow_context,
)

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore:Async generator 'openai:ResourceWarning"),  # trio, of the SDK's streams
]


@asynccontextmanager
async def open_engine(engine: EchoEngine | None = None, **options: Any) -> AsyncIterator[EpisodeEngine]:
    """The engine of an episode, on an engine without a model."""
    async with open_inference_stack(engine=engine or EchoEngine(lambda _: encode("42")), max_seconds=30) as inference:
        yield EpisodeEngine(inference.generation, renderer(), key=SampleKey(seed=1, path=("train", 0, 0)), **options)


class Acting(RolloutWorkflow):
    """A workflow of one function of the member's number."""

    def __init__(self, act: Callable[[int], Any]) -> None:
        self.act = act

    async def arun_episode(self, engine: EpisodeEngine, data: dict[str, Any]) -> Any:
        await anyio.lowlevel.checkpoint()
        return self.act(workflow_context.get().member)


def row_of(num_tokens: int, member: int) -> dict[str, torch.Tensor]:
    ids = torch.full((1, num_tokens), member + 1, dtype=torch.int32)
    return {"input_ids": ids, "attention_mask": torch.ones(1, num_tokens, dtype=torch.bool)}


# --------------------------------------------------------------------------------------------------- the engine


async def test_answer_has_the_engines_tokens() -> None:
    """Ids, log-probabilities and versions as they were sampled; the settings reach the engine."""
    source = EchoEngine(lambda _: encode("42"), version=3)
    async with open_engine(source) as engine:
        gconfig = GenerationConfig(temperature=0.5, top_p=0.9, max_new_tokens=7, stop="!")
        response = await engine.agenerate(ModelRequest(rid="r", input_ids=[5, 6], gconfig=gconfig, tokenizer=None))
    (request,) = source.requests

    assert ([5, 6], encode("42"), "stop") == (response.input_tokens, response.output_tokens, response.stop_reason)
    assert [echo_logprob(token) for token in response.output_tokens] == response.output_logprobs
    assert [3] * response.output_len == response.output_versions
    assert (0.5, 0.9, 7, ("!",)) == (
        request.sampling.temperature,
        request.sampling.top_p,
        request.sampling.max_new_tokens,
        request.sampling.stop,
    )
    assert SamplingDistribution(temperature=0.5, top_p=0.9) == response.sampling
    assert (renderer().stop_token_ids, 3) == (request.stop_token_ids, engine.oldest_version)


async def test_turns_are_told_apart_by_their_outputs() -> None:
    """Tensors that do not say how they were sampled: one way is that of all; of several, the one with these ids."""
    answers = iter([encode("42"), encode("43"), encode("42")])
    async with open_engine(EchoEngine(lambda _: next(answers))) as engine:
        assert engine.sampling_of(as_ints([1])) is None
        for temperature in (0.5, 1.0):
            gconfig = GenerationConfig(temperature=temperature)
            await engine.agenerate(ModelRequest(input_ids=[5, 6], gconfig=gconfig))
            if temperature == 0.5:
                assert SamplingDistribution(temperature=0.5) == engine.sampling_of(as_ints([1]))
        assert SamplingDistribution(temperature=0.5) == engine.sampling_of(as_ints(encode("42")))
        assert SamplingDistribution() == engine.sampling_of(as_ints(encode("43")))
        with pytest.raises(ExportError, match="add temperatures"):
            engine.sampling_of(as_ints([1]))
        await engine.agenerate(ModelRequest(input_ids=[5, 6]))
        with pytest.raises(ExportError, match="add temperatures"):
            engine.sampling_of(as_ints(encode("42")))


async def test_samples_are_keyed_by_the_episode() -> None:
    """Equal requests are two samples; another episode's are others; the order of different requests changes none."""
    source = EchoEngine(lambda _: encode("42"))
    async with open_engine(source) as engine:
        for ids in ([1], [1], [2]):
            await engine.agenerate(ModelRequest(input_ids=ids))
        again, other = engine.for_episode(key=engine.key), engine.for_episode("member", 1)
        for ids in ([2], [1]):
            await again.agenerate(ModelRequest(input_ids=ids))
        await other.agenerate(ModelRequest(input_ids=[1]))
    first, second, different, different_again, first_again, stranger = [request.key for request in source.requests]

    assert (first, different) == (first_again, different_again)
    assert 4 == len({first, second, different, stranger})


async def test_gconfig_may_be_that_of_the_run_or_a_mapping() -> None:
    """A configuration file gives a mapping; without any, the engine's counts. Greedy is temperature 0."""
    source = EchoEngine(lambda _: encode("42"))
    async with open_engine(source, gconfig=GenerationConfig(greedy=True, temperature=0.7)) as engine:
        await engine.agenerate(ModelRequest(input_ids=[1]))
        await engine.agenerate(ModelRequest(input_ids=[1], gconfig={"temperature": 0.3, "stop": ["a", "b"]}))

    assert [0.0, 0.3] == [request.sampling.temperature for request in source.requests]
    with pytest.raises(InvalidRequest, match="temprature"):
        ModelRequest(input_ids=[1], gconfig={"temprature": 0.3})


async def test_episode_engine_refuses_unsupported_settings() -> None:
    """No prompt, no room, several samples at once."""
    async with open_engine(EchoEngine(context_length=4)) as engine:
        with pytest.raises(InvalidRequest, match="no input_ids"):
            await engine.agenerate(ModelRequest(input_ids=[]))
        with pytest.raises(ContextLengthExceeded):
            await engine.agenerate(ModelRequest(input_ids=[1, 2, 3, 4]))
        with pytest.raises(InvalidRequest, match=r"gconfig\.n_samples is 4"):
            await engine.agenerate(ModelRequest(input_ids=[1], gconfig=GenerationConfig(n_samples=4)))


async def test_episode_engine_aborts_on_cancellation_and_waits_for_updates() -> None:
    """A cancelled caller leaves nothing in the engine; a paused engine keeps its callers waiting, none is refused."""
    source = EchoEngine(lambda _: encode("42"), is_gated=True)
    async with open_engine(source) as engine:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.agenerate, ModelRequest(input_ids=[1]))
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
        assert 1 == source.statistics().aborted
        await engine.generation.ask(PauseGeneration(mode=PauseMode.KEEP))
        responses: list[ModelResponse] = []

        async def ask() -> None:
            responses.append(await engine.agenerate(ModelRequest(input_ids=[1])))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            await engine.generation.ask(PublishWeights(snapshot=Snapshot(version=5, state={})))
            await engine.generation.ask(ResumeGeneration())
            source.release(100)

    assert {5} == set(responses[0].output_versions)


async def test_sdk_works_on_an_episodes_engine() -> None:
    """Two clients of one episode sample differently; both are keyed by the episode."""
    source = EchoEngine(lambda _: encode("42"))
    async with open_engine(source) as engine:
        for _ in range(2):
            async with ArealOpenAI(engine=engine) as client:
                await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hi"}])
    paths = [request.key.path for request in source.requests]

    assert [("train", 0, 0, "client", 1), ("train", 0, 0, "client", 2)] == [path[:5] for path in paths]


# --------------------------------------------------------------------------------------------------------- groups


async def test_rejected_and_failed_members_cost_no_sibling() -> None:
    """A ``None`` is dropped, an exception too; the others are joined."""

    def act(member: int) -> Any:
        if member == 1:
            raise ValueError("broken")
        return None if member == 2 else row_of(3, member)

    async with open_engine() as engine:
        result = await GroupedRolloutWorkflow(Acting(act), 4).arun_episode(engine, {})

    assert result is not None
    assert [1, 4] == result["input_ids"][:, 0].tolist()


async def test_all_rejected_is_rejected_and_all_failed_is_a_failure() -> None:
    """``None`` if all members rejected; an error if all of them failed."""

    def fail(_: int) -> Any:
        raise ValueError("broken")

    async with open_engine() as engine:
        assert await GroupedRolloutWorkflow(Acting(lambda _: None), 3).arun_episode(engine, {}) is None
        with pytest.raises(EpisodeError, match="All 3 members failed; ValueError: broken"):
            await GroupedRolloutWorkflow(Acting(fail), 3).arun_episode(engine, {})


async def test_interactions_are_merged() -> None:
    """One dictionary of all members; two kinds of results are refused."""

    def act(member: int) -> Any:
        return {f"turn-{member}": InteractionWithTokenLogpReward(interaction_id=f"turn-{member}")}

    async with open_engine() as engine:
        result = await GroupedRolloutWorkflow(Acting(act), 2).arun_episode(engine, {})
        assert result is not None
        assert {"turn-0", "turn-1"} == set(result)
        mixed = Acting(lambda member: act(member) if member else row_of(2, 0))
        with pytest.raises(EpisodeError, match="return one kind"):
            await GroupedRolloutWorkflow(mixed, 2).arun_episode(engine, {})
    with pytest.raises(ConfigError, match="at least 1"):
        GroupedRolloutWorkflow(mixed, 0)


# -------------------------------------------------------------------------------------------------------- results


SESSION = SessionId("train-0-0")


def test_workflow_needs_one_of_the_two_methods() -> None:
    """The deprecated one will do; none will not."""

    class Deprecated(RolloutWorkflow):
        async def _run_one_episode(self, engine: Any, data: Any, rid: str) -> Any:
            return data["completions"], rid

    class Neither(RolloutWorkflow):
        pass

    Deprecated()
    with pytest.raises(TypeError, match="arun_episode"):
        Neither()  # type: ignore[abstract]


async def test_deprecated_form_returns_its_completions() -> None:
    """Alone, or beside what is of no use to training."""

    class Alone(RolloutWorkflow):
        async def _run_one_episode(self, engine: Any, data: Any, rid: str) -> Any:
            return (data, rid) if data else None

    workflow: Any = Alone()
    async with open_engine() as engine:
        assert await workflow.arun_episode(engine, {"a": 1}) == {"a": 1}
        assert await workflow.arun_episode(engine, {}) is None


def test_interactions_of_a_workflows_own_become_rows() -> None:
    """A response and a reward are enough."""
    response = ModelResponse(input_tokens=[5, 6], output_tokens=[7], output_logprobs=[-0.5], output_versions=[3])
    turn = InteractionWithTokenLogpReward(interaction_id="a", model_response=response, reward=0.5)
    (sample,) = parse_rollout({"a": turn}, session=SESSION)
    (row,) = sample.trajectories

    assert (0.5, 1, 0.5) == (sample.reward, sample.num_turns, row.reward)
    assert {
        "input_ids": [[5, 6, 7]],
        "loss_mask": [[0, 0, 1]],
        "versions": [[-1, -1, 3]],
        "returns": [[0, 0, 0.5]],
    } == {name: to_tensors([row])[name].tolist() for name in ("input_ids", "loss_mask", "versions", "returns")}


@pytest.mark.parametrize(
    ("result", "complaint"),
    [
        (1.0, "returned a float; return a dict of tensors"),
        ({}, "no interactions in it"),
        ({"a": InteractionWithTokenLogpReward(interaction_id="a")}, "neither a training row nor a model_response"),
        ({"a": 1}, "lack input_ids and attention_mask"),
        ({"input_ids": [[1, 70]], "attention_mask": [[1, 1]]}, "an id 70, and the model's ids are below 64"),
    ],
)
def test_rollout_workflow_names_a_wrong_result(result: Any, complaint: str) -> None:
    """Who returned it, and what it may be."""
    with pytest.raises(EpisodeError, match=complaint):
        parse_rollout(result, session=SESSION, vocab_size=64)
