"""The tables of a journal: one row per event, with a few columns to query and the whole event as a record.

The record is the event in the encoding of messages between processes (``kernel.remote.codec``). The columns repeat what
people ask for by SQL; only the texts of a conversation are moved instead of repeated, because they are most of a turn.

Every row has a number (``seq``) in the order in which events were handed over. A repeated event replaces the earlier
one: a session's start and a turn keep their number, so that rows that depend on them still follow, and everything else
moves to the end.
"""
# ruff: noqa: S608 - all names are those of ``TABLES``

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

from attrs import frozen

from areal_actors.domain import (
    GroupConsumed,
    GroupQueued,
    JournalEvent,
    RewardSet,
    SessionEnded,
    SessionForgotten,
    SessionStarted,
    StepLeased,
    TurnEnded,
    VersionSaved,
)
from areal_actors.errors import JournalError, ProtocolError
from areal_actors.kernel.remote.codec import Codec

FORMAT = 13
"""The format that this program reads and writes, as ``PRAGMA user_version``. Formats up to 12 had no records."""
APPLICATION_ID = 0x4152454A
"""The letters AREJ, in the header of the file: it tells a journal from another program's database."""

Value: TypeAlias = str | bytes | int | float | None
Statement: TypeAlias = tuple[str, Sequence[Value]]

_NOT_GONE = "NOT EXISTS (SELECT 1 FROM gone_sessions g WHERE g.session = t.session)"
_NOT_FINISHED = "NOT EXISTS (SELECT 1 FROM finished_groups f WHERE f.group_id = t.group_id)"


class RefusedEvent(JournalError):
    """An event holds a value that cannot be stored. The journal goes on without it."""


def _text(value: str | None) -> Value:
    """Return a text as an SQL value. SQL cannot hold halves of surrogate pairs, which Python reads from JSON."""
    if value is None or value.isascii():
        return value
    try:
        value.encode()
    except UnicodeEncodeError:
        return value.encode("utf-8", "surrogatepass")
    return value


