"""Parsers for the output of Slurm's commands. Pure; input that cannot be parsed is skipped, or becomes UNKNOWN.

The queue is read in a custom format with ``squeue -o``, which has been stable for many versions, whereas Slurm's JSON
changes with each. Names of our jobs contain none of the separators.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum

from attrs import frozen

__all__ = [
    "QUEUE_FORMAT",
    "Course",
    "ExitStatus",
    "JobReport",
    "JobRow",
    "course_of",
    "parse_exit_record",
    "parse_job",
    "parse_queue",
    "parse_submitted",
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
    rows = [line.split("|", _NUM_COLUMNS - 1) for line in text.splitlines()]
    return tuple(_row(row) for row in rows if len(row) == _NUM_COLUMNS and re.fullmatch(r"[0-9]{1,18}", row[0].strip()))


def _row(columns: Sequence[str]) -> JobRow:
    job, name, state, nodes, start, end, left, reason = (column.strip() for column in columns)
    return JobRow(
        job=int(job), name=name, state=state, nodes=nodes, start=start, end=end, time_left=left, reason=reason
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
