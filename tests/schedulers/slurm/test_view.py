"""A job as it was seen, look by look: the courses of events that a real cluster has shown, and any other."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from areal_actors.schedulers.base import PlacementState
from areal_actors.schedulers.slurm.queue import JobPhase, JobRow, JobView, observe, to_status

STATES = [
    "PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL",
    "PREEMPTED", "LEVITATING", "",
]  # fmt: skip


def row(state, reason="None", nodes="n1"):
    return JobRow(job=7, name="x", state=state, nodes=nodes, reason=reason)


def seen(*states, patience=10.0):
    """The view after these looks, a second apart; ``None`` is a queue without the job."""
    view = JobView(job=7)
    for now, state in enumerate(states):
        view = observe(view, None if state is None else row(state), now=float(now), patience=patience)
    return view


def test_job_that_runs_and_ends():
    """It waits, runs and ends."""
    assert PlacementState.PENDING is to_status(seen("PENDING")).state
    assert PlacementState.RUNNING is to_status(seen("PENDING", "RUNNING", "COMPLETING")).state
    assert PlacementState.ENDED is to_status(seen("PENDING", "RUNNING", "COMPLETED")).state


def test_requeued_job_counts_as_restart():
    """A job that ran and waits was put back; running again it is a job like any other, and each restart counts."""
    back = to_status(seen("RUNNING", "PENDING", "PENDING"))

    assert back.state is PlacementState.PENDING
    assert back.is_requeued
    assert not to_status(seen("RUNNING", "PENDING", "RUNNING")).is_requeued
    assert 2 == seen("RUNNING", "PENDING", "PENDING", "RUNNING", "PENDING").num_restarts


def test_uncertain_job_is_given_time():
    """A job that lost its node may be back; patience ends it, and absence alone never does."""
    assert PlacementState.UNKNOWN is to_status(seen("RUNNING", "NODE_FAIL", "NODE_FAIL")).state
    assert PlacementState.RUNNING is to_status(seen("RUNNING", "PREEMPTED", "RUNNING")).state
    assert JobPhase.ENDED is seen("RUNNING", "NODE_FAIL", patience=0).phase
    assert JobPhase.ENDED is seen(*["NODE_FAIL"] * 12).phase
    assert PlacementState.UNKNOWN is to_status(seen("RUNNING", *[None] * 99)).state


def test_pending_job_shows_its_reason():
    """In Slurm's word, with what it means."""
    view = observe(JobView(job=7), row("PENDING", "ReqNodeNotAvail, UnavailableNodes:n1", nodes=""), now=0, patience=1)

    assert "ReqNodeNotAvail, UnavailableNodes:n1 (nodes that it needs are drained" in to_status(view).reason
    assert "LEVITATING" in to_status(seen("LEVITATING")).reason
    assert not to_status(seen("RUNNING")).reason


@given(states=st.lists(st.one_of(st.none(), st.sampled_from(STATES))), patience=st.sampled_from([0.0, 3.0, 1e9]))
def test_view_of_a_job_obeys_its_laws(states, patience):
    """An end is final; nothing ends but by a word that says so, or by lasting doubt; restarts never outnumber runs."""
    views = [JobView(job=7)]
    for now, state in enumerate(states):
        views.append(observe(views[-1], None if state is None else row(state), now=float(now), patience=patience))
    for (before, after), state in zip(pairwise(views), states, strict=True):
        if before.phase is JobPhase.ENDED:
            assert before == after
        elif after.phase is JobPhase.ENDED:
            assert state in ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
        assert before.num_restarts <= after.num_restarts <= states.count("RUNNING") + states.count("COMPLETING")
        to_status(after)
