"""The rollout runner: whatever an agent does costs its own episode, and no more."""

from __future__ import annotations

from typing import Any

import anyio
import httpx
import numpy as np
import pytest
from tests.stacks.inference_stack import InferenceStack, encode
from tests.stacks.rollout_stack import Act, Episode, open_rollout_stack

from areal_actors.domain import Credential, DataPosition, SessionId
from areal_actors.errors import EpisodeError, NotFound
from areal_actors.kernel.failure import root_cause
from areal_actors.messages import (
    CountLostProxies,
    DescribeCapacity,
    EpisodeFinished,
    Evaluate,
    LeaseGroups,
    SessionArchived,
    SetReward,
)
from areal_actors.rollouts.runner import RolloutsConfig
from areal_actors.rollouts.staleness import CapacityLimits
from areal_actors.run.control_plane import DirectoryActor
from areal_actors.testing.engines import EchoEngine

pytestmark = pytest.mark.anyio


async def num_live_sessions(inference: InferenceStack, sessions: list[SessionId]) -> int:
    await anyio.sleep(1)  # virtual: until all that was cancelled has ended
    found = 0
    for session in sessions:
        try:
            await inference.record(session)
        except NotFound:
            continue
        found += 1
    return found


# ---------------------------------------------------------------------------------------------------- episodes


async def test_episode_is_rewarded_and_exported():
    """The agent's number is the reward of its last completion; the rows are those of its session."""

    async def act(episode: Episode) -> float:
        await episode.ask("first")
        await episode.ask("second")
        return 0.75

    async with open_rollout_stack(act) as rollout_stack:
        group = await rollout_stack.play()
    (episode,) = group.episodes

    assert (0.75, 2, None) == (episode.reward, episode.num_turns, episode.failure)
    assert [0.75, 0.75] == [row.reward for row in episode.trajectories]  # the first is another conversation
    assert episode.session.startswith("hand-1-0-0-")


async def test_rewards_may_name_their_completions():
    """By the id that the client reads in each answer."""

    async def act(episode: Episode) -> dict[str, float]:
        first, second = await episode.ask("first"), await episode.ask("second")
        return {first.interaction: np.float32(0.25), second.interaction: True}

    async with open_rollout_stack(act) as rollout_stack:
        (episode,) = (await rollout_stack.play()).episodes

    assert (1.25, [0.25, 1.0]) == (episode.reward, [row.reward for row in episode.trajectories])


async def raise_error(episode: Episode) -> float:
    await episode.ask()
    raise ValueError("the tool broke")


async def return_nan(episode: Episode) -> float:
    await episode.ask()
    return float("nan")


async def return_none(episode: Episode) -> None:
    await episode.ask()


async def return_text(episode: Episode) -> str:
    await episode.ask()
    return "1.0"


async def reward_a_stranger(episode: Episode) -> dict[str, float]:
    await episode.ask()
    return {"chatcmpl-unknown": 1.0}


async def reward_nothing(episode: Episode) -> dict[str, float]:
    await episode.ask()
    return {}


async def never_ask(episode: Episode) -> float:
    return 1.0


async def never_ask_and_reward_nothing(episode: Episode) -> dict[str, float]:
    return {}


async def ask_elsewhere(episode: Episode) -> float:
    """Nothing listens on the discard port."""
    async with httpx.AsyncClient(trust_env=False) as client:
        await client.post("http://127.0.0.1:9/v1/chat/completions")
    return 1.0


async def use_an_old_key(episode: Episode) -> float:
    raise PermissionError("Error code: 401 - Incorrect API key provided")


async def hang(episode: Episode) -> float:
    await episode.ask()
    await anyio.sleep_forever()
    return 1.0


FAILURES = [
    (raise_error, "Acting.run raised ValueError: the tool broke"),
    (return_nan, "finite"),
    (return_none, "returned None of type NoneType"),
    (return_text, "returned 1.0 of type str"),
    (reward_a_stranger, "has no interaction chatcmpl-unknown"),
    (reward_nothing, "it is empty; return a number"),
    (never_ask, "never called the model"),
    (never_ask_and_reward_nothing, "never called the model"),
    (ask_elsewhere, "The agent never reached the proxy with the key of its episode: use the base_url"),
    (use_an_old_key, "The agent never reached the proxy with the key of its episode: use the base_url"),
    (hang, "took longer than 60 s"),
]


