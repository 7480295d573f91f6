"""Decide which jobs of a former controller the next one keeps.

Pure: the decision depends on the records, one queue listing, and what is wanted now. A job is kept if the same job
would be submitted now, word for word, and if its name identifies it uniquely. Everything that was decided at submission
is on its record, as its traits. Decisions made when the worker starts, such as what it trains, are not traits, because
its role starts afresh with every controller. ``takeover`` hands running jobs over.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from hashlib import sha256

from attrs import evolve, frozen

from areal_actors.schedulers.slurm.files import JobRecord
from areal_actors.schedulers.slurm.queue import Course, JobRow
from areal_actors.schedulers.slurm.script import JobRequest, create_arguments, render_script
from areal_actors.schedulers.slurm.settings import SlurmConfig

__all__ = ["Traits", "Verdict", "judge", "traits_of"]

Traits = Mapping[str, str]
"""The properties of a submission, by name: its options, and digests of its script and of each variable."""

_SESSION = re.compile(
    r"SSH_.*|XDG_.*|DBUS_.*|GPG_.*|SUDO_.*|TMUX.*|STY|SCREEN.*|TERM|TERM_.*|COLORTERM|LS_COLORS|LINES|COLUMNS"
    r"|DISPLAY|WAYLAND_DISPLAY|XAUTHORITY|WINDOW|WINDOWID|VSCODE_.*|HIST.*|PS[1-4]|PROMPT.*|SHLVL|PWD|OLDPWD|_"
    r"|HOST|HOSTNAME|MAIL|INVOCATION_ID|JOURNAL_STREAM|SYSTEMD_.*|NOTIFY_SOCKET"
)
"""Variables of the shell from which the controller was started. They differ with each login, so traits exclude them."""


@frozen(kw_only=True)
class Verdict:
    """The decision about a job on record.

    ``why`` is the reason for ending it; it is empty for a job that is kept, whose line in the queue is ``row``.
    """

    record: JobRecord
    row: JobRow | None = None
    why: str = ""


def traits_of(request: JobRequest, config: SlurmConfig, environment: Mapping[str, str]) -> Traits:
    """Return the traits of a job for ``request``, without the values that differ with each submission."""
    # Run id, incarnation and avoided nodes change with each submission.
    plain = evolve(request, run="0" * 16, life=0, avoided=())
    found: dict[str, str] = {}
    for argument in create_arguments(plain, config):
        option, _, value = argument.partition("=")
        found[option] = f"{found[option]},{value}" if option in found else value
    found["script"] = _digest(render_script(plain, config))
    found |= {f"${name}": _digest(value) for name, value in environment.items() if not _SESSION.fullmatch(name)}
    return found


def judge(
    records: Sequence[JobRecord],
    rows: Sequence[JobRow],
    wanted: Mapping[str, Traits],
    *,
    stopped: Collection[str] = (),
) -> tuple[Verdict, ...]:
    """Return a verdict on each of ``records``, in their order.

    Args:
        records: jobs that are not known to have ended.
        rows: lines of the queue with their names.
        wanted: the traits of what would be submitted now, by worker.
        stopped: names of jobs that their former controller had begun to end.
    """
    verdicts = [_judge_one(record, rows, wanted.get(record.worker), stopped) for record in records]
    # Of several jobs for one worker, keep the newest.
    newest = {one.record.worker: one for one in sorted(verdicts, key=_age) if not one.why}
    return tuple(
        one
        if one.why or newest[one.record.worker] is one
        else Verdict(record=one.record, why="a later job of its worker is kept")
        for one in verdicts
    )


def _judge_one(record: JobRecord, rows: Sequence[JobRow], wanted: Traits | None, stopped: Collection[str]) -> Verdict:
    alive = [row for row in rows if row.name == record.name and row.course is not Course.ENDED]
    if wanted is None:
        return Verdict(record=record, why="the run wants no such worker, or keeps no jobs (rejoin_seconds)")
    if record.name in stopped:
        return Verdict(record=record, why="its former home was about to end it")
    why = _find_obstacle(record, alive) or _find_difference(record.traits, wanted)
    return Verdict(record=record, why=why) if why else Verdict(record=record, row=alive[0])


def _find_obstacle(record: JobRecord, alive: Sequence[JobRow]) -> str:
    if not alive:
        return "it is not in the queue any more"
    # Two jobs of one name, or another number: the record does not identify the job.
    if len(alive) > 1 or record.job not in (None, alive[0].job):
        return f"its name is that of {', '.join(f'job {row.job}' for row in alive)}"
    row = alive[0]
    # A COMPLETING job counts as running, but its processes are ending.
    is_certain = row.course in (Course.WAITING, Course.RUNNING) and row.state != "COMPLETING"
    return "" if is_certain else f"it is {row.state}"


def _find_difference(traits: Traits | None, wanted: Traits) -> str:
    if traits is None:
        return "it was submitted to end with its home"
    differing = sorted(name for name in {*traits, *wanted} if traits.get(name) != wanted.get(name))
    return f"it would be submitted with other {', '.join(differing)} now" if differing else ""


def _age(verdict: Verdict) -> tuple[float, int, str]:
    return verdict.record.created_at, verdict.record.life, verdict.record.name


def _digest(text: str) -> str:
    return sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]
