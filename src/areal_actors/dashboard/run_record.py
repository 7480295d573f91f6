"""The record of a run, ``run.json``: whether it is running, finished, interrupted or failed, and why it ended.

The process of the run writes the record when the run begins and when it ends. A process that was killed cannot; its
record says that it runs, but the lock of its directory is free, and so the reader sees that it was killed.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime

from attrs import asdict, field, frozen

from areal_actors import __version__
from areal_actors.dashboard.files import RunDirectory
from areal_actors.domain import RunStatus
from areal_actors.lib.atomic_write import atomic_write
from areal_actors.lib.locks import is_held
from areal_actors.lib.telemetry import redact


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@frozen(kw_only=True)
class RunRecord:
    """The state of a run. ``began`` and ``ended`` are times in ISO 8601, UTC; a resumed run begins again."""

    status: RunStatus = field(converter=RunStatus)
    reason: str | None = None
    is_service: bool = False
    began: str = field(factory=_now)
    ended: str | None = None
    library_version: str = __version__


def write_record(directory: RunDirectory, record: RunRecord) -> None:
    """Replace the record of a run; a status other than running gets its time. Raises ``OSError``."""
    ended = None if record.status is RunStatus.RUNNING else _now()
    reason = None if record.reason is None else redact(record.reason)
    atomic_write(directory.record, json.dumps(asdict(record) | {"ended": ended, "reason": reason}, indent=1) + "\n")


def read_record(directory: RunDirectory) -> RunRecord | None:
    """Return the record of a run; ``None`` for a run that has not begun, or of a version without records."""
    try:
        found = json.loads(directory.record.read_text(encoding="utf-8"))
        record = RunRecord(**found)
    except (OSError, ValueError, TypeError):
        return None
    if record.status is RunStatus.SERVING and not _is_locked(directory):
        return RunRecord(**found | {"status": RunStatus.FINISHED})
    # A killed process cannot write how it ended: the record still says running, while the lock of the directory is
    # free.
    if record.status is RunStatus.RUNNING and not _is_locked(directory):
        return RunRecord(**found | {"status": RunStatus.KILLED, "reason": "its process ended without a word"})
    return record


def _is_locked(directory: RunDirectory) -> bool:
    try:
        return directory.lock.exists() and is_held(directory.lock)
    except OSError:
        # On a file system without locks, a killed run cannot be told from one that runs.
        return True
