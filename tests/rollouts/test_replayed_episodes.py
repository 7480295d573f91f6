"""A dataset run that was killed goes on where its unfinished episodes were."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import anyio
import httpx
import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.rollouts.test_exporter import make_group
from tests.stacks.inference_stack import encode, open_inference_stack, say
from tests.stacks.rollout_stack import Act, Episode, RolloutStack, open_rollout_stack

from areal_actors.domain import Group, JournalEvent, SessionStarted, TurnEnded
from areal_actors.journal import MemoryJournal
from areal_actors.messages import BeginGroup, DeliverGroup, Lease, LeaseGroups
from areal_actors.rollouts.group_journal import GroupJournal, restore_queue
from areal_actors.rollouts.runner import RolloutsConfig
from areal_actors.rollouts.staleness import CapacityLimits
from areal_actors.sessions.episodes import EpisodeRecords
from areal_actors.testing.engines import EchoEngine

pytestmark = pytest.mark.anyio

CONFIG = RolloutsConfig(group_size=2, episode_timeout_seconds=60, is_archiving=False)
LIMITS = CapacityLimits(max_concurrent=3, batch_size=2, max_staleness=1)


@asynccontextmanager
async def open_life(
    act: Act, events: list[JournalEvent], *, life: int
) -> AsyncIterator[tuple[RolloutStack, MemoryJournal]]:
    """A process of the run, on what earlier ones left; answers are the numbers from 1000 times ``life`` on."""
    restored, journal = restore_queue(events, settings="s", version=0, max_staleness=1), MemoryJournal(events)
    group_journal = GroupJournal(journal, settings="s", next_step=restored.next_step)
    await group_journal.discard(restored)
    numbers = count(1000 * life)
    options: dict[str, Any] = {
        "engine": EchoEngine(lambda _: encode(str(next(numbers)))),
        "records": EpisodeRecords(journal, settings="s", restored=restored.episodes.episodes),
        "exporter": {"group_journal": group_journal, "restored": restored},
    }
    async with open_rollout_stack(act, is_producing=True, config=CONFIG, limits=LIMITS, **options) as stack:
        yield stack, journal


async def lease(stack: RolloutStack) -> Lease:
    return await stack.inference.exports.ask(LeaseGroups(num_groups=2, version=0, max_staleness=1))


async def talk(episode: Episode) -> float:
    """One to four turns, between which a tool takes its time."""
    member = episode.context.member
    messages = say(str(episode.data["question"]))
    for turn in range(1 + (int(episode.data["question"][8:-1]) + 2 * member) % 4):
        (answer,) = await episode.inference.complete(episode.session, messages)
        messages = (*messages, answer.message, *say(f"go on {turn}"))
        await anyio.sleep(member + turn)
    return float(len(messages))


@settings(max_examples=12)
@given(cuts=st.lists(st.floats(0, 1), min_size=1, max_size=3))
async def test_killed_at_any_moment_no_completed_turn_is_sampled_again(cuts: list[float]):
    """Finished groups, finished members and unfinished episodes are all continued, and each group is trained once."""
    events: list[JournalEvent] = []
    groups: tuple[Group, ...] = ()
    for life, cut in enumerate([*cuts, 1.0]):
        known = _sampled(events)
        async with open_life(talk, events, life=life) as (stack, journal):
            groups = (await lease(stack)).groups
            again = [key for key in map(_of_request, stack.inference.engine.requests) if key in known]
            assert [] == again
        events = journal.events[: len(events) + round(cut * (len(journal.events) - len(events)))]

    assert 2 == len({group.id for group in groups})
    recorded = {turn.interaction.id: turn.interaction.completion for turn in _turns(events)}
    for episode in (episode for group in groups for episode in group.episodes):
        assert (None, 0) == (episode.failure, episode.num_dropped_turns)
        for row in episode.trajectories:
            for index, name in enumerate(row.interactions):
                # Each trained token is the one that was recorded, with its log-probability and its version.
                completion, of_turn = recorded[name], (row.turns == index) & (row.loss_mask == 1)
                if of_turn.any():
                    assert completion is not None
                    assert np.array_equal(completion.token_ids, row.input_ids[of_turn])
                    assert np.array_equal(completion.logprobs, row.logprobs[of_turn])
                    assert np.array_equal(completion.versions, row.versions[of_turn])
    assert [[0, 1]] * 2 == [[episode.member for episode in group.episodes] for group in groups]


def _turns(events: list[JournalEvent]) -> list[TurnEnded]:
    return [event for event in events if isinstance(event, TurnEnded)]


def _sampled(events: list[JournalEvent]) -> set[tuple[Any, ...]]:
    """The episode and the prompt of each turn that is recorded."""
    keys = {event.session: event.sample_key for event in events if isinstance(event, SessionStarted)}
    return {(*keys[turn.session].path, turn.asked[0]) for turn in _turns(events) if turn.asked is not None}


def _of_request(request: Any) -> tuple[Any, ...]:
    return request.key.path[:-2]


async def test_group_of_recorded_turns_is_as_old_as_they_are():
    """A step waits for it, so that these turns are not too old when they are trained."""
    events: list[JournalEvent] = []

    async def act(episode: Episode) -> float:
        await episode.ask()
        if not is_over:
            await anyio.sleep_forever()
        return 1.0

    is_over = False
    async with open_life(act, events, life=0) as (_, journal):
        await anyio.wait_all_tasks_blocked()
    restored = restore_queue(journal.events, settings="s", version=0, max_staleness=1)
    durable = {"group_journal": GroupJournal(journal, settings="s"), "restored": restored}
    async with open_inference_stack(limits=LIMITS, exporter=durable) as inference:
        other = await inference.exports.ask(DeliverGroup(group=make_group(7, version=1)))
        draw: Any = None
        # Before the runner begins it again, and afterwards.
        for _ in range(2):
            with anyio.move_on_after(5) as waiting:
                await inference.exports.ask(LeaseGroups(num_groups=1, version=1, max_staleness=1))
            assert waiting.cancelled_caught
            draw = draw or await inference.exports.ask(BeginGroup(version=1))
        await inference.exports.ask(DeliverGroup(group=make_group(draw.position, version=0)))
        given = await inference.exports.ask(LeaseGroups(num_groups=1, version=1, max_staleness=1))

    assert {("", 0): 0, ("", 1): 0, ("", 2): 0} == restored.episodes.heads
    assert other
    assert [0] == [group.head_version for group in given.groups]


async def test_agent_that_could_not_reach_the_proxy_is_not_sampled_again():
    """Its episode is run again in the same process, and answered as before."""
    problems = iter([httpx.ConnectError("no route"), httpx.ConnectError("no route"), None, None])
    tries: list[str] = []

    def answer_health() -> None:
        if (problem := next(problems, None)) is not None:
            raise problem

    async def act(episode: Episode) -> float:
        answer = await episode.ask()
        tries.append(answer.interaction)
        if len(tries) == 1:
            raise ConnectionError("the proxy is gone")
        return 1.0

    journal = MemoryJournal()
    config = RolloutsConfig(group_size=1)
    options = {
        "records": EpisodeRecords(journal, settings="s"),
        "limits": CapacityLimits(max_concurrent=1, batch_size=1),
    }
    async with open_rollout_stack(
        act, is_producing=True, config=config, answer_health=answer_health, **options
    ) as stack:
        (group,) = (await stack.inference.exports.ask(LeaseGroups(num_groups=1, version=0, max_staleness=0))).groups

    assert tries[0] == tries[1]
    assert [(1, 1, 0)] == [(e.num_turns, e.num_replayed_turns, e.num_dropped_turns) for e in group.episodes]


async def test_turn_that_was_cut_off_is_sampled_as_it_would_have_been():
    """The agent that is run again has not seen it, so its request has the same random numbers; the next one has not."""
    journal, keys = MemoryJournal(), []
    for life in range(2):
        engine, restored = EchoEngine(is_gated=life == 0), restore_queue(journal.events, settings="s", version=0)
        options: dict[str, Any] = {
            "engine": engine,
            "records": EpisodeRecords(journal, settings="s", restored=restored.episodes.episodes),
            "limits": CapacityLimits(max_concurrent=1, batch_size=1),
            "config": RolloutsConfig(group_size=1),
        }

        async def act(episode: Episode, life: int = life) -> float:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(episode.ask)
                await anyio.wait_all_tasks_blocked()
                if life == 0:
                    tasks.cancel_scope.cancel()
            if life == 0:
                await anyio.sleep_forever()
            await episode.ask()
            return 1.0

        async with open_rollout_stack(act, is_producing=True, **options) as stack:
            if life == 0:
                await anyio.wait_all_tasks_blocked()
            else:
                await stack.inference.exports.ask(LeaseGroups(num_groups=1, version=0, max_staleness=0))
        keys += [request.key for request in engine.requests[:2]]

    cut, first, second = keys
    assert cut == first != second


async def test_oldest_unfinished_group_is_begun_again_first():
    """Permits are given to few groups at an old version; the others would be as old, and too many for the steps."""

    async def act(episode: Episode) -> float:
        await episode.ask()
        await anyio.sleep_forever()
        return 1.0

    async with open_life(act, [], life=0) as (_, journal):
        await anyio.wait_all_tasks_blocked()
    restored = restore_queue(journal.events, settings="s", version=0)
    heads = {0: 2, 1: 1, 2: 1}
    episodes = tuple(
        evolve(episode, turns=tuple(sampled_by(turn, heads[episode.place.problem[1]]) for turn in episode.turns))
        for episode in restored.episodes.episodes
    )
    restored = evolve(restored, episodes=evolve(restored.episodes, episodes=episodes))
    durable = {"group_journal": GroupJournal(journal, settings="s"), "restored": restored}
    async with open_inference_stack(limits=LIMITS, exporter=durable) as inference:
        draws = [await inference.exports.ask(BeginGroup(version=2)) for _ in range(5)]

    assert [1, 2, 0, 3, 4] == [draw.position for draw in draws]


def sampled_by(turn: TurnEnded, version: int) -> TurnEnded:
    """The turn as other weights had sampled it."""
    completion = turn.interaction.completion
    assert completion is not None
    known = evolve(completion, versions=np.full_like(completion.versions, version))
    return evolve(turn, interaction=evolve(turn.interaction, completion=known))
