"""What killed runs have left on a cluster is ended run by run, whatever becomes of one of them."""

from __future__ import annotations

import os

import pytest
from tests.schedulers.slurm.scripted import commands

from areal_actors.errors import SchedulerError
from areal_actors.run import slurm
from areal_actors.schedulers.slurm.files import JobRecord, SlurmFiles

SQUEUE = 'case "$*" in *stubborn*) echo "7|stubborn|RUNNING|n1|x|x|x|None";; esac'


@pytest.mark.parametrize("spares_running", [False, True])
def test_job_that_does_not_end_delays_no_other_run(tmp_path, monkeypatch, spares_running):
    """The others are ended nevertheless, and the error names what is left."""
    programs = tmp_path / "bin"
    programs.mkdir()
    commands(programs, squeue=SQUEUE)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setattr(slurm, "_CANCEL_SECONDS", 0.5)
    runs = {}
    for number, name in enumerate(("stubborn", "other"), start=7):
        runs[name] = SlurmFiles(path=tmp_path / "runs" / f"{number}" / "slurm")
        runs[name].create()
        runs[name].write_record(JobRecord(name=name, worker="x", life=0, created_at=0.0, job=number))

    with pytest.raises(SchedulerError, match=r"1 jobs may still run \(stubborn\)"):
        slurm.cancel_jobs(tmp_path / "runs", spares_running=spares_running)
    assert [None] != [record.ended for record in runs["other"].read_records()]
