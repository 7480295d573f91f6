"""Taking over the jobs of a former controller, from a scripted cluster; a real one is in ``successors``."""

from __future__ import annotations

import pytest
from tests.schedulers.slurm.scripted import commands

from areal_actors.errors import SchedulerError
from areal_actors.schedulers.bootstrap import confirm_release
from areal_actors.schedulers.slurm.files import JobRecord, SlurmFiles
from areal_actors.schedulers.slurm.settings import SlurmConfig
from areal_actors.schedulers.slurm.takeover import take_over

pytestmark = pytest.mark.anyio

RUN = "aa-0123456789abcdef"
TRAITS = {"--time": "60"}
SQUEUE = 'cat "${0%/*}/rows"'
SCANCEL = 'for word in "$@"; do sed -i "/^$word|/d" "${0%/*}/rows"; done; echo "$@" >>"$0.said"'
SCONTROL = 'echo "JobId=1 JobState=RUNNING ExitCode=0:0 Restarts=1"'


def record(worker, job, *, num_tasks=1, traits=TRAITS):
    """Of a former controller."""
    name = f"{RUN}-{worker}.1000"
    return JobRecord(
        name=name, worker=worker, life=1000, created_at=1.0, job=job, num_tasks=num_tasks, traits=dict(traits)
    )


class Former:
    """What a former controller has left, and the cluster where its jobs are."""

    def __init__(self, directory, *records, states, **programs):
        self.files = SlurmFiles(path=directory / "slurm")
        self.files.create()
        for one in records:
            self.files.write_record(one)
        self.programs = directory / "bin"
        self.programs.mkdir()
        rows = (
            f"{one.job}|{one.name}|{state}|n1|N/A|N/A|1:00|None\n" for one, state in zip(records, states, strict=True)
        )
        (self.programs / "rows").write_text("".join(rows))
        self.commands = commands(
            self.programs, **({"squeue": SQUEUE, "scancel": SCANCEL, "scontrol": SCONTROL} | programs)
        )
        self.epoch = self.files.begin_epoch()

    def let_go(self, one, *, restarts=1, rank=0, epoch=None):
        """A process of a job does."""
        environment = {"SLURM_RESTART_COUNT": str(restarts), "SLURM_PROCID": str(rank)}
        confirm_release(self.files.path, one.name, self.epoch if epoch is None else epoch, environment)

    async def hand_over(self, *workers, **settings):
        """What the next controller keeps, and which jobs it has cancelled."""
        config = SlurmConfig(**({"rejoin_seconds": 1.0} | settings))
        wanted = dict.fromkeys(workers, TRAITS)
        kept = await take_over(self.files, self.commands, config, epoch=self.epoch, wanted=wanted)
        said = self.programs / "scancel.said"
        cancelled = {line for line in said.read_text().splitlines() if line.isdecimal()} if said.exists() else set()
        return kept, cancelled


async def test_what_waits_and_what_has_let_go_is_kept(tmp_path):
    """With its number and its restarts; all else has been cancelled, and its secret is gone."""
    waits, free, busy, other = (record(name, job) for job, name in enumerate(("a", "b", "c", "d"), start=1))
    former = Former(tmp_path, waits, free, busy, other, states=["PENDING", "RUNNING", "RUNNING", "RUNNING"])
    former.let_go(free)
    kept, cancelled = await former.hand_over("a", "b", "c")

    assert {"a", "b"} == kept.keys()
    assert [(1, 1), (2, 1)] == [(kept[name].record.job, kept[name].num_restarts) for name in ("a", "b")]
    assert {"3", "4"} == cancelled
    ended = {one.worker for one in former.files.read_records() if one.ended is not None}
    assert {"c", "d"} == ended
    assert former.files.is_stopped(busy.name)
    assert not former.files.is_stopped(free.name)


async def test_a_gang_is_kept_when_all_of_this_start_have_let_go(tmp_path):
    """A process of an earlier start, or one that spoke to an earlier controller, is none of them."""
    whole, half, late = (record(name, job, num_tasks=2) for job, name in enumerate(("a", "b", "c"), start=1))
    former = Former(tmp_path, whole, half, late, states=["RUNNING"] * 3)
    for rank in (0, 1):
        former.let_go(whole, rank=rank)
        former.let_go(half, restarts=rank, rank=rank)
        former.let_go(late, rank=rank, epoch=former.epoch - rank)
    kept, cancelled = await former.hand_over("a", "b", "c")

    assert {"a"} == kept.keys()
    assert {"2", "3"} == cancelled


async def test_where_no_jobs_are_kept_the_queue_is_not_asked_what_they_are(tmp_path):
    """All are ended, as without a word from the cluster."""
    one = record("a", 1)
    former = Former(tmp_path, one, states=["PENDING"])
    kept, cancelled = await former.hand_over(rejoin_seconds=0.0)

    assert {} == kept
    assert {"1"} == cancelled


async def test_a_cluster_that_does_not_answer_is_no_reason_to_take_or_to_give_up(tmp_path):
    """It is said, after a while."""
    former = Former(tmp_path, record("a", 1), states=["PENDING"], squeue="echo 'Unable to contact' >&2; exit 1")
    with pytest.raises(SchedulerError, match="Unable to contact"):
        await former.hand_over("a", cancel_timeout_seconds=0.1)

    assert [None] == [one.ended for one in former.files.read_records()]
