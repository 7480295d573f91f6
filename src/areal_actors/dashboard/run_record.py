"""The record of a run, ``run.json``: whether it is running, finished, interrupted or failed, and why it ended.

The process of the run writes the record when the run begins and when it ends. A process that was killed cannot; its
record says that it runs, but the lock of its directory is free, and so the reader sees that it was killed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime

from attrs import asdict, evolve, field, frozen

from areal_actors import __version__
from areal_actors.dashboard.files import RunDirectory
from areal_actors.dashboard.metrics import read_gauges
from areal_actors.domain import RunStatus
from areal_actors.lib.atomic_write import atomic_write
from areal_actors.lib.locks import is_held
from areal_actors.lib.telemetry import redact


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@frozen(kw_only=True)
class RunRecord:
    """The state of a run. ``began`` and ``ended`` are times in ISO 8601, UTC; a resumed run begins again.

    ``checkpoint`` is the step that its process goes on from, and ``num_lost`` the number of processes in a row that
    went on from there, had work for a step, and were killed. ``warning`` says so if they are many.
    """

    status: RunStatus = field(converter=RunStatus)
    reason: str | None = None
    warning: str | None = None
    checkpoint: int | None = None
    num_lost: int = 0
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


_MAX_LOST = 3
"""Processes that may be killed one after the other before their run counts as making no progress."""


def follow_record(
    directory: RunDirectory, *, checkpoint: int | None, every_steps: int, has_work: Callable[[], bool]
) -> RunRecord:
    """Return the record of a run that goes on from ``checkpoint``, with a warning if it does so again and again.

    Call it before the steps after the checkpoint are removed from the metrics. ``has_work`` says whether the groups of
    a step wait to be trained. A killed process counts if it has made steps, which are lost, or had those groups.
    """
    former, record = read_record(directory), RunRecord(status=RunStatus.RUNNING, checkpoint=checkpoint)
    # The lock of the directory is this process's by now: another one that says that it runs is gone.
    if former is None or former.status is not RunStatus.RUNNING or former.checkpoint != checkpoint:
        return record
    step = read_gauges(directory).get("step_step", 0)
    num_steps = int(step) - (checkpoint or 0) if isinstance(step, int | float) else 0
    num_lost = former.num_lost + (num_steps > 0 or has_work())
    if num_lost < _MAX_LOST:
        return evolve(record, num_lost=num_lost)
    start = "the beginning" if checkpoint is None else f"the checkpoint of step {checkpoint}"
    advice = (
        f"Set checkpoint.every_steps lower than {every_steps}, so that each process reaches a checkpoint"
        if every_steps > 1
        else "A step takes longer than its processes live: find out what kills them, or set batch_size lower"
    )
    warning = (
        f"This run makes no progress: {num_lost} processes in a row went on from {start} and were killed before the "
        f"next checkpoint; the last one had made {max(num_steps, 0)} steps. {advice}."
    )
    return evolve(record, num_lost=num_lost, warning=warning)


def _is_locked(directory: RunDirectory) -> bool:
    try:
        return directory.lock.exists() and is_held(directory.lock)
    except OSError:
        # On a file system without locks, a killed run cannot be told from one that runs.
        return True