@pytest.mark.parametrize(("act", "complaint"), FAILURES, ids=lambda value: getattr(value, "__name__", ""))
async def test_failed_episode_is_recorded_and_its_siblings_live(act: Act, complaint: str):
    """It has a reason and no rows; the member beside it is trained."""

    async def act_if_first(episode: Episode) -> Any:
        if episode.context.member == 0:
            return await act(episode)
        await episode.ask()
        return 0.5

    async with open_rollout_stack(act_if_first) as rollout_stack:
        group = await rollout_stack.play(num_episodes=3)
    failed, *others = group.episodes

    assert complaint in failed.failure
    assert ((), 0.0) == (failed.trajectories, failed.reward)
    assert [(0.5, None, 1)] * 2 == [(e.reward, e.failure, len(e.trajectories)) for e in others]


async def test_failed_episode_has_the_traceback_of_the_agent():
    """It begins in the file of the agent, not in the library that called it."""
    async with open_rollout_stack(raise_error) as rollout_stack:
        group = await rollout_stack.play(num_episodes=1)
    (failed,) = group.episodes

    assert failed.traceback.endswith("ValueError: the tool broke")
    assert "raise_error" in failed.traceback
    assert "workflows/agents.py" not in failed.traceback
    assert "never reached" not in failed.failure


async def test_reward_that_was_set_meanwhile_needs_no_other():
    """An agent may set it over HTTP, and return nothing but that."""

    async def act(episode: Episode) -> dict[str, float]:
        await episode.ask()
        await episode.inference.sessions.ask(
            SetReward(credential=Credential(session=episode.session, has_control=True), reward=0.5)
        )
        return {}

    async with open_rollout_stack(act) as rollout_stack:
        (episode,) = (await rollout_stack.play()).episodes

    assert (0.5, None) == (episode.reward, episode.failure)


async def test_waiting_for_an_agent_process_does_not_count_as_episode_time():
    """Three episodes on one seat take longer than one may, and none of them does."""

    async def act(episode: Episode) -> float:
        await anyio.sleep(50)
        await episode.ask()
        return 1.0

    async with open_rollout_stack(act, num_seats=1) as rollout_stack:
        group = await rollout_stack.play(num_episodes=3)

    assert [None] * 3 == [episode.failure for episode in group.episodes]


async def test_timeout_aborts_what_the_agent_was_waiting_for():
    """The generation of an episode that is over does not run on."""
    engine = EchoEngine(lambda _: encode("42"), is_gated=True)

    async def act(episode: Episode) -> float:
        await episode.ask()
        return 1.0

    async with open_rollout_stack(act, engine=engine) as rollout_stack:
        (episode,) = (await rollout_stack.play()).episodes

    assert "took longer" in episode.failure
    assert (60.0, 1) == (episode.seconds, episode.num_turns)
    assert (0, 1) == (engine.statistics().waiting, engine.statistics().aborted)


async def test_members_are_sampled_with_keys_of_their_own():
    """By purpose, problem and member; an evaluation repeats its random numbers at every version."""

    async def act(episode: Episode) -> float:
        await episode.ask()
        return 0.0

    async with open_rollout_stack(act, held_out=1) as rollout_stack:
        await rollout_stack.play(num_episodes=2)
        by_hand = {request.key.path[:3] for request in rollout_stack.inference.engine.requests}
        for version in (1, 2):
            await rollout_stack.runner.ask(Evaluate(version=version))
        evaluations = [request.key for request in rollout_stack.inference.engine.requests[2:]]

    assert {("hand-1", 0, 0), ("hand-1", 0, 1)} == by_hand
    assert 2 == len(evaluations)
    assert 1 == len(set(evaluations))


# ------------------------------------------------------------------------------------------- groups by request


async def test_evaluation_runs_every_held_out_problem_once():
    """In their order, failures included; its sessions are forgotten, and the reporter is told."""

    async def act(episode: Episode) -> float:
        await episode.ask()
        if "1" in episode.data["question"]:
            raise ValueError("hard")
        return 1.0

    async with open_rollout_stack(act, held_out=3) as rollout_stack:
        groups = await rollout_stack.runner.ask(Evaluate(version=5))
        sessions = [group.episodes[0].session for group in groups]
        num_kept = await num_live_sessions(rollout_stack.inference, sessions)
        news = rollout_stack.notebook.news
    finished = [item for item in news if isinstance(item, EpisodeFinished)]

    assert [0, 1, 2] == [group.problem.position for group in groups]
    assert [1.0, 0.0, 1.0] == [group.episodes[0].reward for group in groups]
    assert 0 == num_kept
    assert {(5, True)} == {(item.version, item.is_eval) for item in finished}
    assert 3 == len(finished) == sum(isinstance(item, SessionArchived) for item in news)


