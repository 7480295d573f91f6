"""Data that is no longer needed is deleted, and nothing else; compared with a model that is a list of events."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tests.stacks.journals import read_events

from areal_actors.domain import (
    GroupConsumed,
    GroupId,
    GroupQueued,
    JournalEvent,
    RewardSet,
    SessionEnded,
    SessionForgotten,
    SessionId,
    SessionStarted,
    TurnEnded,
    VersionSaved,
)
from areal_actors.journal import JournalConfig
from areal_actors.journal.sqlite import Store
from areal_actors_testing.journal_contract import create_session, create_start, create_turn, restorable

DAY = 86_400.0


class JournalMachine(RuleBasedStateMachine):
    """A journal and the list of all events that were written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.events: list[JournalEvent] = []
        self.store = self.open()
        self.sessions: list[str] = []
        self.groups: list[str] = []
        self.version = 0

    def open(self) -> Store:
        return Store.open(self.directory / "journal.sqlite", JournalConfig())

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.directory)

    def write(self, *events: JournalEvent) -> None:
        self.store.write(events)
        self.events += events

    def live(self) -> list[str]:
        forgotten = {event.session for event in self.events if isinstance(event, SessionForgotten)}
        return [session for session in self.sessions if session not in forgotten]

    @initialize()
    def begin(self) -> None:
        self.start()

    @rule()
    def start(self) -> None:
        session = f"s{len(self.sessions)}"
        self.sessions.append(session)
        self.write(create_start(session))

    @precondition(lambda self: self.live())
    @rule(data=st.data(), number=st.integers(0, 3))
    def turn(self, data, number) -> None:
        """Write a turn, which may exist already."""
        self.write(create_turn(data.draw(st.sampled_from(self.live())), number))

    @precondition(lambda self: self.live())
    @rule(data=st.data(), number=st.integers(0, 3), reward=st.floats(-1, 1))
    def reward(self, data, number, reward) -> None:
        turn = create_turn(data.draw(st.sampled_from(self.live())), number)
        self.write(RewardSet(session=turn.session, interaction=turn.interaction.id, reward=reward))

    @precondition(lambda self: self.live())
    @rule(data=st.data(), is_final=st.booleans())
    def end(self, data, is_final) -> None:
        session = SessionId(data.draw(st.sampled_from(self.live())))
        self.write(SessionEnded(session=session, ended_at=9.0, is_final=is_final))

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def forget(self, data) -> None:
        self.write(SessionForgotten(session=SessionId(data.draw(st.sampled_from(self.live())))))

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def queue(self, data) -> None:
        """Queue a group of some sessions, which may be forgotten at once."""
        sessions = data.draw(st.lists(st.sampled_from(self.live()), min_size=1, max_size=3, unique=True))
        group = GroupId(f"g{len(self.groups)}")
        self.groups.append(group)
        queued = GroupQueued(group=group, position=len(self.groups), sessions=tuple(map(SessionId, sessions)))
        forgotten = queued.sessions if data.draw(st.booleans()) else ()
        self.write(queued, *(SessionForgotten(session=session) for session in forgotten))

    def waiting(self) -> list[str]:
        return [event.group for event in restorable(self.events) if isinstance(event, GroupQueued)]

    @precondition(lambda self: self.waiting())
    @rule(data=st.data(), ahead=st.integers(0, 2), is_trained=st.booleans())
    def consume(self, data, ahead, is_trained) -> None:
        group = GroupId(data.draw(st.sampled_from(self.waiting())))
        self.write(GroupConsumed(group=group, version=self.version + ahead, is_trained=is_trained))

    @rule()
    def save(self) -> None:
        self.version += 1
        self.write(VersionSaved(version=self.version))

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = self.open()
        self.check()

    @rule()
    def check(self) -> None:
        """Events that are needed are read in order, before and after others were deleted."""
        assert restorable(read_events(self.store)) == restorable(self.events)

    @rule()
    def tidy(self) -> None:
        """After all deletions the tables hold exactly the needed events."""
        while self.store.has_gone:
            self.store.retire()
        needed = restorable(self.events)

        assert restorable(read_events(self.store)) == needed
        for kind, table in TABLES.items():
            num_rows = self.store._value(f"SELECT count(*) FROM {table}")
            assert sum(isinstance(event, kind) for event in needed) == num_rows


TABLES = {
    SessionStarted: "sessions",
    TurnEnded: "turns",
    SessionForgotten: "forgotten",
    GroupQueued: "groups",
    GroupConsumed: "consumed",
    VersionSaved: "saved_versions",
}


TestJournal = JournalMachine.TestCase
TestJournal.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)


def test_retention_keeps_rows_for_readers_by_sql(tmp_path):
    """Until then, forgotten sessions can be queried, and are not restored."""
    now = [0.0]
    config = JournalConfig(retention_days=2)
    store = Store.open(tmp_path / "journal.sqlite", config, now=lambda: now[0])
    group = GroupQueued(group=GroupId("g"), position=0, sessions=())
    done = GroupConsumed(group=group.group, version=1, is_trained=True)
    forgotten = SessionForgotten(session=SessionId("a"))
    store.write((*create_session("a"), group, done, VersionSaved(version=1), forgotten))
    store.retire()

    assert read_events(store) == [VersionSaved(version=1)]
    assert store._value("SELECT count(*) FROM turns") == 2
    assert store._value("SELECT count(*) FROM groups") == 1

    now[0] += 2 * DAY
    store.retire()

    assert store._value("SELECT count(*) FROM turns") + store._value("SELECT count(*) FROM groups") == 0
    store.close()


def test_turns_of_deleted_sessions_are_deleted_at_the_next_opening(tmp_path):
    """They may arrive after their session was forgotten."""
    path = tmp_path / "journal.sqlite"
    store = Store.open(path, JournalConfig())
    store.write((create_start("a"), SessionForgotten(session=SessionId("a"))))
    store.retire()
    store.write((create_turn("a", 0),))
    store.close()
    store = Store.open(path, JournalConfig())

    assert store._value("SELECT count(*) FROM turns") == 0
    store.close()


def test_many_forgotten_sessions_are_deleted_in_several_steps(tmp_path):
    """Each step is short, because writers wait for it."""
    store = Store.open(tmp_path / "journal.sqlite", JournalConfig())
    for number in range(150):
        store.write((create_start(f"s{number}"), SessionForgotten(session=SessionId(f"s{number}"))))
    left = []
    while store.has_gone:
        store.retire()
        left.append(store._value("SELECT count(*) FROM sessions"))
    store.close()

    assert left == [86, 22, 0]
