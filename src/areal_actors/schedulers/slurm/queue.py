"""Parsers for the output of Slurm's commands, and the observed state of a job over many listings. Pure.

The queue is read in a custom format with ``squeue -o``, which has been stable for many versions, whereas Slurm's JSON
changes with each. Names of our jobs contain none of the separators. Input that cannot be parsed is skipped, or becomes
UNKNOWN.

A listing contains a line for the job, or none although the queue was read. Uncertain states remain uncertain: a job
that is absent or lost its node may be back in the next listing, and counts as ended only after a time limit.
"""

from __future__ import annotations

import re
from enum import StrEnum

from attrs import evolve, frozen

from areal_actors.schedulers.base import PlacementState, PlacementStatus

QUEUE_FORMAT = "%i|%j|%T|%N|%r"
"""Job, name, state, nodes, reason. The reason comes last because it may contain separators."""

_NUM_COLUMNS = QUEUE_FORMAT.count("|") + 1


class JobPhase(StrEnum):
    """The meaning of a job's state for a caller that waits for the job."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"
    UNCERTAIN = "doubtful"
    """The job has ended, unless the cluster is about to start it again."""
    UNKNOWN = "unknown"
    """A state that this module does not know."""


_WORDS = {
    JobPhase.WAITING: "PENDING CONFIGURING REQUEUED REQUEUE_HOLD REQUEUE_FED SPECIAL_EXIT RESV_DEL_HOLD",
    JobPhase.RUNNING: "RUNNING SUSPENDED COMPLETING RESIZING SIGNALING STAGE_OUT STOPPED POWER_UP_NODE",
    JobPhase.ENDED: "COMPLETED CANCELLED FAILED TIMEOUT DEADLINE BOOT_FAIL OUT_OF_MEMORY LAUNCH_FAILED",
    JobPhase.UNCERTAIN: "NODE_FAIL PREEMPTED REVOKED RECONFIG_FAIL",
}
_PHASES = {word: phase for phase, words in _WORDS.items() for word in words.split()}
_HELD = ("launch failed requeued held", "jobholdmaxrequeue")
"""Reasons with which Slurm itself holds a job. A person's hold has another reason, and only that person may end it."""


def phase_of_state(state: str) -> JobPhase:
    """Return the meaning of a state: its first word counts (``CANCELLED by 0``), without a ``+`` at its end."""
    words = state.split()
    return _PHASES.get(words[0].rstrip("+").upper(), JobPhase.UNKNOWN) if words else JobPhase.UNKNOWN


@frozen(kw_only=True)
class JobRow:
    """One line of the queue."""

    job: int
    name: str
    state: str
    nodes: str = ""
    reason: str = ""

    @property
    def phase(self) -> JobPhase:
        """Return the meaning of the job's state."""
        return phase_of_state(self.state)

    @property
    def is_held_back(self) -> bool:
        """Return whether Slurm holds the job after a failed launch; Slurm itself never releases it."""
        return self.phase is JobPhase.WAITING and self.reason.replace("_", " ").lower().startswith(_HELD)


def parse_queue(text: str) -> tuple[JobRow, ...]:
    """Parse the output of ``squeue -h -o QUEUE_FORMAT``. Lines in another format are skipped."""
    rows = ([column.strip() for column in line.split("|", _NUM_COLUMNS - 1)] for line in text.splitlines())
    return tuple(
        JobRow(job=int(job), name=name, state=state, nodes=nodes, reason=reason)
        for job, name, state, nodes, reason in (row for row in rows if len(row) == _NUM_COLUMNS)
        if re.fullmatch(r"[0-9]{1,18}", job)
    )


def parse_submitted(text: str) -> int | None:
    """Return the job number from the last line of ``sbatch --parsable``, before the name of the cluster."""
    lines = text.split("\n")
    found = [line.partition(";")[0].strip() for line in lines if line.strip()]
    return int(found[-1]) if found and re.fullmatch(r"[0-9]{1,18}", found[-1]) else None


@frozen(kw_only=True)
class ExitStatus:
    """How a job ended, according to its script or, with a ``state``, to slurmctld.

    ``code`` is negative for a signal; ``restarts`` is the number of restarts before this run.
    """

    code: int
    restarts: int = 0
    state: str = ""

    @property
    def phase(self) -> JobPhase:
        """Return the meaning of the job's state."""
        return phase_of_state(self.state)


def parse_job(text: str) -> ExitStatus | None:
    """Parse ``scontrol show job --oneliner``. Returns ``None`` for other text.

    Its ``ExitCode`` has the form status:signal.
    """
    # Match only at the start of a word, because names of jobs may contain the same text.
    found = dict(re.findall(r"(?<!\S)(JobState|ExitCode|Restarts)=(\S*)", text))
    code = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", found.get("ExitCode", ""))
    if code is None or "JobState" not in found:
        return None
    restarts = found.get("Restarts", "")
    return ExitStatus(
        code=-int(code[2]) if int(code[2]) else _signed(int(code[1])),
        restarts=int(restarts) if re.fullmatch(r"[0-9]{1,9}", restarts) else 0,
        state=found["JobState"],
    )


