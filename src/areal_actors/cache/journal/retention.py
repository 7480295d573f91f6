"""What a journal need not remember any longer, and how its file shrinks: a little at a time, between commits.

Gone are sessions that were forgotten and belong to no group that waits, and groups that were consumed at or below the
newest saved version, once their sessions are forgotten. Which rows these are is said once, by the views of
``migrations``.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

__all__ = ["delete_gone", "delete_orphans", "shrink"]

_BATCH = 64
"""Sessions that one transaction deletes: a few milliseconds for conversations of some turns."""
_RESERVE = 256
"""Free pages that are kept for what comes next: a megabyte."""
_PAGES = 256
_OF_SESSIONS = ("turns", "rewards", "endings", "sessions", "forgotten")
_OF_GROUPS = ("group_sessions", "groups", "consumed")


def delete_gone(connection: sqlite3.Connection, *, until: float, limit: int = _BATCH) -> bool:
    """Delete some of what was consumed or forgotten before ``until``; returns whether there may be more.

    To be called within a transaction.
    """
    done = connection.execute("SELECT group_id FROM finished_groups WHERE consumed_at <= ? LIMIT ?", (until, limit))
    num_groups = _delete(connection, _OF_GROUPS, "group_id", done.fetchall())
    gone = connection.execute("SELECT session FROM gone_sessions WHERE forgotten_at <= ? LIMIT ?", (until, limit))
    num_sessions = _delete(connection, _OF_SESSIONS, "session", gone.fetchall())
    connection.execute("DELETE FROM saved_versions WHERE version < (SELECT max(version) FROM saved_versions)")
    return limit in (num_groups, num_sessions)


def _delete(connection: sqlite3.Connection, tables: Sequence[str], key: str, values: list[tuple[object]]) -> int:
    for table in tables if values else ():
        connection.executemany(f"DELETE FROM {table} WHERE {key} = ?", values)  # noqa: S608 - names of ours
    return len(values)


def delete_orphans(connection: sqlite3.Connection) -> None:
    """Delete what came too late for a session that was forgotten. To be called within a transaction."""
    for table in ("turns", "rewards", "endings", "forgotten"):
        connection.execute(f"DELETE FROM {table} WHERE session NOT IN (SELECT session FROM sessions)")  # noqa: S608


def shrink(connection: sqlite3.Connection) -> bool:
    """Give some free pages back to the filesystem, if there are many; returns whether there are more."""
    (num_free,) = connection.execute("PRAGMA freelist_count").fetchone()
    (num_pages,) = connection.execute("PRAGMA page_count").fetchone()
    surplus = num_free - max(_RESERVE, num_pages // 4)
    if surplus <= 0:
        return False
    # A script, because it is stepped to its end; a statement without columns is stepped once, which frees one page.
    connection.executescript(f"PRAGMA incremental_vacuum({min(surplus, _PAGES)})")
    return bool(surplus > _PAGES)
