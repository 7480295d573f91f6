"""The files of a run's jobs, on a file system that has troubles of its own."""

from __future__ import annotations

import errno
import fcntl
import os

import anyio
import pytest
from tests.schedulers.slurm.test_placement import CANCELLED, placed

from areal_actors.errors import SchedulerError
from areal_actors.schedulers.slurm.files import SlurmFiles

pytestmark = pytest.mark.anyio


def files_in(path) -> SlurmFiles:
    files = SlurmFiles(path=path / "slurm")
    files.create()
    return files


def test_one_controller_at_a_time(tmp_path):
    """The second one is told who the first one is."""
    files = files_in(tmp_path)
    with files.hold():
        assert files.is_held
        with (
            pytest.raises(SchedulerError, match=f"process {os.getpid()} on .* is the controller of the jobs"),
            files.hold(),
        ):
            pass

    assert not files.is_held


def test_file_system_without_locks_is_named(tmp_path, monkeypatch):
    """It does not count as locked by another controller."""
    files = files_in(tmp_path)

    def flock(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)

    with pytest.raises(SchedulerError, match="cannot be locked: Function not implemented"), files.hold():
        pass
    with pytest.raises(SchedulerError, match="cannot be locked"):
        _ = files.is_held


async def test_end_of_a_job_is_reported_although_it_cannot_be_recorded(tmp_path):
    """A full disk is not a reason to wait for a job that is gone."""
    placement, _ = await placed(tmp_path)
    jobs = tmp_path / "slurm" / "jobs"
    jobs.rename(tmp_path / "slurm" / "moved")
    with pytest.raises(SchedulerError, match="cannot be written"):
        await placement.update(CANCELLED, now=0.0)

    with anyio.fail_after(5):
        assert "CANCELLED" in (await placement.wait_ended()).reason


async def test_end_of_a_job_is_recorded_although_the_reader_was_cancelled(tmp_path):
    """A caller that waits for another job reads the queue for all jobs."""
    placement, _ = await placed(tmp_path)
    scope = anyio.CancelScope()

    async def look() -> None:
        with scope:
            await placement.update(CANCELLED, now=0.0)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(look)
        while not placement.is_gone:
            await anyio.lowlevel.checkpoint()
        scope.cancel()

    with anyio.fail_after(5):
        await placement.wait_ended()
    assert [None] != [record.ended for record in files_in(tmp_path).read_records()]
    assert not (tmp_path / "slurm" / "bootstrap" / "x.json").exists()
