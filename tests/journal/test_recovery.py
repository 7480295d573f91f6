"""Restored from events, sessions go on as if nothing had happened; groups are where they were."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_actors.cache import ConversationTree, export_trajectories, plan_prompt, total_reward
from areal_actors.cache.export import STYLES
from areal_actors.domain import (
    ChatMessage,
    CompletionRequest,
    GroupConsumed,
    GroupId,
    GroupQueued,
    Interaction,
    InteractionId,
    InteractionStatus,
    JournalEvent,
    RewardSet,
    SampleKey,
    Sampling,
    SessionEnded,
    SessionForgotten,
    SessionId,
    SessionStarted,
    Tool,
    TurnEnded,
    VersionSaved,
    digest_tokens,
    digest_turn,
    is_turn_digest,
)
from areal_actors.errors import RewardError
from areal_actors.journal import MemoryJournal, SqliteJournal, as_of, read_journal, recover, restate
from areal_actors.testing.strategies import chat_messages, conversations, echo_styles
from areal_actors_testing.journal_events import events as any_facts

S = SessionId("s")
STARTED = SessionStarted(session=S, key_digest=b"k", sample_key=SampleKey(seed=1, path=("s",)), started_at=0.0)
TOOLS = ((), (Tool(name="look"),), (Tool(name="look", parameters={"type": "object"}),))


class Journaled:
    """A talk whose tree is journaled, as the session manager does it."""

    def __init__(self, talk: Any) -> None:
        self.talk = talk
        self.events: list[JournalEvent] = [STARTED]
        self.plans: dict[str, Any] = {}
        self.pending: list[str] = []

    @property
    def tree(self) -> ConversationTree:
        return self.talk.tree

    def begin(self, request: CompletionRequest) -> None:
        name = f"{len(self.plans)}"
        self.plans[name] = plan = plan_prompt(self.tree, self.talk.renderer, request)
        self.tree.begin(InteractionId(name), plan)
        self.pending.append(name)

    def end(self, name: str, how: str, output: ChatMessage) -> None:
        self.pending.remove(name)
        interaction, completion = InteractionId(name), self.talk.completion(output)
        if how == "complete":
            ended = self.tree.complete(interaction, completion, output)
        elif how == "cancel":
            ended = self.tree.cancel(interaction, completion, output)
        else:
            ended = self.tree.fail(interaction, "why")
        history = self.plans[name].match.history
        frame = (history.frame.system, history.frame.tools, history.frame.options)
        digest = history.digest(len(history.messages))
        self.events.append(TurnEnded(session=S, interaction=ended, frame=frame, prompt_digest=digest, ended_at=0.0))

    def reward(self, interaction: str | None, reward: float) -> None:
        try:
            rewarded = self.tree.set_reward(None if interaction is None else InteractionId(interaction), reward)
        except RewardError:
            return
        self.events.append(RewardSet(session=S, interaction=rewarded.id, reward=reward, scope=rewarded.reward_scope))


def restored(events: Sequence[JournalEvent]) -> ConversationTree:
    return recover(events).sessions[S].tree


@st.composite
def requests(draw: st.DrawFn, tree: ConversationTree) -> CompletionRequest:
    """A request that goes on from something that was said, as a client echoes it, edits it, or starts anew."""
    tools = draw(st.sampled_from([(), (), *TOOLS]))
    known = [turn for turn in tree.snapshot().interactions if turn.output is not None]
    if not known or draw(st.integers(0, 4)) == 0:
        text = draw(st.none() | st.sampled_from(["a", "ab"]))
        if text is not None:
            return CompletionRequest(messages=(), prompt=text)
        return CompletionRequest(messages=draw(conversations(max_turns=1)), tools=tools)
    turn = draw(st.sampled_from(known))
    history = tree.history(turn)
    if history[-2].role == "prompt":
        return CompletionRequest(messages=(), prompt="".join(m.content or "" for m in history) + "b")
    if turn.status is InteractionStatus.COMPLETED and draw(st.integers(0, 5)) == 0:
        return CompletionRequest(messages=(draw(chat_messages("user")),), previous=turn.id, tools=tools)
    echo = draw(echo_styles())
    echoed = tuple(echo(message) if message.role == "assistant" else message for message in history)
    kept = draw(st.sampled_from([echoed, echoed, echoed, echoed[1:]]))
    return CompletionRequest(messages=(*kept, draw(chat_messages("user"))), tools=tools)


@st.composite
def histories(draw: st.DrawFn, new_talk: Any) -> Journaled:
    """What happens in a session, in any order, with several requests in flight."""
    session = Journaled(new_talk(rewrites=draw(st.sampled_from([False, False, True]))))
    for _ in range(draw(st.integers(0, 9))):
        move = draw(st.sampled_from(["begin", "begin", "end", "end", "reward"]))
        if move == "begin" or not session.plans:
            sampling = Sampling(temperature=draw(st.sampled_from([0.0, 0.3, 1.0])), top_k=draw(st.integers(0, 2)))
            session.begin(evolve(draw(requests(session.tree)), sampling=sampling))
        elif move == "end" and session.pending:
            how = draw(st.sampled_from(["complete", "complete", "complete", "cancel", "fail"]))
            session.end(draw(st.sampled_from(session.pending)), how, draw(chat_messages("assistant")))
        else:
            name = draw(st.none() | st.sampled_from(sorted(session.plans)))
            session.reward(name, draw(st.sampled_from([0.5, 1.0, -1.0])))
    return session


def seen(tree: ConversationTree, renderer: Any, request: CompletionRequest) -> tuple[object, ...]:
    """Where a request hangs, and what it is answered from."""
    plan = plan_prompt(tree, renderer, request)
    match = plan.match
    known = tree.get(match.parent.id) if match.parent is not None else None
    begun = tree.begin(InteractionId("next"), plan)
    links = (plan.parent, plan.token_parent, plan.fork, begun.fork, match.fork_hint, match.num_instructions)
    return links, known, plan.messages, plan.token_ids.tolist(), plan.suffix.tolist(), match.history.digests


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_restored_session_goes_on_as_the_uninterrupted_one(new_talk: Any, data: st.DataObject) -> None:
    """The same interactions, rows and rewards; and whatever comes next is planned and linked as it would have been."""
    session = data.draw(histories(new_talk))
    for name in tuple(session.pending):
        session.end(name, data.draw(st.sampled_from(["complete", "fail"])), data.draw(chat_messages("assistant")))
    tree = restored(session.events)
    expected, record = evolve(session.tree.snapshot(), is_restored=True), tree.snapshot()

    assert expected == record
    assert total_reward(expected) == total_reward(record)
    assert (session.tree.num_completed, 0) == (tree.num_completed, tree.num_pending)
    for style in STYLES:
        assert repr(export_trajectories(expected, style=style, discount=0.9)) == repr(
            export_trajectories(record, style=style, discount=0.9)
        )
    assert _last(session.tree) == _last(tree)
    request = data.draw(requests(session.tree))
    assert seen(session.tree, session.talk.renderer, request) == seen(tree, session.talk.renderer, request)
    begun = [t.get(InteractionId("next")) for t in (session.tree, tree)]
    assert begun[0] == begun[1]


def _last(tree: ConversationTree) -> InteractionId | None:
    try:
        return tree.rewarded(None, 1.0).id
    except RewardError:
        return None


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_what_was_pending_was_never_asked(new_talk: Any, data: st.DataObject) -> None:
    """A kill leaves out the requests in flight: what has ended stays as it was, rows and rewards are the same."""
    session = data.draw(histories(new_talk))
    tree = restored(session.events)
    expected, record = evolve(session.tree.snapshot(), is_restored=True), tree.snapshot()
    ended = tuple(turn for turn in expected.interactions if turn.status is not InteractionStatus.PENDING)

    assert ended == record.interactions
    assert total_reward(evolve(expected, interactions=ended)) == total_reward(record)
    for style in STYLES:
        rows, again = (export_trajectories(r, style=style, discount=0.9).trajectories for r in (expected, record))
        assert repr(rows) == repr(again)


@given(data=st.data(), version=st.integers(0, 1))
@settings(max_examples=40, deadline=None)
def test_answers_keep_their_digests_through_recovery_and_rows(new_talk: Any, data: st.DataObject, version: int) -> None:
    """Before and after a restart, each covers the whole prompt and the answer; a restated one contains the first."""
    session = data.draw(histories(new_talk))
    events = [of_version(event, 2) if event is not STARTED else event for event in session.events]
    events = [_with_digest(event, session.tree) for event in events]
    tree = restored([as_of(event, version) for event in events])
    first = {e.interaction.id: e.interaction.digest for e in events if isinstance(e, TurnEnded)}
    request = CompletionRequest(messages=(*data.draw(requests(tree)).messages,))
    plan = plan_prompt(tree, session.talk.renderer, request)
    answer = ChatMessage(role="assistant", content="later")
    tree.begin(InteractionId("later"), plan)
    tree.complete(InteractionId("later"), session.talk.completion(answer), answer)

    for turn in tree.snapshot().interactions:
        done = turn.completion
        if turn.status is not InteractionStatus.COMPLETED or done is None:
            assert turn.digest is None
            continue
        assert turn.digest is not None
        assert turn.digest.startswith(first.get(turn.id) or "")
        assert turn.digest.split(":")[0] == digest_tokens(tree.full_tokens(turn))
        assert is_turn_digest(
            turn.digest, turn.id, logprobs=done.logprobs, versions=done.versions, raw_logprobs=done.raw_logprobs
        )
    for style in STYLES:
        for row in export_trajectories(tree.snapshot(), style=style, discount=0.9).trajectories:
            assert [tree.get(name).digest for name in row.interactions] == [info.digest for info in row.turn_infos]


def _with_digest(event: JournalEvent, tree: ConversationTree) -> JournalEvent:
    """The turn with the digest of its changed versions."""
    if not isinstance(event, TurnEnded) or event.interaction.digest is None:
        return event
    turn = event.interaction
    assert turn.completion is not None
    digest = digest_turn(turn.id, digest_tokens(tree.full_tokens(turn)), turn.completion)
    return evolve(event, interaction=evolve(turn, digest=digest))


def test_the_order_of_requests_goes_on_behind_what_was_lost(new_talk: Any) -> None:
    """No order is given twice to interactions that stay; completed ones are still counted in order of completion."""
    session = Journaled(new_talk())
    for text in ("a", "b", "c"):
        session.begin(CompletionRequest(messages=(ChatMessage(role="user", content=text),)))
    session.end("1", "complete", ChatMessage(role="assistant", content="x"))
    tree = restored(session.events)
    plan = plan_prompt(tree, session.talk.renderer, CompletionRequest(messages=(ChatMessage(role="user"),)))
    begun = tree.begin(InteractionId("n"), plan)
    done = tree.complete(
        begun.id, session.talk.completion(ChatMessage(role="assistant")), ChatMessage(role="assistant")
    )

    assert [1, 2] == [turn.order for turn in tree.snapshot().interactions]
    assert 1 == done.completed_order


def test_the_later_word_on_a_turn_holds(new_talk: Any) -> None:
    """An answer that could not be confirmed is noted as failed, whether or not it had been written."""
    session = Journaled(new_talk())
    session.begin(CompletionRequest(messages=(ChatMessage(role="user", content="a"),)))
    session.end("0", "complete", ChatMessage(role="assistant", content="x"))
    (*_, completed) = session.events
    assert isinstance(completed, TurnEnded)
    failed = Interaction(
        id=completed.interaction.id,
        order=0,
        prompt_suffix=completed.interaction.prompt_suffix,
        num_prompt_tokens=1,
        status=InteractionStatus.FAILED,
    )
    tree = restored([*session.events, evolve(completed, interaction=failed)])

    assert [InteractionStatus.FAILED] == [turn.status for turn in tree.snapshot().interactions]
    assert 0 == tree.num_completed


def test_ends_are_counted_once() -> None:
    """The first end counts; that it is final may come later; a forgotten session is gone, and so is what it is told."""
    ended = SessionEnded(session=S, ended_at=5.0)
    final = SessionEnded(session=S, ended_at=9.0, is_final=True)
    session = recover([STARTED, ended, final]).sessions[S]

    assert (5.0, True) == (session.ended_at, session.is_final)
    assert {} == recover([STARTED, SessionForgotten(session=S), ended]).sessions
    assert None is recover([STARTED]).sessions[S].ended_at


def test_groups_wait_until_they_are_consumed() -> None:
    """What waits, what was consumed, and what was trained by weights that nobody has any more."""
    queued = [GroupQueued(group=GroupId(name), position=n, sessions=(S,)) for n, name in enumerate("abcd")]
    consumed = [
        GroupConsumed(group=GroupId("a"), version=1, is_trained=True),
        GroupConsumed(group=GroupId("b"), version=2, is_trained=True),
        GroupConsumed(group=GroupId("d"), version=2, is_trained=False),
    ]
    left = recover(
        [STARTED, *queued, *consumed, VersionSaved(version=1), SessionEnded(session=S, ended_at=1.0)]
    ).unfinished

    assert ["c"] == [group.group for group in left.groups]
    assert ["b"] == [group.group for group in left.unsaved]
    assert {"a": 1, "b": 2, "d": 2} == left.consumed
    assert 1 == left.saved_version
    assert [(S, 1.0, False)] == [(s.started.session, s.ended_at, s.is_final) for s in left.ended]


def test_a_forgotten_session_is_kept_for_a_group_that_is_not_safely_trained() -> None:
    """Its group waits, or was trained into weights that a crash took away: its rows are needed again."""
    forgotten = [STARTED, SessionForgotten(session=S)]
    queued = GroupQueued(group=GroupId("a"), position=0, sessions=(S,))
    trained = GroupConsumed(group=GroupId("a"), version=1, is_trained=True)

    for events in ([queued, *forgotten], [queued, *forgotten, trained]):
        (session,) = recover(events).unfinished.ended
        assert (True, 0.0) == (session.is_forgotten, session.ended_at)
    for events in (
        forgotten,
        [queued, *forgotten, trained, VersionSaved(version=1)],
        [queued, *forgotten, evolve(trained, is_trained=False)],
    ):
        assert {} == recover(events).sessions


@pytest.mark.anyio
async def test_a_file_restores_what_its_facts_restore(new_talk: Any, tmp_path: Path) -> None:
    """Turns, a fork, a failure, rewards and seeds of samples, through SQL and back."""
    session = Journaled(new_talk())
    session.begin(CompletionRequest(messages=(ChatMessage(role="user", content="a"),), tools=TOOLS[1]))
    session.end("0", "complete", ChatMessage(role="assistant", content="x", reasoning="y"))
    history = session.tree.history(session.tree.get(InteractionId("0")))
    session.begin(CompletionRequest(messages=(*history, ChatMessage(role="user", content="b"))))
    session.begin(CompletionRequest(messages=(), prompt="raw"))
    session.end("2", "complete", ChatMessage(role="assistant", content="z"))
    session.end("1", "fail", ChatMessage(role="assistant"))
    session.reward("0", 0.5)
    events = [evolve(event, asked=("d", 3)) if isinstance(event, TurnEnded) else event for event in session.events]
    async with SqliteJournal.open(tmp_path / "journal.sqlite") as journal:
        await journal.write(*events)
    async with SqliteJournal.open(tmp_path / "journal.sqlite") as journal:
        read = (await read_journal(journal)).sessions[S]

    assert recover(events).sessions[S] == read
    assert evolve(session.tree.snapshot(), is_restored=True) == read.tree.snapshot()


@pytest.mark.anyio
async def test_a_journal_is_read_as_its_facts() -> None:
    """Reading is folding."""
    assert recover([STARTED]) == await read_journal(MemoryJournal([STARTED]))


@given(event=any_facts(), version=st.integers(0, 4))
def test_what_lost_weights_sampled_counts_as_of_those_that_are_gone_on_with(event: JournalEvent, version: int) -> None:
    """Versions above are lowered to it; nothing else of any event changes."""
    known = as_of(event, version)
    if not isinstance(event, TurnEnded) or event.interaction.completion is None:
        assert known is event
        return
    assert isinstance(known, TurnEnded)
    assert known.interaction.completion is not None
    before, after = event.interaction.completion.versions, known.interaction.completion.versions

    assert [min(number, version) for number in before.tolist()] == after.tolist()
    assert repr(known.interaction.completion.logprobs) == repr(event.interaction.completion.logprobs)
    assert as_of(known, version) is known


def of_version(event: JournalEvent, version: int) -> JournalEvent:
    """The same turn, sampled by other weights."""
    if not isinstance(event, TurnEnded) or event.interaction.completion is None:
        return event
    completion = event.interaction.completion
    completion = evolve(completion, versions=np.full(len(completion.versions), version, dtype=np.int32))
    return evolve(event, interaction=evolve(event.interaction, completion=completion))


@given(data=st.data(), version=st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_lost_weights_stay_lost_when_their_number_is_given_again(
    new_talk: Any, data: st.DataObject, version: int
) -> None:
    """What a restart takes for older than it was told of is so for every later restart, too; nothing else changes."""
    history = data.draw(histories(new_talk)).events
    newest = 0
    told: list[JournalEvent] = []
    for event in history:
        newest += data.draw(st.sampled_from([0, 0, 1]))
        told.append(of_version(event, newest))
    known = recover([as_of(event, version) for event in told])
    again = restate(told, known, version=version)
    later = recover([as_of(event, newest) for event in (*told, *again)])

    assert known.sessions[S].tree.snapshot() == later.sessions[S].tree.snapshot()
    assert () == restate((*told, *again), later, version=newest)


def test_a_restored_session_says_so(new_talk: Any) -> None:
    """In its record, which exports read."""
    session = Journaled(new_talk())
    tree = ConversationTree.restore(session.tree.session, ())

    assert (False, True) == (session.tree.snapshot().is_restored, tree.snapshot().is_restored)
