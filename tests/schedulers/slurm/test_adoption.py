"""Which jobs of a former controller the next one keeps: laws of the decision, for all records and queues."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.schedulers.base import Resources
from areal_actors.schedulers.slurm import SlurmConfig
from areal_actors.schedulers.slurm.files import JobRecord
from areal_actors.schedulers.slurm.queue import JobPhase, JobRow
from areal_actors.schedulers.slurm.script import JobRequest
from areal_actors.schedulers.slurm.takeover import judge, traits_of

REQUEST = JobRequest(
    run="0123456789abcdef",
    worker="generation-1",
    life=1000,
    directory=Path("/shared/runs/sums/slurm"),
    log=Path("/shared/runs/sums/logs/generation-1.log"),
    working_directory=Path("/home/ada"),
)
SITE = SlurmConfig(partition="gpu", extra_arguments=("--licenses=x:2", "--licenses=y"))
WORKERS = ("trainer-0", "generation-0", "generation-1")
STATES = (
    "PENDING",
    "CONFIGURING",
    "RUNNING",
    "COMPLETING",
    "COMPLETED",
    "FAILED",
    "NODE_FAIL",
    "SUSPENDED",
    "LEVITATING",
)
TRAITS = ({}, {"--time": "60"}, {"--time": "90", "script": "x"})

records = st.builds(
    JobRecord,
    name=st.integers(0, 5).map(lambda number: f"aa-{number}"),
    worker=st.sampled_from(WORKERS),
    life=st.integers(0, 3),
    created_at=st.floats(0, 3),
    job=st.none() | st.integers(1, 4),
    traits=st.none() | st.sampled_from(TRAITS),
)
rows = st.builds(
    JobRow,
    job=st.integers(1, 4),
    name=st.integers(0, 5).map(lambda number: f"aa-{number}"),
    state=st.sampled_from(STATES),
)
cases = st.tuples(
    st.lists(records, unique_by=lambda record: record.name, max_size=6),
    st.lists(rows, max_size=8),
    st.dictionaries(st.sampled_from(WORKERS), st.sampled_from(TRAITS)),
)


@given(case=cases)
def test_each_record_meets_one_fate_and_each_worker_has_one_job(case):
    """Every record is judged once, in order; what is not kept has a reason, and no worker has two."""
    found, seen, wanted = case
    verdicts = judge(found, seen, wanted)
    kept = [one.record.worker for one in verdicts if not one.why]

    assert found == [one.record for one in verdicts]
    assert len(kept) == len(set(kept))
    assert all((one.row is None) == bool(one.why) for one in verdicts)


@given(case=cases)
def test_what_is_kept_is_certain_and_is_what_is_wanted(case):
    """One living job of its name and number, that waits or runs, with the traits of what would be submitted."""
    found, seen, wanted = case
    for one in judge(found, seen, wanted):
        if not one.why:
            (row,) = [row for row in seen if row.name == one.record.name and row.phase is not JobPhase.ENDED]

            assert row == one.row
            assert row.state in ("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED")
            assert one.record.job in (None, row.job)
            assert one.record.traits == wanted[one.record.worker]


@given(case=cases)
def test_nothing_is_given_up_without_need(case):
    """A job that could be kept is, unless a later one of its worker is."""
    found, seen, wanted = case
    alone = {one.record.name for record in found for one in judge([record], seen, wanted) if not one.why}
    kept = {one.record.name: one.record for one in judge(found, seen, wanted) if not one.why}

    assert kept.keys() <= alone
    assert {one.worker for one in found if one.name in alone} == {one.worker for one in kept.values()}
    for one in found:
        if one.name in alone:
            (chosen,) = [record for record in kept.values() if record.worker == one.worker]
            assert (one.created_at, one.life) <= (chosen.created_at, chosen.life)


@given(case=cases, seed=st.integers())
def test_the_order_of_records_and_rows_says_nothing(case, seed):
    """The queue and the directory list them as they like."""
    found, seen, wanted = case
    others, other_rows = list(found), list(seen)
    Random(seed).shuffle(others)
    Random(seed).shuffle(other_rows)
    verdicts = {one.record.name: bool(one.why) for one in judge(found, seen, wanted)}

    assert verdicts == {one.record.name: bool(one.why) for one in judge(others, other_rows, wanted)}


@given(case=cases, stopped=st.sets(st.integers(0, 5).map(lambda number: f"aa-{number}")))
def test_what_was_to_end_ends(case, stopped):
    """What its former controller had begun to end is not kept; another job of its worker may be."""
    found, seen, wanted = case
    kept = {one.record.name for one in judge(found, seen, wanted, stopped=stopped) if not one.why}

    others = [one for one in found if one.name not in stopped]
    assert kept == {one.record.name for one in judge(others, seen, wanted) if not one.why}


@given(case=cases)
def test_where_nothing_is_wanted_everything_ends(case):
    """As for a run that keeps no jobs."""
    found, seen, _ = case

    assert all(one.why for one in judge(found, seen, {}))


def test_the_difference_is_named():
    """Options, script and variables, by name, and no value of a variable."""
    record = JobRecord(
        name="aa", worker="x", life=0, created_at=0.0, job=1, traits={"--time": "1", "$KEY": "2", "a": "b"}
    )
    row = JobRow(job=1, name="aa", state="RUNNING")
    (verdict,) = judge([record], [row], {"x": {"--time": "3", "a": "b", "--mem": "7"}})

    assert "it would be submitted with other $KEY, --mem, --time now" == verdict.why


@pytest.mark.parametrize(
    ("change", "differing"),
    [
        ({}, set()),
        ({"run": "f" * 16, "life": 2000, "avoided": ("n1",)}, set()),
        ({"resources": Resources(cpus=2)}, {"--cpus-per-task", "script"}),
        ({"resources": Resources(gpus=1)}, {"--gpus-per-node"}),
        ({"num_tasks": 2}, {"--ntasks", "--ntasks-per-node", "script"}),
        ({"python": Path("/other/python")}, {"script"}),
        ({"working_directory": Path("/elsewhere")}, {"--chdir"}),
    ],
)
def test_what_is_submitted_anew_with_each_job_is_no_trait(change, differing):
    """Its name, its life, and the nodes that are doubted at the moment; all else is."""
    traits, others = traits_of(REQUEST, SITE, {}), traits_of(evolve(REQUEST, **change), SITE, {})

    assert differing == {name for name in {*traits, *others} if traits.get(name) != others.get(name)}
    assert "x:2,y" == traits["--licenses"]


def test_variables_count_but_for_those_of_a_login():
    """The controller may be started again from another terminal; and what a variable holds is on no record."""
    first = {"PATH": "/bin", "TOKEN": "secret words", "SSH_TTY": "/dev/pts/1", "SHLVL": "1", "TERM": "vt100"}
    second = {"PATH": "/bin", "TOKEN": "secret words", "TMUX": "x", "SHLVL": "2", "PWD": "/"}
    traits = traits_of(REQUEST, SITE, first)

    assert traits == traits_of(REQUEST, SITE, second)
    assert traits != traits_of(REQUEST, SITE, second | {"TOKEN": "others"})
    assert "secret" not in str(traits)
