"""The tables of a journal, as a list of migrations: step n leads from version n - 1 to version n.

A released step is never changed; additions are made by a further step. A step is SQL, or a function of the connection
if SQL is not enough. ``codec`` maps events to rows.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from typing import TypeAlias

from areal_actors.errors import JournalError

__all__ = ["APPLICATION_ID", "MIGRATIONS", "Migration", "migrate"]

Migration: TypeAlias = str | Callable[[sqlite3.Connection], None]

APPLICATION_ID = 0x4152454A
"""The letters AREJ, in the header of the file: it tells a journal from another program's database."""

_FIRST = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;

CREATE TABLE sessions (
    seq INTEGER PRIMARY KEY, session TEXT NOT NULL UNIQUE, started_at REAL NOT NULL, user TEXT, group_id TEXT,
    sample_key TEXT NOT NULL, metadata TEXT NOT NULL, key_digest BLOB NOT NULL
);
CREATE TABLE turns (
    seq INTEGER PRIMARY KEY, session TEXT NOT NULL, interaction TEXT NOT NULL,
    request_order INTEGER NOT NULL, completed_order INTEGER, parent TEXT, token_parent TEXT, fork TEXT,
    status TEXT NOT NULL, ended_at REAL NOT NULL, tag TEXT, reward REAL, finish TEXT, stop_sequence TEXT, failure TEXT,
    num_prompt_tokens INTEGER NOT NULL, num_cached_tokens INTEGER NOT NULL, num_output_tokens INTEGER,
    head_version INTEGER, tail_version INTEGER,
    is_stored INTEGER NOT NULL, has_instructions INTEGER NOT NULL, num_instructions INTEGER,
    messages TEXT NOT NULL, output TEXT, attempt TEXT, siblings TEXT, frame BLOB,
    prompt_suffix BLOB NOT NULL, token_ids BLOB, logprobs BLOB, raw_logprobs BLOB, versions BLOB, top_logprobs BLOB,
    UNIQUE (session, interaction)
);
CREATE TABLE rewards (
    seq INTEGER PRIMARY KEY, session TEXT NOT NULL, interaction TEXT NOT NULL, reward REAL NOT NULL,
    UNIQUE (session, interaction)
);
CREATE TABLE endings (
    seq INTEGER PRIMARY KEY, session TEXT NOT NULL UNIQUE, ended_at REAL NOT NULL, is_final INTEGER NOT NULL
);
CREATE TABLE forgotten (
    seq INTEGER PRIMARY KEY, session TEXT NOT NULL UNIQUE, forgotten_at REAL NOT NULL
);
CREATE INDEX forgotten_by_time ON forgotten (forgotten_at);
CREATE TABLE groups (
    seq INTEGER PRIMARY KEY, group_id TEXT NOT NULL UNIQUE, position INTEGER NOT NULL, sessions TEXT NOT NULL,
    data TEXT NOT NULL
);
CREATE TABLE group_sessions (
    session TEXT NOT NULL, group_id TEXT NOT NULL, PRIMARY KEY (session, group_id)
) WITHOUT ROWID;
CREATE INDEX group_sessions_by_group ON group_sessions (group_id);
CREATE TABLE consumed (
    seq INTEGER PRIMARY KEY, group_id TEXT NOT NULL UNIQUE, version INTEGER NOT NULL, is_trained INTEGER NOT NULL,
    consumed_at REAL NOT NULL
);
CREATE INDEX consumed_by_time ON consumed (consumed_at);
CREATE TABLE saved_versions (seq INTEGER PRIMARY KEY, version INTEGER NOT NULL UNIQUE);

CREATE VIEW done_groups AS
    SELECT * FROM consumed WHERE version <= (SELECT max(version) FROM saved_versions);
CREATE VIEW waiting_groups AS
    SELECT * FROM groups g WHERE NOT EXISTS (SELECT 1 FROM done_groups d WHERE d.group_id = g.group_id);
CREATE VIEW gone_sessions AS
    SELECT * FROM forgotten f WHERE NOT EXISTS (
        SELECT 1 FROM group_sessions s JOIN waiting_groups g ON g.group_id = s.group_id WHERE s.session = f.session
    );
"""

_SECOND = """
ALTER TABLE turns ADD COLUMN prompt_digest BLOB;
ALTER TABLE turns ADD COLUMN asked TEXT;
"""

# A group that is done is still needed while one of its sessions exists, which would otherwise appear to have no group.
_THIRD = """
CREATE VIEW finished_groups AS
    SELECT * FROM done_groups d WHERE NOT EXISTS (
        SELECT 1 FROM group_sessions g JOIN sessions s ON s.session = g.session
        WHERE g.group_id = d.group_id AND NOT EXISTS (SELECT 1 FROM forgotten f WHERE f.session = g.session)
    );
"""

_FOURTH = """
ALTER TABLE turns ADD COLUMN sampling TEXT;
"""

# Older rewards count as rewards of answers: it was not recorded which of them belonged to a whole episode.
_FIFTH = """
ALTER TABLE turns ADD COLUMN reward_scope TEXT;
ALTER TABLE rewards ADD COLUMN scope TEXT;
"""

_SIXTH = """
ALTER TABLE sessions ADD COLUMN completion_digest BLOB;
"""

_SEVENTH = """
ALTER TABLE turns ADD COLUMN num_kept INTEGER;
"""

# Turns of earlier versions have no digest.
_EIGHTH = """
ALTER TABLE turns ADD COLUMN digest TEXT;
"""

# Groups of datasets, whose sessions are not in the journal.
_NINTH = """
ALTER TABLE groups ADD COLUMN content BLOB;
CREATE TABLE steps (
    seq INTEGER PRIMARY KEY, version INTEGER NOT NULL UNIQUE, groups TEXT NOT NULL, content BLOB NOT NULL
);
"""

_TENTH = """
ALTER TABLE turns ADD COLUMN routed_experts BLOB;
"""

# Turns of episodes over a dataset, which are asked for again if their agent has to start over.
_ELEVENTH = """
ALTER TABLE turns ADD COLUMN request TEXT;
"""

# Events may be in a log beside the file. Earlier versions do not read it, and would reuse the numbers of its events.
_TWELFTH = ""

MIGRATIONS: tuple[Migration, ...] = (
    *(_FIRST, _SECOND, _THIRD, _FOURTH, _FIFTH, _SIXTH, _SEVENTH, _EIGHTH, _NINTH, _TENTH, _ELEVENTH, _TWELFTH),
)
"""All steps; their number is the version that this program writes."""


def migrate(connection: sqlite3.Connection, migrations: Sequence[Migration] = MIGRATIONS) -> None:
    """Bring a journal to the version that this program writes, each step in a separate transaction.

    Raises:
        JournalError: a newer program wrote it, or it is not a journal.
    """
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (num_tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if application != APPLICATION_ID and (num_tables or version):
        raise JournalError("It is a database of another program. Name another file.")
    if version > len(migrations):
        raise JournalError(
            f"It has version {version}, and this program knows versions up to {len(migrations)}: a newer areal_actors "
            "wrote it. Go back to that, or name another file."
        )
    for number, step in enumerate(migrations[version:], start=version + 1):
        connection.execute("BEGIN IMMEDIATE")
        try:
            if callable(step):
                step(connection)
            else:
                # One by one, because ``executescript`` would first commit the transaction.
                statement = ""
                for line in step.splitlines(keepends=True):
                    statement += line
                    if sqlite3.complete_statement(statement):
                        connection.execute(statement)
                        statement = ""
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {number}")
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