async def test_group_by_hand_leaves_nothing_behind():
    """No capacity, no news, no session; its rows are in the reply."""

    async def act(episode: Episode) -> float:
        await episode.ask()
        return 1.0

    async with open_rollout_stack(act) as rollout_stack:
        group = await rollout_stack.play(num_episodes=2)
        view = await rollout_stack.inference.capacity.ask(DescribeCapacity())

        assert 0 == await num_live_sessions(rollout_stack.inference, [e.session for e in group.episodes])
        assert (0, 0, []) == (view.running, view.accepted, rollout_stack.notebook.news)


async def test_cancelled_group_request_cancels_its_episodes():
    """Its episodes are cancelled, its sessions forgotten, and nothing runs on in the engine."""
    sessions = []
    engine = EchoEngine(lambda _: encode("42"), is_gated=True)

    async def act(episode: Episode) -> float:
        sessions.append(episode.session)
        await episode.ask()
        return 1.0

    async with open_rollout_stack(act, engine=engine) as rollout_stack:
        with anyio.move_on_after(1):
            await rollout_stack.play(num_episodes=2)

        assert 2 == len(sessions)
        assert 0 == await num_live_sessions(rollout_stack.inference, sessions)
        assert 0 == engine.statistics().waiting


# ----------------------------------------------------------------------------------------------- training groups


async def test_groups_are_produced_as_capacity_allows():
    """With B = 2 and η = 0 two groups run, and no third before new weights."""

    async def act(episode: Episode) -> float:
        await episode.ask()
        return 1.0

    limits = CapacityLimits(max_concurrent=8, batch_size=2)
    async with open_rollout_stack(act, is_producing=True, limits=limits) as rollout_stack:
        lease = await rollout_stack.inference.exports.ask(LeaseGroups(num_groups=2, version=0, max_staleness=0))
        await anyio.wait_all_tasks_blocked()
        view = await rollout_stack.inference.capacity.ask(DescribeCapacity())

    assert [0, 1] == [group.problem.position for group in lease.groups]
    assert [2, 2] == [len(group.episodes) for group in lease.groups]
    assert (0, 2, 0) == (view.running, view.accepted, view.available)


async def test_resumed_runner_runs_what_was_pending_first():
    """And then goes on; nothing that was consumed is run again."""
    asked = set()

    async def act(episode: Episode) -> float:
        asked.add(episode.data["question"])
        await episode.ask()
        return 1.0

    limits = CapacityLimits(max_concurrent=8, batch_size=3)
    start = DataPosition(next=6, pending=(2, 4))
    async with open_rollout_stack(act, is_producing=True, limits=limits, start=start) as rollout_stack:
        await rollout_stack.inference.exports.ask(LeaseGroups(num_groups=3, version=0, max_staleness=0))

    assert {f"what is {position}?" for position in (2, 4, 6)} == asked


async def test_group_of_failures_is_refunded_and_another_takes_its_place():
    """The trainer's batch fills up all the same."""

    async def act(episode: Episode) -> float:
        await episode.ask()
        if episode.context.task_id == "0":
            raise ValueError("a bad problem")
        return 1.0

    limits = CapacityLimits(max_concurrent=8, batch_size=1)
    async with open_rollout_stack(act, is_producing=True, limits=limits) as rollout_stack:
        lease = await rollout_stack.inference.exports.ask(LeaseGroups(num_groups=1, version=0, max_staleness=0))
        failures = [item.episode.failure for item in rollout_stack.notebook.news if isinstance(item, EpisodeFinished)]

    assert [1] == [group.problem.position for group in lease.groups]
    assert ["Acting.run raised ValueError: a bad problem"] * 2 == failures[:2]


async def test_agent_that_always_fails_ends_the_run():
    """Refunds would start one hopeless group after the other; the error tells the last failure."""
    with pytest.raises(ExceptionGroup) as crash:
        config = RolloutsConfig(group_size=2, max_failed_groups=3)
        async with open_rollout_stack(raise_error, is_producing=True, config=config):
            await anyio.sleep_forever()
    cause = crash.value.exceptions[0]

    assert isinstance(cause, EpisodeError)
    assert "last 3 groups failed" in str(cause)
    assert "the tool broke" in str(cause)


