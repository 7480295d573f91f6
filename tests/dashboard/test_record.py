"""The record of a run: what its process writes, and what a reader sees after it is gone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from areal_actors.dashboard import RunDirectory
from areal_actors.dashboard.run_record import RunRecord, follow_record, read_record, write_record
from areal_actors.domain import RunStatus
from areal_actors.lib.locks import hold


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(path=tmp_path)


@pytest.mark.parametrize("status", [status for status in RunStatus if status is not RunStatus.KILLED])
def test_run_record_is_read_as_written(directory, status):
    """While the process lives; its end has a time, and secrets in the reason are shortened."""
    record = RunRecord(status=status, reason="key sk-abcdefghijklmnopqrstuvwxyz012345", is_service=True)
    with hold(directory.lock):
        write_record(directory, record)
        found = read_record(directory)

    assert found is not None
    assert (record.status, record.began, True) == (found.status, found.began, found.is_service)
    assert (found.ended is None) == (status is RunStatus.RUNNING)
    assert "uvwxyz" not in str(found.reason)


def test_run_record_of_a_dead_process_is_killed(directory):
    """Its record still says that it runs, but nothing holds its lock."""
    write_record(directory, RunRecord(status=RunStatus.RUNNING))
    found = read_record(directory)

    assert found is not None
    assert found.status is RunStatus.KILLED
    assert found.reason


def follow(
    directory: RunDirectory, *, checkpoint: int | None, step: int = 0, has_work: bool = False, every_steps: int = 10
) -> RunRecord:
    """Begin a process that goes on from ``checkpoint`` after one that had reached ``step``, and kill it."""
    directory.metrics.write_text(json.dumps({"step": step}) + "\n" if step else "")
    with hold(directory.lock):
        record = follow_record(directory, checkpoint=checkpoint, every_steps=every_steps, has_work=lambda: has_work)
        write_record(directory, record)
    return record


def test_run_record_warns_of_runs_killed_before_each_checkpoint(directory):
    """From the third process on that loses its steps; not if one reaches a checkpoint in between."""
    assert follow(directory, checkpoint=None).warning is None
    for _ in range(2):
        assert follow(directory, checkpoint=None, step=3).warning is None
    said = follow(directory, checkpoint=None, step=4).warning

    assert said is not None
    assert "3 processes in a row went on from the beginning and were killed before the next checkpoint" in said
    assert "the last one had made 4 steps. Set checkpoint.every_steps lower than 10" in said
    assert (None, 0) == ((found := follow(directory, checkpoint=10, step=12)).warning, found.num_lost)
    for _ in range(2):
        assert follow(directory, checkpoint=10, step=12).warning is None
    assert "from the checkpoint of step 10" in str(follow(directory, checkpoint=10, step=12).warning)


def test_run_record_counts_kills_in_the_first_step_with_work(directory):
    """A service without agents makes no steps either, and loses nothing."""
    follow(directory, checkpoint=5, step=5)
    for _ in range(5):
        assert follow(directory, checkpoint=5, step=5).num_lost == 0
    for _ in range(2):
        assert follow(directory, checkpoint=5, step=5, has_work=True, every_steps=1).warning is None
    assert "A step takes longer" in str(follow(directory, checkpoint=5, has_work=True, every_steps=1).warning)


@pytest.mark.parametrize("status", [RunStatus.INTERRUPTED, RunStatus.FAILED, RunStatus.FINISHED])
def test_run_record_of_another_end_counts_no_kill(directory, status):
    """It said why it ended."""
    follow(directory, checkpoint=None)
    write_record(directory, RunRecord(status=status, num_lost=7))

    assert follow(directory, checkpoint=None, step=3).num_lost == 0


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"status": "dancing"}', '{"status": "failed", "more": 1}', "7"])
def test_damaged_run_record_is_ignored(directory, text):
    """A reader goes on without it."""
    directory.record.write_text(text)
    assert read_record(directory) is None


def test_run_record_is_plain_json(directory):
    """Programs read it."""
    write_record(directory, RunRecord(status=RunStatus.FAILED, reason="no room"))
    found = json.loads(directory.record.read_text())
    assert ("failed", "no room") == (found["status"], found["reason"])