def parse_exit_record(text: str, *, restarts: int = 0) -> ExitStatus | None:
    """Parse the exit record of a job's script: status, time, node. Returns ``None`` for other text."""
    words = text.split()
    if not words or not re.fullmatch(r"[0-9]{1,3}", words[0]):
        return None
    return ExitStatus(code=_signed(int(words[0])), restarts=restarts)


def _signed(status: int) -> int:
    """Return the negative signal number for a shell's status of 128 + N, and other statuses unchanged."""
    return 128 - status if 128 < status <= 128 + 64 else status  # noqa: PLR2004


_STATES = {
    JobPhase.WAITING: PlacementState.PENDING,
    JobPhase.RUNNING: PlacementState.RUNNING,
    JobPhase.ENDED: PlacementState.ENDED,
    JobPhase.UNCERTAIN: PlacementState.UNKNOWN,
    JobPhase.UNKNOWN: PlacementState.UNKNOWN,
}
_ADVICE = {
    "ReqNodeNotAvail": "nodes that it needs are drained, down or reserved",
    "Resources": "it waits for free nodes",
    "Priority": "others come first",
    "BeginTime": "it was put back into the queue, and waits there for a while",
    "launch failed requeued held": "its node could not launch it, and Slurm holds it until it is released",
    "JobHoldMaxRequeue": "nodes could not launch it several times, and Slurm holds it until it is released",
    "JobHeldUser": "held by a user: scontrol release",
    "JobHeldAdmin": "an administrator holds it",
    "PartitionConfig": "no node of the partition has what it asks for, and it would wait for ever",
    "BadConstraints": "no node has what it asks for, and it would wait for ever",
    "PartitionNodeLimit": "it asks for more than the partition has",
    "PartitionTimeLimit": "it asks for more time than the partition allows: scheduler.slurm.time_minutes",
    "AssocGrpGRES": "the account has used up its GPUs",
    "QOSMaxJobsPerUserLimit": "the qos allows no more jobs at once",
}


@frozen(kw_only=True)
class JobView:
    """The observed state of a job.

    ``has_run`` tells whether it has run since it last waited; ``doubtful_since`` is the time at which its state became
    uncertain.
    """

    job: int
    phase: JobPhase = JobPhase.WAITING
    state: str = ""
    nodes: str = ""
    reason: str = ""
    has_run: bool = False
    num_restarts: int = 0
    doubtful_since: float | None = None


def observe(view: JobView, row: JobRow | None, *, now: float, patience: float) -> JobView:
    """Return the view after another queue listing, in which this job has the line ``row``, or none.

    Args:
        view: the view before.
        row: the job's line; ``None`` if the queue was read and has none.
        now: seconds, of any clock.
        patience: how long a job in a doubtful state may take to be started again before it counts as ended.
    """
    if view.phase is JobPhase.ENDED:
        return view
    if row is None or row.phase is JobPhase.UNCERTAIN:
        since = now if view.doubtful_since is None else view.doubtful_since
        # Absence from the queue alone never ends a job; SlurmPlacement looks for other evidence.
        is_over = row is not None and now - since >= patience
        return evolve(
            view,
            phase=JobPhase.ENDED if is_over else JobPhase.UNCERTAIN,
            state="" if row is None else row.state,
            nodes=view.nodes if row is None else row.nodes or view.nodes,
            reason="it is not in the queue" if row is None else row.reason,
            doubtful_since=since,
        )
    # Slurm does not list the number of restarts; a job that waits again after it ran was restarted.
    is_restart = row.phase is JobPhase.WAITING and view.has_run
    return JobView(
        job=view.job,
        phase=row.phase,
        state=row.state,
        nodes=row.nodes if row.phase is not JobPhase.WAITING else "",
        reason=row.reason,
        has_run=row.phase is JobPhase.RUNNING or (view.has_run and not is_restart),
        num_restarts=view.num_restarts + is_restart,
    )


def to_status(view: JobView) -> PlacementStatus:
    """Return the view as the status that all schedulers share, without how the job ended."""
    where = f"job {view.job}" + (f" on {view.nodes}" if view.nodes else "")
    reason = "" if view.reason in ("None", "(null)") else view.reason
    advice = next((text for word, text in _ADVICE.items() if reason.startswith(word)), "")
    said = f"{reason} ({advice})" if advice else reason
    is_plain = view.phase in (JobPhase.WAITING, JobPhase.RUNNING) and view.state in ("PENDING", "RUNNING", "")
    return PlacementStatus(
        state=_STATES[view.phase],
        where=where,
        reason=said if is_plain else ": ".join(part for part in (view.state, said) if part),
        is_requeued=view.phase is JobPhase.WAITING and view.num_restarts > 0,
    )
