"""Take over the jobs of a former controller: keep those that are wanted unchanged, and end all others.

A job is kept if the same job would be submitted now, word for word, and if its name identifies it uniquely. Everything
that was decided at submission is on its record, as its traits. Decisions made when the worker starts, such as what it
trains, are not traits, because its role starts afresh with every controller.

A waiting job only needs another address. A running job has processes that know the former controller and may be writing
a checkpoint at this moment: it is kept if each of them has released its role (``schedulers.bootstrap``), and ended
otherwise. When the takeover is complete, no process that a former controller started is doing any work.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from hashlib import sha256

import anyio
from anyio import to_thread
from attrs import evolve, frozen

from areal_actors.errors import SchedulerError
from areal_actors.lib.telemetry import get_logger
from areal_actors.schedulers.bootstrap import count_releases
from areal_actors.schedulers.slurm.commands import SlurmCommands
from areal_actors.schedulers.slurm.files import JobRecord, SlurmFiles
from areal_actors.schedulers.slurm.queue import JobPhase, JobRow
from areal_actors.schedulers.slurm.script import JobRequest, create_arguments, render_script
from areal_actors.schedulers.slurm.settings import SlurmConfig

__all__ = [
    "KeptJob",
    "Traits",
    "Verdict",
    "cancel_records",
    "judge",
    "take_over",
    "traits_of",
]

_log = get_logger(__name__)

_CANCEL_POLL_SECONDS = 0.3
_ASK_AGAIN_LOOKS = 30


async def cancel_records(
    files: SlurmFiles,
    commands: SlurmCommands,
    *,
    timeout_seconds: float,
    records: Sequence[JobRecord] | None = None,
) -> tuple[JobRecord, ...]:
    """End every job of ``files`` that is not known to have ended, and return their records, closed. Safe to repeat.

    Args:
        files: the files of the run.
        commands: the cluster.
        timeout_seconds: how long the jobs may take to end.
        records: end only these.

    Raises:
        SchedulerError: some jobs still exist, or the cluster does not answer.
    """
    if records is None:
        records = await to_thread.run_sync(files.read_records)
    records = [one for one in records if one.ended is None]
    for record in records:
        # Before any cancellation: a job that starts meanwhile, or asks for a requeue, must see the mark.
        await to_thread.run_sync(files.mark_stopped, record.name)
    left = {record.name: record for record in records}
    why = ""
    with anyio.move_on_after(timeout_seconds):
        num_looks = 0
        while left:
            try:
                for record in left.values() if num_looks % _ASK_AGAIN_LOOKS == 0 else ():
                    if record.job is not None:
                        await commands.cancel(record.job)
                    await commands.cancel_named(record.name)
                rows = await commands.list_jobs(list(left))
            except SchedulerError as error:
                why = str(error)
            else:
                num_looks += 1
                why = ""
                await _close(files, left, rows)
            if left:
                await anyio.sleep(_CANCEL_POLL_SECONDS)
    if left:
        raise SchedulerError(f"{len(left)} jobs may still run ({', '.join(left)}): {why or 'they do not end'}")
    return tuple(evolve(record, ended="cancelled") for record in records)


async def _close(files: SlurmFiles, left: dict[str, JobRecord], rows: Sequence[JobRow]) -> None:
    """Close the records of jobs that have ended, and remove them from ``left``."""
    for name, record in list(left.items()):
        states = [row.phase for row in rows if row.name == name]
        # If the cluster restarts a doubtful job, its stop mark prevents it from doing anything.
        if all(state in (JobPhase.ENDED, JobPhase.UNCERTAIN) for state in states):
            ended = next((row.state for row in rows if row.name == name), "cancelled")
            await to_thread.run_sync(files.write_record, evolve(record, ended=f"found and ended: {ended}"))
            await to_thread.run_sync(files.remove_bootstrap, name)
            del left[name]


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
    by_age = sorted(verdicts, key=lambda one: (one.record.created_at, one.record.life, one.record.name))
    newest = {one.record.worker: one for one in by_age if not one.why}
    return tuple(
        one
        if one.why or newest[one.record.worker] is one
        else Verdict(record=one.record, why="a later job of its worker is kept")
        for one in verdicts
    )


def _judge_one(record: JobRecord, rows: Sequence[JobRow], wanted: Traits | None, stopped: Collection[str]) -> Verdict:
    alive = [row for row in rows if row.name == record.name and row.phase is not JobPhase.ENDED]
    traits = record.traits or {}
    differing = sorted(name for name in {*traits, *(wanted or {})} if traits.get(name) != (wanted or {}).get(name))
    if wanted is None:
        why = "the run wants no such worker, or keeps no jobs (rejoin_seconds)"
    elif record.name in stopped:
        why = "its former controller was about to end it"
    elif not alive:
        why = "it is not in the queue any more"
    elif len(alive) > 1 or record.job not in (None, alive[0].job):
        # Two jobs of one name, or another number: the record does not identify the job.
        why = f"its name is that of {', '.join(f'job {row.job}' for row in alive)}"
    elif alive[0].phase not in (JobPhase.WAITING, JobPhase.RUNNING) or alive[0].state == "COMPLETING":
        # A COMPLETING job counts as running, but its processes are ending.
        why = f"it is {alive[0].state}"
    elif record.traits is None:
        why = "it was submitted to end with its controller"
    elif differing:
        why = f"it would be submitted with other {', '.join(differing)} now"
    else:
        return Verdict(record=record, row=alive[0])
    return Verdict(record=record, why=why)


def _digest(text: str) -> str:
    return sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]


_HANDOVER_POLL_SECONDS = 0.5


@frozen(kw_only=True)
class KeptJob:
    """A job that was kept, until its worker is placed."""

    record: JobRecord
    row: JobRow
    num_restarts: int
    """How often the cluster had restarted the job."""


async def take_over(
    files: SlurmFiles, commands: SlurmCommands, config: SlurmConfig, *, epoch: int, wanted: Mapping[str, Traits]
) -> dict[str, KeptJob]:
    """Decide about every job on record. Return the jobs that are kept, by worker; all others have ended.

    Args:
        files: the files of the run, whose ``epoch`` has begun.
        commands: the cluster.
        config: settings; after ``rejoin_seconds``, processes that have released their role exit. At most half of it is
            spent waiting for processes that have not.
        epoch: the epoch of this controller.
        wanted: the traits of what would be submitted now, by worker.

    Raises:
        SchedulerError: the cluster does not answer, or jobs that are not kept do not end.
    """
    records = [one for one in await to_thread.run_sync(files.read_records) if one.ended is None]
    stopped = {one.name for one in records if await to_thread.run_sync(files.is_stopped, one.name)}
    if not records:
        return {}
    # If no worker is wanted, all jobs are ended anyway, and the queue need not be read.
    names, seconds = [one.name for one in records], config.cancel_timeout_seconds
    rows = await commands.wait_for_jobs(names, deadline=anyio.current_time() + seconds) if wanted else ()
    verdicts = judge(records, rows, wanted, stopped=stopped)
    _log_ended(verdicts)
    ended = [one.record for one in verdicts if one.why]
    # Half of the time, so that processes that have released their role are still waiting afterwards.
    deadline = anyio.current_time() + config.rejoin_seconds / 2
    await cancel_records(files, commands, records=ended, timeout_seconds=config.cancel_timeout_seconds)
    waiting = _Handover(files, commands, epoch, [one for one in verdicts if not one.why])
    await waiting.run(deadline)
    _log_ended(waiting.lost)
    lost = [one.record for one in waiting.lost]
    await cancel_records(files, commands, records=lost, timeout_seconds=config.cancel_timeout_seconds)
    for one in waiting.kept:
        _log.info("job_kept", job=one.row.job, worker=one.record.worker, state=one.row.state, nodes=one.row.nodes)
    return {one.record.worker: one for one in waiting.kept}


def _log_ended(verdicts: Sequence[Verdict]) -> None:
    for one in verdicts:
        if one.why:
            job = one.record.job or one.record.name
            _log.info("job_not_kept", job=job, worker=one.record.worker, reason=one.why)


class _Handover:
    """Jobs to be kept, until each of them has released its role or is lost."""

    def __init__(self, files: SlurmFiles, commands: SlurmCommands, epoch: int, verdicts: Sequence[Verdict]) -> None:
        self.kept: list[KeptJob] = []
        self.lost: list[Verdict] = []
        self._files, self._commands, self._epoch = files, commands, epoch
        self._awaited = {one.record.name: one for one in verdicts}

    async def run(self, deadline: float) -> None:
        """Poll until no job is awaited any longer or the deadline has passed; jobs still awaited are lost."""
        why = "it has not released its former controller's work"
        while self._awaited:
            try:
                await self._look()
            except SchedulerError as error:
                why = str(error)
            if anyio.current_time() >= deadline:
                break
            if self._awaited:
                await anyio.sleep(_HANDOVER_POLL_SECONDS)
        self.lost += [evolve(one, why=why) for one in self._awaited.values()]

    async def _look(self) -> None:
        seen = await self._commands.list_jobs(list(self._awaited))
        rows = {row.name: row for row in seen if row.phase is not JobPhase.ENDED}
        releases = await to_thread.run_sync(count_releases, self._files.path, self._epoch)
        for name, verdict in list(self._awaited.items()):
            row = rows.get(name)
            if row is None or row.phase not in (JobPhase.WAITING, JobPhase.RUNNING) or row.state == "COMPLETING":
                self._awaited.pop(name)
                self.lost.append(evolve(verdict, why="it has ended" if row is None else f"it is {row.state}"))
            elif row.phase is JobPhase.WAITING or any(job == name for job, _ in releases):
                # Only slurmctld knows the number of the current run. Confirmations of earlier runs do not count.
                report = await self._commands.describe(row.job)
                if report is None:
                    continue
                num_restarts = report.exit.restarts
                if row.phase is JobPhase.WAITING or releases.get((name, num_restarts), 0) >= verdict.record.num_tasks:
                    record = evolve(verdict.record, job=row.job)
                    self.kept.append(KeptJob(record=record, row=row, num_restarts=num_restarts))
                    self._awaited.pop(name)
