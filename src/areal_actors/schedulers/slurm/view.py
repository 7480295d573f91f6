"""The observed state of one job, updated with each queue listing. Pure, so that every sequence can be tested.

A listing contains a line for the job, or none although the queue was read. Uncertain states remain uncertain: a job
that is absent or lost its node may be back in the next listing, and counts as ended only after a time limit.
"""

from __future__ import annotations

from attrs import evolve, frozen

from areal_actors.schedulers.base import PlacementState, PlacementStatus
from areal_actors.schedulers.slurm.queue import Course, JobRow

__all__ = ["JobView", "observe", "to_status"]

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
        return _doubt(view, row, now=now, patience=patience)
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


def _doubt(view: JobView, row: JobRow | None, *, now: float, patience: float) -> JobView:
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


def to_status(view: JobView) -> PlacementStatus:
    """Return the view as the status that all schedulers share, without how the job ended."""
    where = f"job {view.job}" + (f" on {view.nodes}" if view.nodes else "")
    return PlacementStatus(
        state=_STATES[view.course],
        where=where,
        reason=_explain(view),
        is_requeued=view.course is Course.WAITING and view.num_restarts > 0,
    )


def _explain(view: JobView) -> str:
    reason = "" if view.reason in ("None", "(null)") else view.reason
    advice = next((text for word, text in _ADVICE.items() if reason.startswith(word)), "")
    said = f"{reason} ({advice})" if advice else reason
    is_plain = view.course in (Course.WAITING, Course.RUNNING) and view.state in ("PENDING", "RUNNING", "")
    return said if is_plain else ": ".join(part for part in (view.state, said) if part)
