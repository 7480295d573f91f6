"""The contract of every ``Journal``, as checks that you can run against your own.

``restorable`` is a slow and simple model of what a journal must return; each check is a coroutine function that takes
``open_journal``, which opens the same journal again each time, and raises ``AssertionError`` if it is broken::

    @pytest.mark.anyio
    @pytest.mark.parametrize("check", JOURNAL_CHECKS)
    async def test_my_journal_keeps_the_contract(check, tmp_path):
        await check(lambda: MyJournal.open(tmp_path))
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from typing import TypeAlias

import anyio

from areal_actors.domain import (
    ChatMessage,
    Completion,
    FinishReason,
    GroupConsumed,
    GroupId,
    GroupQueued,
    Interaction,
    InteractionId,
    InteractionStatus,
    JournalEvent,
    RewardScope,
    RewardSet,
    SampleKey,
    SessionEnded,
    SessionForgotten,
    SessionId,
    SessionStarted,
    StepLeased,
    TurnEnded,
    VersionSaved,
    as_ints,
)
from areal_actors.journal import Journal

OpenJournal: TypeAlias = Callable[[], AbstractAsyncContextManager[Journal]]
Check: TypeAlias = Callable[[OpenJournal], Awaitable[None]]

_OfSession = SessionStarted | TurnEnded | RewardSet | SessionEnded | SessionForgotten


def create_start(session: str) -> SessionStarted:
    """Return the start of a session."""
    return SessionStarted(
        session=SessionId(session), key_digest=b"digest", sample_key=SampleKey(seed=1, path=(session,)), started_at=1.5
    )


def create_turn(session: str, number: int, *, num_tokens: int = 3, text: str = "answer") -> TurnEnded:
    """Return the ``number``-th turn of a session, completed, with ``num_tokens`` tokens each in prompt and answer."""
    ids = as_ints(range(num_tokens))
    logprobs = [-0.5] * num_tokens
    turn = Interaction(
        id=InteractionId(f"{session}-turn-{number}"),
        order=number,
        messages=(ChatMessage(role="user", content=f"question {number}"),),
        prompt_suffix=ids,
        num_prompt_tokens=num_tokens,
        completion=Completion(
            token_ids=ids,
            logprobs=logprobs,
            raw_logprobs=logprobs,
            versions=[4] * num_tokens,
            finish=FinishReason.STOP,
        ),
        output=ChatMessage(role="assistant", content=text),
        status=InteractionStatus.COMPLETED,
        completed_order=number,
    )
    return TurnEnded(session=SessionId(session), interaction=turn, frame=(b"a", b"b", b"c"), ended_at=2.5)


def create_session(session: str, num_turns: int = 2) -> tuple[JournalEvent, ...]:
    """Return the events of a session from its start to its end, with a reward for each turn."""
    turns = [create_turn(session, number) for number in range(num_turns)]
    rewards = [RewardSet(session=turn.session, interaction=turn.interaction.id, reward=0.25) for turn in turns]
    return create_start(session), *turns, *rewards, SessionEnded(session=SessionId(session), ended_at=3.5)


def restorable(events: Iterable[JournalEvent]) -> tuple[JournalEvent, ...]:
    """Return ``events`` without those that were replaced, and those that are no longer needed.

    A repeated event replaces the earlier one; a start and a turn keep their place. Removed are forgotten sessions that
    belong to no group, or only to groups that were consumed up to the newest saved version, and such groups themselves,
    once all their sessions are forgotten: until then they record that these were trained. Leases of steps up to the
    newest saved version are removed.
    """
    kept: dict[tuple[object, ...], JournalEvent] = {}
    for event in events:
        key = _key(event)
        # A forgotten name begins anew, and nothing of the former session belongs to it.
        if isinstance(event, SessionStarted) and (SessionForgotten, event.session) in kept:
            kept = {k: old for k, old in kept.items() if not _is_of(old, {event.session})}
        if isinstance(event, GroupQueued):
            kept.pop((GroupConsumed, event.group), None)
        if not isinstance(event, SessionStarted | TurnEnded):
            kept.pop(key, None)
        kept[key] = event
    rest = tuple(kept.values())
    newest = max((event.version for event in rest if isinstance(event, VersionSaved)), default=None)
    done = {f.group for f in rest if isinstance(f, GroupConsumed) and newest is not None and f.version <= newest}
    used = {s for event in rest if isinstance(event, GroupQueued) and event.group not in done for s in event.sessions}
    started = {event.session for event in rest if isinstance(event, SessionStarted)}
    gone = {event.session for event in rest if isinstance(event, SessionForgotten)} - used
    unknown = {event.session for event in rest if isinstance(event, _OfSession)} - started
    live = started - {event.session for event in rest if isinstance(event, SessionForgotten)}
    done -= {event.group for event in rest if isinstance(event, GroupQueued) and not live.isdisjoint(event.sessions)}
    return tuple(
        event
        for event in rest
        if not _is_of(event, gone | unknown)
        and not (isinstance(event, GroupQueued | GroupConsumed) and event.group in done)
        and not (isinstance(event, VersionSaved) and event.version != newest)
        and not (isinstance(event, StepLeased) and newest is not None and event.version <= newest)
    )


def _key(event: JournalEvent) -> tuple[object, ...]:
    match event:
        case TurnEnded():
            return TurnEnded, event.session, event.interaction.id
        case RewardSet():
            return RewardSet, event.session, event.interaction
        case GroupQueued() | GroupConsumed():
            return type(event), event.group
        case VersionSaved() | StepLeased():
            return type(event), event.version
        case _:
            return type(event), event.session


def _is_of(event: JournalEvent, sessions: set[SessionId]) -> bool:
    return isinstance(event, _OfSession) and event.session in sessions


# ------------------------------------------------------------------------------------------------------ checks


async def _read(open_journal: OpenJournal) -> tuple[JournalEvent, ...]:
    async with open_journal() as journal:
        return restorable([event async for event in journal.read()])


async def check_a_new_journal_is_empty(open_journal: OpenJournal) -> None:
    """A new journal has no events, and can be written."""
    assert await _read(open_journal) == ()
    async with open_journal() as journal:
        assert journal.failure is None


async def check_facts_come_back_in_order(open_journal: OpenJournal) -> None:
    """Facts of every kind are read as they were written, in order, whether written or noted."""
    group = GroupQueued(group=GroupId("g"), position=3, sessions=(SessionId("a"), SessionId("b")), data={"x": [1]})
    consumed = GroupConsumed(group=GroupId("g"), version=6, is_trained=True)
    encoded = GroupQueued(group=GroupId("h"), position=4, sessions=(), content=b"\0rows")
    leased = StepLeased(version=6, groups=(GroupId("h"), GroupId("g")), content=b"\0")
    sessions = (*create_session("a"), *create_session("b"))
    events = (*sessions, group, encoded, leased, consumed, VersionSaved(version=5))
    async with open_journal() as journal:
        for event in events[:5]:
            await journal.write(event)
        journal.note(*events[5:7])
        journal.note()
        await journal.write(*events[7:])

    assert await _read(open_journal) == events


async def check_a_write_includes_earlier_notes(open_journal: OpenJournal) -> None:
    """When a write has returned, the events noted before it have been written, too."""
    async with open_journal() as journal:
        journal.note(create_start("a"))
        await journal.write()
        seen = [event async for event in journal.read()]

    assert seen == [create_start("a")]


async def check_leaving_writes_what_was_noted(open_journal: OpenJournal) -> None:
    """Closing the journal writes its last notes, without waiting for them."""
    async with open_journal() as journal:
        journal.note(create_start("a"))

    assert await _read(open_journal) == (create_start("a"),)


async def check_concurrent_writers(open_journal: OpenJournal) -> None:
    """The events of all writers are read, those of each writer in order."""
    sessions = {name: create_session(name, 3) for name in ("a", "b", "c", "d")}

    async def write(journal: Journal, events: tuple[JournalEvent, ...]) -> None:
        for event in events:
            await journal.write(event)

    async with open_journal() as journal, anyio.create_task_group() as tasks:
        for events in sessions.values():
            tasks.start_soon(write, journal, events)
    seen = await _read(open_journal)

    assert {name: tuple(f for f in seen if _is_of(f, {SessionId(name)})) for name in sessions} == sessions


async def check_a_cancelled_write_is_written(open_journal: OpenJournal) -> None:
    """Cancelling a write does not undo it."""
    async with open_journal() as journal:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await journal.write(create_start("a"), create_turn("a", 0))
        await journal.write(create_turn("a", 1))

    assert await _read(open_journal) == (create_start("a"), create_turn("a", 0), create_turn("a", 1))


async def check_what_is_said_again_replaces(open_journal: OpenJournal) -> None:
    """A corrected reward is read once, as it was set last; a session that is finalized has one end."""
    events = create_session("a", 1)
    turn = create_turn("a", 0)
    again = RewardSet(session=turn.session, interaction=turn.interaction.id, reward=-1.0, scope=RewardScope.EPISODE)
    final = SessionEnded(session=turn.session, ended_at=9.0, is_final=True)
    async with open_journal() as journal:
        await journal.write(*events)
        await journal.write(again, final)

    assert await _read(open_journal) == (create_start("a"), turn, again, final)


async def check_forgotten_sessions_go(open_journal: OpenJournal) -> None:
    """Forgotten sessions are not restored; others are."""
    async with open_journal() as journal:
        await journal.write(*create_session("a"), *create_session("b"))
        journal.note(SessionForgotten(session=SessionId("a")))

    assert await _read(open_journal) == create_session("b")


async def check_groups_stay_until_their_sessions_are_forgotten(open_journal: OpenJournal) -> None:
    """After a crash before that, a trained session must not look like one that was never trained."""
    session, group = SessionId("a"), GroupId("g")
    queued = GroupQueued(group=group, position=0, sessions=(session,))
    consumed = GroupConsumed(group=group, version=5, is_trained=True)
    events = (*create_session("a"), queued, consumed, VersionSaved(version=5))
    async with open_journal() as journal:
        await journal.write(*events)

    assert await _read(open_journal) == events

    async with open_journal() as journal:
        await journal.write(SessionForgotten(session=session))

    assert await _read(open_journal) == (VersionSaved(version=5),)


async def check_groups_stay_until_their_weights_are_saved(open_journal: OpenJournal) -> None:
    """A group and its sessions, forgotten or not, stay until it was consumed at or below a saved version."""
    session, group = SessionId("a"), GroupId("g")
    queued = GroupQueued(group=group, position=0, sessions=(session,))
    forgotten = SessionForgotten(session=session)
    consumed = GroupConsumed(group=group, version=5, is_trained=True)
    events = (*create_session("a"), queued, forgotten, consumed, VersionSaved(version=4))
    async with open_journal() as journal:
        await journal.write(*events)

    assert await _read(open_journal) == events

    async with open_journal() as journal:
        await journal.write(VersionSaved(version=5))

    assert await _read(open_journal) == (VersionSaved(version=5),)


async def check_leases_stay_until_their_weights_are_saved(open_journal: OpenJournal) -> None:
    """The lease of a step, and its encoded groups, stay until the weights that it made are saved."""
    group = GroupId("g")
    queued = GroupQueued(group=group, position=0, sessions=(), content=b"rows")
    leased = StepLeased(version=5, groups=(group,))
    events = (queued, leased, GroupConsumed(group=group, version=5, is_trained=True), VersionSaved(version=4))
    async with open_journal() as journal:
        await journal.write(*events)

    assert await _read(open_journal) == events

    async with open_journal() as journal:
        await journal.write(VersionSaved(version=5))

    assert await _read(open_journal) == (VersionSaved(version=5),)


JOURNAL_CHECKS: tuple[Check, ...] = (
    check_a_new_journal_is_empty,
    check_facts_come_back_in_order,
    check_a_write_includes_earlier_notes,
    check_leaving_writes_what_was_noted,
    check_concurrent_writers,
    check_a_cancelled_write_is_written,
    check_what_is_said_again_replaces,
    check_forgotten_sessions_go,
    check_groups_stay_until_their_weights_are_saved,
    check_groups_stay_until_their_sessions_are_forgotten,
    check_leases_stay_until_their_weights_are_saved,
)
"""All checks."""
