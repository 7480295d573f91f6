"""Limits of an episode: what the agent gets to see, how its reward counts, and what a run says about it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.rollouts.test_workflow_episodes import open_stage
from tests.stacks.inference_stack import encode, say
from tests.stacks.rollout_stack import Episode, open_rollout_stack, problems

from areal_actors.cache.limits import EpisodeBudget
from areal_actors.config import create_config
from areal_actors.domain import EpisodeLimits, FinishReason
from areal_actors.errors import EpisodeLimitReached
from areal_actors.messages import RunProblem
from areal_actors.rollouts.runner import RolloutsConfig
from areal_actors.testing.engines import EchoEngine
from areal_actors.workflows import (
    EpisodeEngine,
    InteractionWithTokenLogpReward,
    ModelRequest,
    RolloutWorkflow,
)
from areal_actors.workflows import context as workflow_context

pytestmark = pytest.mark.anyio

TWO_TURNS = EpisodeLimits(max_turns=2)


def limited(limits: EpisodeLimits, **options: object) -> RolloutsConfig:
    return RolloutsConfig(group_size=2, episode_timeout_seconds=60, limits=limits, **options)


@given(limits=st.lists(st.none() | st.integers(1, 20), min_size=2, max_size=2), asks=st.lists(st.integers(1, 9)))
def test_no_episode_exceeds_its_budget(limits: list[int | None], asks: list[int]):
    """Turns and tokens of requests one after another stay within the limits, and end only there."""
    max_turns, max_tokens = limits
    budget = EpisodeBudget(limits=EpisodeLimits(max_turns=max_turns, max_sampled_tokens=max_tokens))
    num_turns = num_tokens = 0
    for wanted in asks:
        try:
            left = budget.admit(num_turns=num_turns, num_tokens=num_tokens)
        except EpisodeLimitReached:
            assert budget.reached == ("max_turns" if num_turns == max_turns else "max_sampled_tokens")
            assert max_turns == num_turns or max_tokens == num_tokens
            return
        num_turns, num_tokens = num_turns + 1, num_tokens + (wanted if left is None else min(wanted, left))
    assert budget.reached is None
    assert max_turns is None or num_turns <= max_turns
    assert max_tokens is None or num_tokens <= max_tokens


async def ask_until_refused(episode: Episode) -> float:
    """Ask until the model refuses, which is 1 point."""
    for number in range(10):
        try:
            await episode.ask(f"question {number}")
        except EpisodeLimitReached:
            return 1.0
    return 0.0


async def test_agent_that_ends_at_its_limit_is_rewarded():
    """Its reward and its turns count as always, and the episode says which limit it met."""
    async with open_rollout_stack(ask_until_refused, config=limited(TWO_TURNS)) as stack:
        (episode,) = (await stack.play()).episodes
    assert (1.0, 2, None, "max_turns") == (episode.reward, episode.num_turns, episode.failure, episode.limit)


async def ask_on(episode: Episode) -> float:
    while True:
        await episode.ask()


async def test_agent_that_fails_at_its_limit_is_told_why():
    """The failure names the setting."""
    async with open_rollout_stack(ask_on, config=limited(TWO_TURNS)) as stack:
        (episode,) = (await stack.play()).episodes
    assert ("max_turns", 2, 0) == (episode.limit, episode.num_turns, len(episode.trajectories))
    assert episode.failure is not None
    assert episode.failure.endswith("The episode had reached rollout.limits.max_turns (2).")


async def test_reward_of_the_limit_replaces_the_failure():
    """With limits.reward, the turns of such an episode are trained with it; its end is listed as cut short."""
    config = limited(EpisodeLimits(max_turns=2, reward=-0.5))
    async with open_rollout_stack(ask_on, config=config) as stack:
        (episode,) = (await stack.play()).episodes
    assert (-0.5, None, "max_turns") == (episode.reward, episode.failure, episode.limit)
    assert episode.cut_short is not None
    assert "rollout.limits.max_turns" in episode.cut_short
    assert [-0.5, -0.5] == [row.reward for row in episode.trajectories]


async def test_last_answer_is_cut_at_the_tokens_that_are_left():
    """Its finish reason is the one of any answer that is cut, and nothing is sampled after it."""
    finishes = []

    async def act(episode: Episode) -> float:
        for number in range(10):
            try:
                answer = await episode.ask(f"question {number}")
            except EpisodeLimitReached:
                assert "max_sampled_tokens" == await workflow_context.reached_limit()
                return 1.0
            finishes.append(answer.completion.finish)
            assert await workflow_context.reached_limit() is None
        return 0.0

    ids = encode("four words of text<|im_end|>")
    num_tokens, engine = len(ids), EchoEngine(lambda _: ids)
    config = limited(EpisodeLimits(max_sampled_tokens=2 * num_tokens + 1))
    async with open_rollout_stack(act, config=config, engine=engine) as stack:
        (episode,) = (await stack.play()).episodes
    assert [FinishReason.STOP, FinishReason.STOP, FinishReason.LENGTH] == finishes
    assert 2 * num_tokens + 1 == sum(row.num_trained_tokens for row in episode.trajectories)
    assert (1.0, "max_sampled_tokens") == (episode.reward, episode.limit)


async def test_calls_that_are_not_trained_do_not_count():
    """A judge can be asked after the agent has used up its turns, and its answers take none of them."""

    async def act(episode: Episode) -> float:
        for number in range(3):
            await episode.inference.complete(episode.session, say(f"is {number} right?"), tag="judge")
        reward = await ask_until_refused(episode)
        await episode.inference.complete(episode.session, say("is it right?"), tag="judge")
        return reward

    config = limited(TWO_TURNS, train_roles=("agent",))
    async with open_rollout_stack(act, config=config) as stack:
        (episode,) = (await stack.play()).episodes
    assert (1.0, "max_turns", 6) == (episode.reward, episode.limit, episode.num_turns)


async def test_each_choice_of_a_request_is_an_answer():
    """A request for more answers than are left is refused as a whole."""

    async def act(episode: Episode) -> float:
        await episode.inference.complete(episode.session, say("both"), num_choices=2)
        with pytest.raises(EpisodeLimitReached, match="2 turns"):
            await episode.ask("one more")
        return 1.0

    async with open_rollout_stack(act, config=limited(TWO_TURNS)) as stack:
        (episode,) = (await stack.play()).episodes
    assert (2, None, "max_turns") == (episode.num_turns, episode.failure, episode.limit)


class Asking(RolloutWorkflow):
    """A workflow that samples until the engine refuses, and then raises or returns what it has."""

    def __init__(self, *, is_raising: bool) -> None:
        self.is_raising = is_raising

    async def arun_episode(self, engine: EpisodeEngine, data: dict[str, Any]) -> Any:
        responses = []
        while True:
            try:
                responses.append(await engine.agenerate(ModelRequest(input_ids=[5, 6])))
            except EpisodeLimitReached:
                if self.is_raising:
                    raise
                break
        return {
            f"turn-{number}": InteractionWithTokenLogpReward(
                interaction_id=f"turn-{number}", model_response=response, reward=1.0
            )
            for number, response in enumerate(responses)
        }


@pytest.mark.parametrize("is_raising", [False, True])
async def test_rollout_workflow_has_the_same_limits(*, is_raising: bool):
    """The engine that it is given refuses; what it returns counts, and if it raises, it has failed."""
    config = RolloutsConfig(limits=TWO_TURNS, episode_timeout_seconds=60)
    async with open_stage(Asking(is_raising=is_raising), config=config) as (_, runner, _notebook):
        (episode,) = (await runner.ask(RunProblem(problem=problems(1).at(0)))).episodes
    assert "max_turns" == episode.limit
    if is_raising:
        assert episode.failure is not None
        assert episode.failure.endswith("The episode had reached rollout.limits.max_turns (2).")
    else:
        assert (2, None) == (len(episode.trajectories), episode.failure)


def test_source_has_limits_of_its_own():
    """Where it names none, those of the rollout apply."""
    config = create_config(
        {
            "experiment_name": "limits",
            "model": "tiny",
            "total_steps": 1,
            "rollout": {"workflow": "areal_actors.testing.agents:Agent", "limits": {"max_turns": 9}},
            "sources": {
                "short": {"dataset": {"reasoning_gym": "chain_sum"}, "limits": {"max_sampled_tokens": 64, "reward": 0}},
                "other": {"dataset": {"reasoning_gym": "chain_sum"}},
            },
        }
    )
    runners = config.runners
    assert EpisodeLimits(max_sampled_tokens=64, reward=0.0) == runners["short"].limits
    assert EpisodeLimits(max_turns=9) == runners["other"].limits == runners[""].limits
