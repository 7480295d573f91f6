"""``areal-actors slurm``: on records, with a cluster that is a few small scripts."""

from __future__ import annotations

import json
import os

import pytest
from click.testing import CliRunner

from areal_actors.cli import cli
from areal_actors.schedulers.slurm import JobRecord, SlurmFiles


def invoke(*arguments, path):
    return CliRunner().invoke(cli, ["slurm", *map(str, arguments)], env={"PATH": str(path)})


@pytest.fixture
def runs(tmp_path):
    """Two runs: one with a job that runs and one that has ended, one whose job number is unknown."""
    root = tmp_path / "runs"
    records = {
        "sums/a": [("trainer", 7, None), ("proxy", 6, "job 6 ended as COMPLETED")],
        "sums/b": [("trainer", None, None)],
    }
    for run, jobs in records.items():
        files = SlurmFiles(path=root / run / "slurm")
        files.create()
        for worker, job, ended in jobs:
            name = f"aa-{'0' * 15}{run[-1]}-{worker}.0"
            files.write_record(
                JobRecord(name=name, worker=worker, life=0, created_at=1795267689.0, job=job, ended=ended)
            )
    return root


@pytest.fixture
def programs(tmp_path):
    """A cluster with job 7, until it is cancelled."""
    directory = tmp_path / "bin"
    directory.mkdir()
    rows = f"7|aa-{'0' * 15}a-trainer.0|$state|n1|||1:00|None\\n"
    scripts = {
        "squeue": f'state=RUNNING; [ -e {directory}/gone ] && state=CANCELLED; printf "{rows}"',
        "scancel": f'echo "$@" >>{directory}/said; case "$*" in 7) >{directory}/gone;; esac',
        "sbatch": "exit 1",
        "scontrol": "exit 1",
        "sinfo": "exit 1",
    }
    for name, script in scripts.items():
        (directory / name).write_text(f"#!/bin/bash\nPATH={os.environ['PATH']}\n{script}\n")
        (directory / name).chmod(0o755)
    return directory


def test_slurm_reap_ends_jobs_of_killed_runs_once(runs, programs):
    """By number, and by exact name where no number is known; the second time there is nothing to do."""
    first = invoke("reap", runs, path=programs)
    second = invoke("reap", runs, path=programs)

    assert first.exit_code == 0, first.output
    assert "Ended: 7 (trainer)" in first.stdout
    assert "There was nothing to end." in second.stdout
    said = (programs / "said").read_text().splitlines()
    assert said[0] == "7"
    assert any(line.endswith(f"--name=aa-{'0' * 15}b-trainer.0") for line in said)
    assert (runs / "sums" / "b" / "slurm" / "stop").iterdir()


def test_slurm_cancel_ends_jobs_of_live_runs_and_reap_does_not(runs, programs):
    """Its controller holds a lock."""
    with SlurmFiles(path=runs / "sums" / "a" / "slurm").hold():
        reaped = invoke("reap", runs / "sums" / "a", "--json", path=programs)
        cancelled = invoke("cancel", runs / "sums" / "a", "--json", path=programs)

    assert [] == json.loads(reaped.stdout)
    assert [7] == [job["job"] for job in json.loads(cancelled.stdout)]


def test_slurm_is_named_if_it_is_not_installed(runs, tmp_path):
    """In one line, and nothing is done."""
    done = invoke("reap", runs, path=tmp_path)

    assert done.exit_code == 1
    assert "Slurm is not installed here" in done.stderr
    assert "Traceback" not in done.output
