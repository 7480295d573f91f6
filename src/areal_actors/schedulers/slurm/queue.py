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

__all__ = [
    "QUEUE_FORMAT",
    "Course",
    "ExitStatus",
    "JobReport",
    "JobRow",
    "JobView",
    "course_of",
    "observe",
    "parse_exit_record",
    "parse_job",
    "parse_queue",
    "parse_submitted",
    "to_status",
]

QUEUE_FORMAT = "%i|%j|%T|%N|%S|%e|%L|%r"
"""Job, name, state, nodes, start, end, time left, reason. The reason comes last because it may contain separators."""

_NUM_COLUMNS = QUEUE_FORMAT.count("|") + 1


class Course(StrEnum):
    """The meaning of a job's state for a caller that waits for the job."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"
    DOUBTFUL = "doubtful"
    """The job has ended, unless the cluster is about to start it again."""
    UNKNOWN = "unknown"
    """A state that this module does not know."""


_WORDS = {
    Course.WAITING: "PENDING CONFIGURING REQUEUED REQUEUE_HOLD REQUEUE_FED SPECIAL_EXIT RESV_DEL_HOLD",
    Course.RUNNING: "RUNNING SUSPENDED COMPLETING RESIZING SIGNALING STAGE_OUT STOPPED POWER_UP_NODE",
    Course.ENDED: "COMPLETED CANCELLED FAILED TIMEOUT DEADLINE BOOT_FAIL OUT_OF_MEMORY LAUNCH_FAILED",
    Course.DOUBTFUL: "NODE_FAIL PREEMPTED REVOKED RECONFIG_FAIL",
}
_COURSES = {word: course for course, words in _WORDS.items() for word in words.split()}
_HELD = ("launch failed requeued held", "jobholdmaxrequeue")
"""Reasons with which Slurm itself holds a job. A person's hold has another reason, and only that person may end it."""


def course_of(state: str) -> Course:
    """Return the meaning of a state: its first word counts (``CANCELLED by 0``), without a ``+`` at its end."""
    words = state.split()
    return _COURSES.get(words[0].rstrip("+").upper(), Course.UNKNOWN) if words else Course.UNKNOWN


@frozen(kw_only=True)
class JobRow:
    """One line of the queue."""

    job: int
    name: str
    state: str
    nodes: str = ""
    start: str = ""
    end: str = ""
    time_left: str = ""
    reason: str = ""

    @property
    def course(self) -> Course:
        """Return the meaning of the job's state."""
        return course_of(self.state)

    @property
    def is_held_back(self) -> bool:
        """Return whether Slurm holds the job after a failed launch; it then waits until it is released."""
        return self.course is Course.WAITING and self.reason.replace("_", " ").lower().startswith(_HELD)


def parse_queue(text: str) -> tuple[JobRow, ...]:
    """Parse the output of ``squeue -h -o QUEUE_FORMAT``. Lines in another format are skipped."""
    rows = ([column.strip() for column in line.split("|", _NUM_COLUMNS - 1)] for line in text.splitlines())
    return tuple(
        JobRow(job=int(job), name=name, state=state, nodes=nodes, start=start, end=end, time_left=left, reason=reason)
        for job, name, state, nodes, start, end, left, reason in (row for row in rows if len(row) == _NUM_COLUMNS)
        if re.fullmatch(r"[0-9]{1,18}", job)
    )


def parse_submitted(text: str) -> int | None:
    """Return the job number from the last line of ``sbatch --parsable``, before the name of the cluster."""
    lines = text.split("\n")
    found = [line.partition(";")[0].strip() for line in lines if line.strip()]
    return int(found[-1]) if found and re.fullmatch(r"[0-9]{1,18}", found[-1]) else None


@frozen(kw_only=True)
class ExitStatus:
    """How a job ended. ``code`` is negative for a signal; ``restarts`` is the number of restarts before this run."""

    code: int
    restarts: int = 0
    node: str = ""


