"""Agents that start over are answered as before, until they ask something new."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import anyio
import numpy as np
import pytest
from attrs import evolve, frozen
from hypothesis import given
from hypothesis import strategies as st
from tests.stacks.inference_stack import InferenceStack, echo_of, encode, open_inference_stack, say
from tests.stacks.journals import Breakable, reward

from areal_actors.cache import export_trajectories
from areal_actors.domain import (
    Answer,
    AnswerStarted,
    Attempt,
    ChatMessage,
    CompletionRequest,
    Credential,
    EpisodePlace,
    GroupId,
    JournalEvent,
    SampledTokens,
    SampleKey,
    Sampling,
    SessionForgotten,
    SessionId,
    SessionRecord,
    StreamItem,
    TextDelta,
    TurnEnded,
)
from areal_actors.journal import MemoryJournal, RestoredEpisodes, restore_episodes
from areal_actors.messages import (
    Complete,
    EndSession,
    ForgetEpisodes,
    ForgetSession,
    StreamComplete,
)
from areal_actors.sessions.episodes import EpisodeRecords
from areal_actors.testing.engines import EchoEngine

pytestmark = pytest.mark.anyio

PLACE = EpisodePlace(group=GroupId("train-3"), problem=("", 3), member=1)
KEY = SampleKey(seed=1, path=("train", 3, 1))


def restore(events: Iterable[JournalEvent], *, at: int = 0, max_staleness: int | None = None) -> RestoredEpisodes:
    return restore_episodes(
        events,
        settings="s",
        version=at,
        last_version=at,
        max_staleness=max_staleness,
        is_over=lambda _: False,
    )


def unique_answers(first: int) -> Callable[[object], list[int]]:
    """A script that never gives the same answer twice, as a model at a high temperature."""
    numbers = count(first)
    return lambda _: encode(str(next(numbers)))


@asynccontextmanager
async def open_process(
    journal: MemoryJournal, *, first: int = 0, restored: RestoredEpisodes | None = None, version: int = 0
) -> AsyncIterator[InferenceStack]:
    """A process of the run; its engine answers with the numbers from ``first`` on."""
    restored = restored or restore(journal.events)
    records = EpisodeRecords(journal, settings="s", restored=restored.episodes)
    engine = EchoEngine(unique_answers(first), version=version)
    async with open_inference_stack(engine=engine, records=records) as inference:
        yield inference


async def begin(inference: InferenceStack, place: EpisodePlace = PLACE):
    return (await inference.open(group=place.group, key=KEY, episode=place)).session


@frozen
class Talk:
    """A conversation: what the user says in each turn, and how many answers are asked for."""

    texts: tuple[str, ...]
    num_choices: int = 1
    is_streamed: bool = False

    @property
    def num_turns(self) -> int:
        return len(self.texts) * self.num_choices

    async def hold(self, inference: InferenceStack, session: SessionId) -> None:
        messages: tuple[ChatMessage, ...] = ()
        for text in self.texts:
            messages = (*messages, *say(text))
            answers = await self.ask(inference, session, messages)
            messages = (*messages, echo_of(answers[0]))

    async def ask(
        self, inference: InferenceStack, session: SessionId, messages: tuple[ChatMessage, ...]
    ) -> Sequence[Answer]:
        if not self.is_streamed:
            return await inference.complete(session, messages, num_choices=self.num_choices)
        items = await stream(inference, session, messages, num_choices=self.num_choices)
        return [item for item in items if isinstance(item, Answer)]


async def stream(
    inference: InferenceStack, session: SessionId, messages: tuple[ChatMessage, ...], **options: Any
) -> list[StreamItem]:
    request = CompletionRequest(messages=messages, sampling=Sampling(max_new_tokens=64), **options)
    asked = StreamComplete(credential=Credential(session=session), request=request)
    async with inference.sessions.stream(asked) as items:
        return [item async for item in items]


@frozen
class Agent:
    """Holds its conversations one after another, or at once."""

    talks: tuple[Talk, ...]
    is_parallel: bool

    async def run(self, inference: InferenceStack) -> SessionRecord:
        session = await begin(inference)
        if self.is_parallel:
            async with anyio.create_task_group() as tasks:
                for talk in self.talks:
                    tasks.start_soon(talk.hold, inference, session)
        else:
            for talk in self.talks:
                await talk.hold(inference, session)
        await inference.sessions.ask(EndSession(credential=Credential(session=session, has_control=True)))
        return await inference.record(session)

    @property
    def is_deterministic(self) -> bool:
        """Whether it asks the same again whatever the order in which its parallel requests arrive."""
        return not self.is_parallel or len({talk.texts[0] for talk in self.talks}) == len(self.talks)

    def diverge(self, talk: int, turn: int) -> Agent:
        """An agent that says something else in that turn."""
        changed = self.talks[talk % len(self.talks)]
        turn %= len(changed.texts)
        texts = (*changed.texts[:turn], changed.texts[turn] + "!", *changed.texts[turn + 1 :])
        talks = tuple(evolve(each, texts=texts) if each is changed else each for each in self.talks)
        return evolve(self, talks=talks)


TALKS = st.builds(
    Talk,
    texts=st.lists(st.sampled_from("ab"), min_size=1, max_size=3).map(tuple),
    num_choices=st.integers(1, 2),
    is_streamed=st.booleans(),
)
AGENTS = st.builds(Agent, talks=st.lists(TALKS, min_size=1, max_size=3).map(tuple), is_parallel=st.booleans())


@given(
    agent=AGENTS,
    kills=st.lists(st.floats(0, 1), min_size=1, max_size=3),
    divergence=st.none() | st.tuples(st.integers(0, 2), st.integers(0, 2)),
)
async def test_repeated_requests_are_never_sampled_again(
    agent: Agent, kills: list[float], divergence: tuple[int, int] | None
):
    """The process is killed between any two events; the last agent may differ."""
    events: list[JournalEvent] = []
    is_same = agent.is_deterministic
    for life, share in enumerate([*kills, None]):
        if share is None and divergence is not None:
            agent, is_same = agent.diverge(*divergence), False
        restored = restore(events)
        recorded = _completed(events)
        journal = MemoryJournal(events)
        async with open_process(journal, first=1000 * life, restored=restored) as inference:
            record = await agent.run(inference)
        total = sum(talk.num_turns for talk in agent.talks)

        # What was asked is answered, each turn once, from the journal or by the engine.
        assert total == len(record.interactions) == len({turn.id for turn in record.interactions})
        assert total == record.num_replayed + len(inference.engine.requests)
        assert len(recorded) == record.num_replayed + record.num_dropped
        if is_same:
            assert 0 == record.num_dropped
        # Random numbers are used once.
        used = [turn.asked for turn in _whole(journal.events) if turn.interaction.order >= 0]
        if is_same:
            assert len(used) == len(set(used))
        # Each token has the log-probability and the version that it was sampled with.
        known = {turn.interaction.id: turn.interaction for turn in _turns(journal.events)}
        for turn in record.interactions:
            assert turn.completion is not None
            assert turn.completion == known[turn.id].completion
            assert turn.output == known[turn.id].output
            assert turn.digest == known[turn.id].digest
        export_trajectories(record, style="individual", discount=1.0)
        if share is not None:
            # Everything that was there stays, and a part of what is new.
            events = [*events, *journal.events[len(events) :][: round(share * (len(journal.events) - len(events)))]]


def _turns(events: Iterable[JournalEvent]) -> list[TurnEnded]:
    return [event for event in events if isinstance(event, TurnEnded)]


def _completed(events: Iterable[JournalEvent]) -> list[TurnEnded]:
    """The turns of requests of which all choices are recorded."""
    names = {turn.interaction.id for turn in _turns(events)}
    return [turn for turn in _turns(events) if names.issuperset(turn.siblings)]


def _whole(events: Iterable[JournalEvent]) -> list[TurnEnded]:
    """One turn of each request."""
    return [turn for turn in _completed(events) if turn.siblings[0] == turn.interaction.id]


async def test_restarted_agent_gets_the_same_answers():
    """The next turn continues their exact tokens."""
    journal = MemoryJournal()
    async with open_process(journal) as inference:
        session = await begin(inference)
        (first,) = await inference.complete(session, say("a"))
        (second,) = await inference.complete(session, (*say("a"), echo_of(first), *say("b")))
        await reward(inference, session, 0.5, first.interaction)
    async with open_process(journal, first=100) as inference:
        session = await begin(inference)
        (one,) = await inference.complete(session, say("a"))
        (two,) = await inference.complete(session, (*say("a"), echo_of(one), *say("b")))
        history = (*say("a"), echo_of(one), *say("b"), echo_of(two), *say("c"))
        (three,) = await inference.complete(session, history)
        record = await inference.record(session)

    assert (first, second) == (one, two)
    assert "100" == three.message.content
    assert 1 == len(inference.engine.requests)
    assert [None, one.interaction, two.interaction] == [turn.token_parent for turn in record.interactions]
    assert (2, 0) == (record.num_replayed, record.num_dropped)
    # The agent rewards its turns itself, again.
    assert [None, None, None] == [turn.reward for turn in record.interactions]
    assert 1 == len(export_trajectories(record, style="concat", discount=1.0).trajectories)


@pytest.mark.parametrize(
    "change",
    [
        {"sampling": Sampling(temperature=0.5)},
        {"seed": 3},
        {"tag": "reviewer"},
        {"store": False},
        {"num_choices": 2},
        {"parallel_tool_calls": False},
        {"template_kwargs": {"enable_thinking": False}},
    ],
    ids=str,
)
async def test_request_with_other_settings_is_sampled(change: dict[str, Any]):
    request = CompletionRequest(messages=say("a"))
    journal = MemoryJournal()
    for life, asked in enumerate((request, evolve(request, **change), request)):
        async with open_process(journal, first=100 * life) as inference:
            session = await begin(inference)
            await inference.sessions.ask(Complete(credential=Credential(session=session), request=asked))
            assert (1, 1, 0)[life] == bool(inference.engine.requests)


async def test_recorded_answer_is_streamed():
    """The deltas join to the same text."""
    journal = MemoryJournal()
    async with open_process(journal) as inference:
        (answer,) = await inference.complete(await begin(inference), say("a"))
    async with open_process(journal, first=100) as inference:
        items = await stream(inference, await begin(inference), say("a"), streams_tokens=True)

    started, sampled, text, last = items
    assert isinstance(started, AnswerStarted)
    assert isinstance(sampled, SampledTokens)
    assert np.array_equal(answer.completion.token_ids, sampled.chunk.token_ids)
    assert TextDelta(text="0") == text
    assert answer == last
    assert [] == inference.engine.requests


async def test_retry_of_a_recorded_answer_repeats_it():
    """It does not take the next one of equal requests."""
    journal = MemoryJournal()
    async with open_process(journal) as inference:
        session = await begin(inference)
        first, second = [await inference.complete(session, say("a")) for _ in range(2)]

    async def ask(number: int) -> tuple[Answer, ...]:
        request = CompletionRequest(messages=say("a"), sampling=Sampling(max_new_tokens=64))
        attempt = Attempt(fingerprint="f", number=number)
        return await inference.sessions.ask(
            Complete(credential=Credential(session=session), request=request, attempt=attempt)
        )

    async with open_process(journal, first=100) as inference:
        session = await begin(inference)
        one, again, two = await ask(0), await ask(1), await ask(0)

    assert [first[0].interaction] * 2 == [one[0].interaction, again[0].interaction]
    assert again[0].is_repeated
    assert second == two


async def test_restarted_agent_in_the_same_process_gets_the_same_answers():
    """The session was forgotten, but not its record."""
    journal = MemoryJournal()
    async with open_process(journal) as inference:
        session = await begin(inference)
        first = await inference.complete(session, say("a"))
        await inference.sessions.tell(ForgetSession(session=session))
        again = await begin(inference)
        assert first == await inference.complete(again, say("a"))
    assert session != again
    assert 1 == len(inference.engine.requests)


async def test_recorded_turns_are_forgotten_when_the_rows_are_stored():
    journal = MemoryJournal()
    other = evolve(PLACE, member=2)
    async with open_process(journal) as inference:
        for place in (PLACE, other):
            await inference.complete(await begin(inference, place), say("a"))
        await inference.sessions.ask(ForgetEpisodes(group=PLACE.group, member=other.member))
        (left,) = restore(journal.events).episodes
        await inference.sessions.ask(ForgetEpisodes(group=PLACE.group))
    assert PLACE == left.place
    assert () == restore(journal.events).episodes
    async with open_process(journal, first=100) as inference:
        (answer,) = await inference.complete(await begin(inference), say("a"))
    assert "100" == answer.message.content


async def test_unusable_episodes_are_not_restored():
    """They have other settings, lost weights, or are too old."""
    journal = MemoryJournal()
    async with open_process(journal) as inference:
        inference.engine._version = 5
        await inference.complete(await begin(inference), say("a"))

    assert 1 == len(restore(journal.events, at=5, max_staleness=0).episodes)
    assert 1 == len(restore(journal.events, at=7, max_staleness=2).episodes)
    assert {("", 3): 5} == restore(journal.events, at=7).heads
    too_old = restore(journal.events, at=7, max_staleness=1)
    later = restore(journal.events, at=4)
    found = restore(journal.events, at=5)
    assert ((), 1) == (too_old.episodes, too_old.num_too_old)
    assert ((), 0) == (later.episodes, later.num_too_old)
    assert not found.episodes[0].is_remade
    for restored in (too_old, later):
        assert [SessionForgotten] == [type(event) for event in restored.void]
        assert () == restore([*journal.events, *restored.void], at=5).episodes


async def test_broken_journal_does_not_stop_the_agent():
    """Its turns are not durable from then on."""
    journal = Breakable()
    async with open_process(journal) as inference:
        session = await begin(inference)
        journal.is_broken = True
        first = await inference.complete(session, say("a"))
        again = await begin(inference)
        assert first == await inference.complete(again, say("a"))
    assert () == restore(journal.events).episodes[0].turns