async def test_episode_that_could_not_reach_the_proxy_is_run_again():
    """It is not a failure of the agent: it is reported once, when it was run to its end, and does not count."""
    attempts, checks = [], []

    async def act(episode: Episode) -> float:
        attempts.append(episode.session)
        if len(attempts) == 1:
            raise httpx.ConnectError("Connection refused")
        await episode.ask()
        return 1.0

    def answer_health() -> None:
        checks.append(len(attempts))
        if len(checks) < 4:
            raise httpx.ConnectError("Connection refused")

    config, limits = RolloutsConfig(group_size=1, max_failed_groups=1), CapacityLimits(max_concurrent=1, batch_size=1)
    opening = open_rollout_stack(act, is_producing=True, config=config, limits=limits, answer_health=answer_health)
    async with opening as rollout_stack:
        lease = await rollout_stack.inference.exports.ask(LeaseGroups(num_groups=1, version=0, max_staleness=0))
        told = [item.episode for item in rollout_stack.notebook.news if isinstance(item, EpisodeFinished)]
        num_left = await num_live_sessions(rollout_stack.inference, attempts[:1])

    assert [1, 1, 1, 1] == checks
    assert [0] == [group.problem.position for group in lease.groups]
    assert [1.0] == [episode.reward for episode in lease.groups[0].episodes]
    assert None is told[0].failure
    assert 0 == num_left


class LossyDirectory(DirectoryActor):
    """Knows of as many lost proxies as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.num_lost = 0

    @CountLostProxies.handler
    async def count_lost_proxies(self, message: CountLostProxies) -> int:
        return self.num_lost


async def test_episode_that_lost_its_proxy_is_run_again_although_another_one_answers():
    """Its connection broke a moment before the loss was noticed. One that broke without a loss has failed."""
    attempts, directory = [], LossyDirectory()

    async def lose() -> None:
        await anyio.sleep(0.1)  # virtual
        directory.num_lost += 1

    async def act(episode: Episode) -> float:
        attempts.append(episode.session)
        if len(attempts) == 1:
            tasks.start_soon(lose)
        if len(attempts) < 3:
            raise httpx.ReadError("Connection reset")
        await episode.ask()
        return 1.0

    config, limits = RolloutsConfig(group_size=1), CapacityLimits(max_concurrent=1, batch_size=1)
    opening = open_rollout_stack(act, is_producing=True, config=config, limits=limits, directory=directory)
    async with anyio.create_task_group() as tasks, opening as rollout_stack:
        await rollout_stack.inference.exports.ask(LeaseGroups(num_groups=1, version=0, max_staleness=0))
        told = [item.episode for item in rollout_stack.notebook.news if isinstance(item, EpisodeFinished)]

    assert 3 <= len(attempts)
    assert [True, False] == [episode.failure is not None for episode in told][:2]


async def test_proxy_that_stays_out_of_reach_ends_the_run():
    """With its address, and which settings to look at, after the time that it is given."""

    async def act(episode: Episode) -> float:
        raise httpx.ConnectError("Connection refused")

    def answer_health() -> None:
        raise httpx.ConnectError("Connection refused")

    config = RolloutsConfig(group_size=1, max_unreachable_seconds=30)
    with pytest.raises(ExceptionGroup) as crash:
        async with open_rollout_stack(act, is_producing=True, config=config, answer_health=answer_health):
            await anyio.sleep_forever()
    cause = root_cause(crash.value)

    assert isinstance(cause, EpisodeError)
    assert "The proxy at http://proxy has not answered for 30 s" in str(cause)
    assert "proxy.public_host" in str(cause)


async def test_runner_stops_with_episodes_in_flight():
    """They are cancelled, their agents clean up, and the run ends without an error."""
    ended = []
    engine = EchoEngine(lambda _: encode("42"), is_gated=True)

    async def act(episode: Episode) -> float:
        try:
            await episode.ask()
        finally:
            ended.append(episode.session)
        return 1.0

    limits = CapacityLimits(max_concurrent=3, batch_size=3)
    async with open_rollout_stack(act, is_producing=True, limits=limits, engine=engine) as rollout_stack:
        await anyio.wait_all_tasks_blocked()
        await rollout_stack.runner.stop(grace=0)

        assert 6 == len(ended)
        assert 0 == await num_live_sessions(rollout_stack.inference, ended)
        assert 0 == engine.statistics().waiting
