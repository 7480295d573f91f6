"""The record of a run: what its process writes, and what a reader sees after it is gone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from areal_actors.dashboard import RunDirectory
from areal_actors.dashboard.run_record import RunRecord, read_record, write_record
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
