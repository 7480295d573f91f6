"""What Slurm prints, as values: recorded lines, every known state, and garbage."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.schedulers.slurm.queue import (
    ExitStatus,
    JobPhase,
    JobRow,
    parse_exit_record,
    parse_job,
    parse_queue,
    parse_submitted,
    phase_of_state,
)

# As printed by Slurm 22.05.8.
QUEUE = """\
5|aa-0123456789abcdef-generation-1.0|CANCELLED|slx01|None
7|aa-0123456789abcdef-trainer.2|PENDING||Resources
8|x|RUNNING|slx[01-02]|None
9|x|PENDING||Nodes required for job are DOWN, DRAINED | or reserved
"""
JOB = (
    "JobId=6 JobName=t.sh UserId=root(0) GroupId=root(0) MCS_label=N/A JobState={state} Reason=None Dependency=(null) "
    "Requeue=0 Restarts=2 BatchFlag=1 Reboot=0 ExitCode={code} RunTime=00:00:01 Partition=main BatchHost=slx01"
)
STATES = {
    JobPhase.WAITING: "PENDING CONFIGURING REQUEUED REQUEUE_HOLD REQUEUE_FED SPECIAL_EXIT",
    JobPhase.RUNNING: "RUNNING SUSPENDED COMPLETING RESIZING SIGNALING STAGE_OUT STOPPED",
    JobPhase.ENDED: "COMPLETED CANCELLED FAILED TIMEOUT DEADLINE BOOT_FAIL OUT_OF_MEMORY",
    JobPhase.UNCERTAIN: "NODE_FAIL PREEMPTED REVOKED",
    JobPhase.UNKNOWN: "LEVITATING",
}


def test_recorded_lines_are_read():
    """Every column; a reason may hold anything."""
    rows = parse_queue(QUEUE)

    assert [5, 7, 8, 9] == [row.job for row in rows]
    assert JobRow(job=7, name="aa-0123456789abcdef-trainer.2", state="PENDING", reason="Resources") == rows[1]
    assert "slx[01-02]" == rows[2].nodes
    assert "Nodes required for job are DOWN, DRAINED | or reserved" == rows[3].reason


@pytest.mark.parametrize(("state", "phase"), [(s, c) for c, states in STATES.items() for s in states.split()])
def test_every_base_state_has_a_meaning(state, phase):
    """Also with what sacct puts behind it."""
    assert phase is phase_of_state(state)
    assert phase is phase_of_state(f"{state}+")
    assert phase is phase_of_state(f"{state} by 0")


@given(text=st.text())
def test_garbage_never_raises(text):
    """Whatever is printed, there is an answer."""
    parse_queue(text)
    parse_submitted(text)
    parse_job(text)
    parse_exit_record(text)

    assert phase_of_state(text) in JobPhase


_fields = st.text(
    st.characters(codec="ascii", exclude_characters="|\r\n\x0b\x0c\x1c\x1d\x1e\x85", categories=["L", "N"])
)


@given(rows=st.lists(st.tuples(st.integers(0, 10**9), *([_fields] * 4))), noise=st.lists(st.text("ab|[]", max_size=9)))
def test_written_rows_are_parsed(rows, noise):
    """Rows come back as they are, whatever lies between them."""
    lines = ["|".join(map(str, row)) for row in rows]

    found = parse_queue("\n".join([*noise, *lines]))

    assert [(row[0], row[1], row[4]) for row in rows] == [(row.job, row.name, row.reason) for row in found]


@pytest.mark.parametrize(
    ("said", "job"),
    [
        ("31", 31),
        ("31;north", 31),
        ("sbatch: a site's greeting\n32\n", 32),
        ("", None),
        ("Submitted batch job 7", None),
    ],
)
def test_number_of_a_job_is_found(said, job):
    """The last line counts, up to the name of the cluster."""
    assert job == parse_submitted(said)


@pytest.mark.parametrize(
    ("state", "printed", "code"),
    [
        ("FAILED", "3:0", 3),
        ("FAILED", "0:9", -9),
        ("COMPLETED", "0:0", 0),
        ("FAILED", "0:53", -53),
        ("FAILED", "143:0", -15),
    ],
)
def test_exit_code_of_a_job_is_parsed(state, printed, code):
    """Status and signal, and the count of restarts."""
    found = parse_job(JOB.format(state=state, code=printed))

    assert ExitStatus(code=code, restarts=2, state=state) == found


def test_unknown_text_is_not_a_job():
    """Also if the name of a job looks like one."""
    assert parse_job("slurm_load_jobs error: Invalid job id specified") is None
    assert parse_job("JobName=ExitCode=0:0") is None


def test_record_of_the_script_is_read():
    """Status, time, node; a status above 128 is a signal."""
    assert ExitStatus(code=75, restarts=1) == parse_exit_record("75 1795267689 n1\n", restarts=1)
    assert ExitStatus(code=-9) == parse_exit_record("137 1795267689")
    assert parse_exit_record("") is None