@frozen(kw_only=True)
class JobReport:
    """The state of a job as reported by slurmctld."""

    state: str
    exit: ExitStatus
    reason: str = ""

    @property
    def course(self) -> Course:
        """Return the meaning of the job's state."""
        return course_of(self.state)


def parse_job(text: str) -> JobReport | None:
    """Parse ``scontrol show job --oneliner``. Returns ``None`` for other text.

    Its ``ExitCode`` has the form status:signal.
    """
    # Match only at the start of a word, because names of jobs may contain the same text.
    found = dict(re.findall(r"(?<!\S)(JobState|ExitCode|Restarts|BatchHost|Reason)=(\S*)", text))
    code = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", found.get("ExitCode", ""))
    if code is None or "JobState" not in found:
        return None
    restarts = found.get("Restarts", "")
    status = ExitStatus(
        code=-int(code[2]) if int(code[2]) else _signed(int(code[1])),
        restarts=int(restarts) if re.fullmatch(r"[0-9]{1,9}", restarts) else 0,
        node=found.get("BatchHost", ""),
    )
    return JobReport(state=found["JobState"], exit=status, reason=found.get("Reason", ""))


def parse_exit_record(text: str, *, restarts: int = 0) -> ExitStatus | None:
    """Parse the exit record of a job's script: status, time, node. Returns ``None`` for other text."""
    words = text.split()
    if not words or not re.fullmatch(r"[0-9]{1,3}", words[0]):
        return None
    return ExitStatus(code=_signed(int(words[0])), restarts=restarts, node=words[2] if len(words) > 2 else "")  # noqa: PLR2004


def _signed(status: int) -> int:
    """Return the negative signal number for a shell's status of 128 + N, and other statuses unchanged."""
    return 128 - status if 128 < status <= 128 + 64 else status  # noqa: PLR2004


_STATES = {
    Course.WAITING: PlacementState.PENDING,
    Course.RUNNING: PlacementState.RUNNING,
    Course.ENDED: PlacementState.ENDED,
    Course.DOUBTFUL: PlacementState.UNKNOWN,
    Course.UNKNOWN: PlacementState.UNKNOWN,
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
    course: Course = Course.WAITING
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
    if view.course is Course.ENDED:
        return view
    if row is None or row.course is Course.DOUBTFUL:
        since = now if view.doubtful_since is None else view.doubtful_since
        # Absence from the queue alone never ends a job; SlurmPlacement looks for other evidence.
        is_over = row is not None and now - since >= patience
        return evolve(
            view,
            course=Course.ENDED if is_over else Course.DOUBTFUL,
            state="" if row is None else row.state,
            nodes=view.nodes if row is None else row.nodes or view.nodes,
            reason="it is not in the queue" if row is None else row.reason,
            doubtful_since=since,
        )
    # Slurm does not list the number of restarts; a job that waits again after it ran was restarted.
    is_restart = row.course is Course.WAITING and view.has_run
    return JobView(
        job=view.job,
        course=row.course,
        state=row.state,
        nodes=row.nodes if row.course is not Course.WAITING else "",
        reason=row.reason,
        has_run=row.course is Course.RUNNING or (view.has_run and not is_restart),
        num_restarts=view.num_restarts + is_restart,
    )


def to_status(view: JobView) -> PlacementStatus:
    """Return the view as the status that all schedulers share, without how the job ended."""
    where = f"job {view.job}" + (f" on {view.nodes}" if view.nodes else "")
    reason = "" if view.reason in ("None", "(null)") else view.reason
    advice = next((text for word, text in _ADVICE.items() if reason.startswith(word)), "")
    said = f"{reason} ({advice})" if advice else reason
    is_plain = view.course in (Course.WAITING, Course.RUNNING) and view.state in ("PENDING", "RUNNING", "")
    return PlacementStatus(
        state=_STATES[view.course],
        where=where,
        reason=said if is_plain else ": ".join(part for part in (view.state, said) if part),
        is_requeued=view.course is Course.WAITING and view.num_restarts > 0,
    )
