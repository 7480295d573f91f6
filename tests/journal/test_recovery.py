"""Sessions that are restored from events continue as the uninterrupted ones."""

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
from areal_actors.journal import SqliteJournal, as_of, read_journal, recover, restate
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
        history = self.plans[name].match
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
    return recover(events)[S].tree


@st.composite
def requests(draw: st.DrawFn, tree: ConversationTree) -> CompletionRequest:
    """A request that continues an answer, as a client echoes or edits it, or starts a conversation."""
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
    """A session with several requests in flight, in any order."""
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
    """The links, the prompt and the digests of a request."""
    plan = plan_prompt(tree, renderer, request)
    match = plan.match
    known = tree.get(match.parent.id) if match.parent is not None else None
    begun = tree.begin(InteractionId("next"), plan)
    links = (plan.parent, plan.token_parent, plan.fork, begun.fork, match.fork_hint, match.num_instructions)
    return links, known, plan.messages, plan.token_ids.tolist(), plan.suffix.tolist(), match.digests


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_restored_session_continues_as_the_uninterrupted_one(new_talk: Any, data: st.DataObject) -> None:
    """It has the same interactions, rows and rewards, and the next request is planned and linked in the same way."""
    session = data.draw(histories(new_talk))
    for name in tuple(session.pending):
        session.end(name, data.draw(st.sampled_from(["complete", "fail"])), data.draw(chat_messages("assistant")))
    tree = restored(session.events)
    expected, record = evolve(session.tree.snapshot(), is_restored=True), tree.snapshot()

    assert expected == record
    assert total_reward(expected) == total_reward(record)
    assert 0 == tree.num_pending
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
def test_pending_requests_are_not_restored(new_talk: Any, data: st.DataObject) -> None:
    """Interactions that have ended stay as they were, and rows and rewards are the same."""
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


def test_request_orders_continue_after_the_last_restored_one(new_talk: Any) -> None:
    """No order is given twice; completions are counted in order of completion."""
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


def test_later_event_of_a_turn_replaces_the_earlier_one(new_talk: Any) -> None:
    """A failure that is noted after an unconfirmed write wins."""
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
    assert [] == [turn for turn in tree if turn.completed_order is not None]


def test_first_end_of_a_session_counts() -> None:
    """A later one may make it final. Events of a forgotten session are skipped."""
    ended = SessionEnded(session=S, ended_at=5.0)
    final = SessionEnded(session=S, ended_at=9.0, is_final=True)
    session = recover([STARTED, ended, final])[S]

    assert (5.0, True) == (session.ended_at, session.is_final)
    assert {} == recover([STARTED, SessionForgotten(session=S), ended])
    assert None is recover([STARTED])[S].ended_at


def test_forgotten_session_is_kept_until_its_group_is_trained_and_saved() -> None:
    """Its rows are needed again if the weights are lost."""
    forgotten = [STARTED, SessionForgotten(session=S)]
    queued = GroupQueued(group=GroupId("a"), position=0, sessions=(S,))
    trained = GroupConsumed(group=GroupId("a"), version=1, is_trained=True)

    for events in ([queued, *forgotten], [queued, *forgotten, trained]):
        session = recover(events)[S]
        assert (True, 0.0) == (session.is_forgotten, session.ended_at)
    for events in (
        forgotten,
        [queued, *forgotten, trained, VersionSaved(version=1)],
        [queued, *forgotten, evolve(trained, is_trained=False)],
    ):
        assert {} == recover(events)


@pytest.mark.anyio
async def test_sqlite_journal_restores_the_same_session_as_its_events(new_talk: Any, tmp_path: Path) -> None:
    """The session has a fork, a failure, rewards and sample keys."""
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
        read = (await read_journal(journal))[S]

    assert recover(events)[S] == read
    assert evolve(session.tree.snapshot(), is_restored=True) == read.tree.snapshot()


@given(event=any_facts(), version=st.integers(0, 4))
def test_versions_of_lost_weights_are_lowered_to_the_restored_version(event: JournalEvent, version: int) -> None:
    """Nothing else of any event changes."""
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
def test_lowered_versions_stay_lowered_after_later_restarts(new_talk: Any, data: st.DataObject, version: int) -> None:
    """The version numbers are used again meanwhile, for other weights."""
    history = data.draw(histories(new_talk)).events
    newest = 0
    told: list[JournalEvent] = []
    for event in history:
        newest += data.draw(st.sampled_from([0, 0, 1]))
        told.append(of_version(event, newest))
    known = recover([as_of(event, version) for event in told])
    again = restate(told, known, version=version)
    later = recover([as_of(event, newest) for event in (*told, *again)])

    assert later[S].tree.snapshot() == known[S].tree.snapshot()
    assert () == restate((*told, *again), later, version=newest)
