"""A job that its cluster requeues or holds: it begins soon, or is given up."""

from __future__ import annotations

import pytest
from tests.schedulers.slurm.scripted import commands

from areal_actors.schedulers.base import ControllerAddress, PlacementState, WorkerSpec
from areal_actors.schedulers.slurm.files import JobRecord, SlurmFiles
from areal_actors.schedulers.slurm.placement import SlurmPlacement
from areal_actors.schedulers.slurm.queue import JobRow
from areal_actors.schedulers.slurm.settings import SlurmConfig

pytestmark = pytest.mark.anyio

HELD = JobRow(job=7, name="x", state="PENDING", reason="launch failed requeued held")
LATE = JobRow(job=7, name="x", state="PENDING", reason="BeginTime")
RUNNING = JobRow(job=7, name="x", state="RUNNING", nodes="n1", reason="None")
CANCELLED = JobRow(job=7, name="x", state="CANCELLED", reason="None")
SAYING = 'echo "$@" >>"$0.said"'


async def refresh():
    """Never called: the tests pass rows themselves."""
    raise NotImplementedError


async def placed(directory, *, scontrol=SAYING, **settings):
    """Job 7, and what its commands were asked."""
    files = SlurmFiles(path=directory / "slurm")
    files.create()
    programs = directory / "bin"
    programs.mkdir()
    placement = SlurmPlacement(
        WorkerSpec(name="x", controller=ControllerAddress(address="", secret=b"s")),
        record=JobRecord(name="x", worker="x", life=0, created_at=0.0),
        log=directory / "log",
        files=files,
        commands=commands(programs, scontrol=scontrol, scancel=SAYING),
        config=SlurmConfig(**settings),
        refresh=refresh,
    )
    await placement.begin(7)
    return placement, lambda name: (programs / f"{name}.said").read_text().splitlines()


async def test_requeued_job_begins_soon(tmp_path):
    """It does not wait for the two minutes that Slurm makes a requeued job wait; one request is enough."""
    placement, said = await placed(tmp_path)
    for row in (RUNNING, LATE, LATE, RUNNING):
        await placement.update(row, now=0.0)

    assert ["update JobId=7 StartTime=now+5"] == [line for line in said("scontrol") if "show" not in line]
    assert placement.status.state is PlacementState.RUNNING


async def test_job_that_slurm_holds_is_given_up(tmp_path):
    """It is cancelled, and has ended when it is gone; its script would not begin."""
    placement, said = await placed(tmp_path)
    await placement.update(HELD, now=0.0)

    assert ["7"] == said("scancel")
    assert placement.status.state is PlacementState.PENDING
    assert (tmp_path / "slurm" / "stop" / "x").exists()
    await placement.update(CANCELLED, now=0.0)
    assert placement.status.state is PlacementState.ENDED
    assert "Slurm held it (launch failed requeued held), and it was given up" in placement.status.reason


@pytest.mark.parametrize("reason", ["JobHeldUser", "JobHeldAdmin", "job requeued in held state"])
async def test_hold_by_a_person_is_left_alone(tmp_path, reason):
    """It says so, and waits."""
    placement, _ = await placed(tmp_path)
    await placement.update(JobRow(job=7, name="x", state="PENDING", reason=reason), now=0.0)

    assert not list((tmp_path / "bin").glob("*.said"))
    assert reason in placement.status.reason