def _dump(value: object) -> Value:
    return _text(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def _load(value: Any) -> Any:
    return json.loads(value.decode("utf-8", "surrogatepass") if isinstance(value, bytes) else value)


@frozen(kw_only=True)
class Table:
    """The table of the events of class ``event``.

    ``columns`` are functions of an event; the first ones, ``num_keys`` of them, identify a row. ``is_kept`` is the SQL
    condition for rows that are restored.
    """

    name: str
    event: type[JournalEvent]
    columns: Mapping[str, Callable[[Any], Value]]
    num_keys: int = 1
    keeps_place: bool = False
    is_kept: str = "true"
    time: str | None = None
    """The column with the time of the write, from which ``retention_days`` count."""

    @property
    def names(self) -> tuple[str, ...]:
        """The columns in their order."""
        texts = ("messages", "output") if self.event is TurnEnded else ()
        return ("seq", *self.columns, *(() if self.time is None else (self.time,)), *texts, "record")

    @property
    def creation(self) -> str:
        """The statement that creates the table."""
        keys = ", ".join(self.names[1 : self.num_keys + 1])
        return f"CREATE TABLE {self.name} (seq INTEGER PRIMARY KEY, {', '.join(self.names[1:])}, UNIQUE ({keys}))"

    @property
    def insertion(self) -> str:
        """The statement that writes a row, or replaces the one with the same key."""
        names = self.names
        changed = names[1:] if self.keeps_place else names
        return (
            f"INSERT INTO {self.name} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))}) "
            f"ON CONFLICT ({', '.join(names[1 : self.num_keys + 1])}) DO UPDATE SET "
            + ", ".join(f"{name} = excluded.{name}" for name in changed)
        )


def _of_versions(choose: Callable[[Any], Any]) -> Callable[[TurnEnded], Value]:
    def value(event: TurnEnded) -> Value:
        completion = event.interaction.completion
        return None if completion is None or not len(completion.versions) else int(choose(completion.versions))

    return value


TABLES: tuple[Table, ...] = (
    Table(
        name="sessions",
        event=SessionStarted,
        columns={
            "session": lambda e: _text(e.session),
            "started_at": lambda e: e.started_at,
            "user": lambda e: _text(e.user),
            "group_id": lambda e: _text(e.group),
            "key_digest": lambda e: e.key_digest,
            "completion_digest": lambda e: e.completion_digest,
        },
        keeps_place=True,
        is_kept=_NOT_GONE,
    ),
    Table(
        name="turns",
        event=TurnEnded,
        columns={
            "session": lambda e: _text(e.session),
            "interaction": lambda e: _text(e.interaction.id),
            "request_order": lambda e: e.interaction.order,
            "parent": lambda e: _text(e.interaction.parent),
            "fork": lambda e: e.interaction.fork,
            "status": lambda e: e.interaction.status,
            "failure": lambda e: _text(e.interaction.failure),
            "finish": lambda e: e.interaction.completion and e.interaction.completion.finish,
            "ended_at": lambda e: e.ended_at,
            "tag": lambda e: _text(e.interaction.tag),
            "reward": lambda e: e.interaction.reward,
            "num_prompt_tokens": lambda e: e.interaction.num_prompt_tokens,
            "num_cached_tokens": lambda e: e.num_cached_tokens,
            "num_output_tokens": lambda e: e.interaction.completion and len(e.interaction.completion.token_ids),
            "head_version": _of_versions(lambda versions: versions.min()),
            "tail_version": _of_versions(lambda versions: versions.max()),
        },
        num_keys=2,
        keeps_place=True,
        is_kept=_NOT_GONE,
    ),
    Table(
        name="rewards",
        event=RewardSet,
        columns={
            "session": lambda e: _text(e.session),
            "interaction": lambda e: _text(e.interaction),
            "reward": lambda e: e.reward,
            "scope": lambda e: e.scope,
        },
        num_keys=2,
        is_kept=_NOT_GONE,
    ),
    Table(
        name="endings",
        event=SessionEnded,
        columns={
            "session": lambda e: _text(e.session),
            "ended_at": lambda e: e.ended_at,
            "is_final": lambda e: e.is_final,
        },
        is_kept=_NOT_GONE,
    ),
    Table(
        name="forgotten",
        event=SessionForgotten,
        columns={"session": lambda e: _text(e.session)},
        time="forgotten_at",
        is_kept=_NOT_GONE,
    ),
    Table(
        name="groups",
        event=GroupQueued,
        columns={
            "group_id": lambda e: _text(e.group),
            "position": lambda e: e.position,
            "sessions": lambda e: _dump(e.sessions),
        },
        is_kept=_NOT_FINISHED,
    ),
    Table(
        name="steps",
        event=StepLeased,
        columns={"version": lambda e: e.version, "groups": lambda e: _dump(e.groups)},
        is_kept="version > ifnull((SELECT max(version) FROM saved_versions), version - 1)",
    ),
    Table(
        name="consumed",
        event=GroupConsumed,
        columns={
            "group_id": lambda e: _text(e.group),
            "version": lambda e: e.version,
            "is_trained": lambda e: e.is_trained,
        },
        time="consumed_at",
        is_kept=_NOT_FINISHED,
    ),
    Table(name="saved_versions", event=VersionSaved, columns={"version": lambda e: e.version}),
)
"""All tables of events. Columns have no types: SQLite stores a value as it is given."""

_BY_EVENT = {table.event: table for table in TABLES}
_BY_NAME = {table.name: table for table in TABLES}
_INSERTIONS = {table.event: table.insertion for table in TABLES}

_REST = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE group_sessions (session, group_id, PRIMARY KEY (session, group_id)) WITHOUT ROWID;
CREATE INDEX group_sessions_by_group ON group_sessions (group_id);
CREATE INDEX forgotten_by_time ON forgotten (forgotten_at);
CREATE INDEX consumed_by_time ON consumed (consumed_at);
CREATE VIEW done_groups AS
    SELECT * FROM consumed WHERE version <= (SELECT max(version) FROM saved_versions);
CREATE VIEW waiting_groups AS
    SELECT * FROM groups g WHERE NOT EXISTS (SELECT 1 FROM done_groups d WHERE d.group_id = g.group_id);
CREATE VIEW gone_sessions AS
    SELECT * FROM forgotten f WHERE NOT EXISTS (
        SELECT 1 FROM group_sessions s JOIN waiting_groups g ON g.group_id = s.group_id WHERE s.session = f.session
    );
-- A group that is done is still needed while one of its sessions exists, which would otherwise seem to have no group.
CREATE VIEW finished_groups AS
    SELECT * FROM done_groups d WHERE NOT EXISTS (
        SELECT 1 FROM group_sessions g JOIN sessions s ON s.session = g.session
        WHERE g.group_id = d.group_id AND NOT EXISTS (SELECT 1 FROM forgotten f WHERE f.session = g.session)
    );
"""


def create_tables(connection: sqlite3.Connection) -> None:
    """Create the tables in a new file. A journal that has them stays as it is.

    Raises:
        JournalError: another release wrote the file, or it is not a journal.
    """
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (num_tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if application != APPLICATION_ID and (num_tables or version):
        raise JournalError("It is a database of another program. Name another file.")
    if version not in (0, FORMAT):
        age = "an earlier" if version < FORMAT else "a newer"
        raise JournalError(
            f"It has format {version}, and this program reads format {FORMAT}: {age} release of areal_actors wrote it. "
            "Finish its work with that release, or move the file away to begin a new one."
        )
    if version == 0:
        # One script in one transaction: a process that is killed meanwhile leaves an empty file.
        script = [table.creation + ";" for table in TABLES]
        pragmas = f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {FORMAT};"
        connection.executescript("\n".join(["BEGIN IMMEDIATE;", *script, _REST, pragmas, "COMMIT;"]))


# ------------------------------------------------------------------------------------------------------ events


def encode_event(codec: Codec, event: JournalEvent, seq: int, now: float) -> Iterator[Statement]:
    """Yield the statements that store ``event`` as number ``seq``, at ``now`` seconds since 1970.

    Raises:
        RefusedEvent: the event holds a value that cannot be stored, such as metadata that is not JSON.
    """
    kind = type(event)
    try:
        table = _BY_EVENT[kind]
        data = codec.to_data(event, kind, "it")
        values = [seq, *(column(event) for column in table.columns.values())]
        if table.time is not None:
            values.append(now)
        if isinstance(event, TurnEnded):
            turn = data["interaction"]
            values += [_dump(turn.pop("messages")), None if turn["output"] is None else _dump(turn.pop("output"))]
        values.append(codec.to_bytes(data))
    except (TypeError, ValueError, AttributeError, LookupError, RecursionError, OverflowError, ProtocolError) as error:
        raise RefusedEvent(
            f"A {kind.__name__} cannot be written to the journal: {error}. Metadata and problems of sessions must be "
            "JSON."
        ) from error
    match event:
        case SessionStarted(session=session):
            # A forgotten session whose name is used again is a different session.
            name = _text(session)
            for former in ("turns", "rewards", "endings", "sessions"):
                again = "session = ?1 AND EXISTS (SELECT 1 FROM forgotten WHERE session = ?1)"
                yield f"DELETE FROM {former} WHERE {again}", (name,)
            yield "DELETE FROM forgotten WHERE session = ?", (name,)
        case GroupQueued(group=group):
            # A group that is queued again waits again, even if it was consumed before, and refers to other sessions.
            name = _text(group)
            yield "DELETE FROM consumed WHERE group_id = ?", (name,)
            yield "DELETE FROM group_sessions WHERE group_id = ?", (name,)
            for session in dict.fromkeys(event.sessions):
                yield "INSERT INTO group_sessions (session, group_id) VALUES (?, ?)", (_text(session), name)
        case _:
            pass
    yield _INSERTIONS[kind], values


def _select_events() -> str:
    parts = []
    for table in TABLES:
        texts = "messages, output" if table.event is TurnEnded else "NULL, NULL"
        query = f"SELECT seq, '{table.name}', {texts}, record FROM {table.name} AS t"
        parts.append(f"{query} WHERE seq > ?1 AND ({table.is_kept})")
    return f"{' UNION ALL '.join(parts)} ORDER BY seq LIMIT ?2"


SELECT_EVENTS = _select_events()
"""The next rows to restore, after a number and up to a limit: that number, then the arguments of ``decode_row``."""


def decode_row(codec: Codec, table: str, messages: Value, output: Value, record: bytes) -> JournalEvent:
    """Return the event that is stored in a row of ``table``.

    Raises:
        ProtocolError: the record is damaged.
        ValueError: one of the texts is damaged.
    """
    kind, data = _BY_NAME[table].event, codec.from_bytes(record)
    if kind is TurnEnded:
        data["interaction"]["messages"] = _load(messages)
        if output is not None:
            data["interaction"]["output"] = _load(output)
    return cast("JournalEvent", codec.from_data(data, kind, f"a row of {table}"))
