"""A worker that has lost its controller: what it says, which controller it goes to next, and when it gives up."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.errors import SchedulerError
from areal_actors.kernel.remote import listen
from areal_actors.schedulers.base import CONTROLLER_LOST
from areal_actors.schedulers.bootstrap import Bootstrap, confirm_release, count_releases, read_epoch
from areal_actors.schedulers.preflight import check
from areal_actors.schedulers.slurm import SlurmFiles

FORMER, LATER = b"the secret of the former controller...", b"the secret of the later controller...."
JOB = "aa-0123456789abcdef-caller-0.1000"


def told(address, *, secret=FORMER, epoch=1, **options):
    """First words to the worker."""
    return Bootstrap(name="caller-0", life=1000, addresses=(address,), secret=secret, epoch=epoch, **options)


@pytest.fixture
def files(tmp_path):
    """Those of a run that has had a controller."""
    files = SlurmFiles(path=tmp_path / "slurm")
    files.create()
    files.begin_epoch()
    return files


def path_of(files):
    """What AREAL_BOOTSTRAP names."""
    return str(files.path / "bootstrap" / f"{JOB}.json")


async def wait_let_go(files, epoch):
    """Until a process has told the controller of ``epoch`` that it is free."""
    while not count_releases(files.path, epoch):  # noqa: ASYNC110 - it is said in a file
        await anyio.sleep(0.05)


@given(life=st.integers(0, 5000), before=st.integers(0, 9), more=st.integers(0, 9), epoch=st.integers(0, 9))
def test_a_life_is_counted_from_when_it_was_said(life, before, more, epoch):
    """However often the cluster had started the job before, the life is the one that was asked for."""
    words = Bootstrap(
        name="x", life=life, addresses=("a",), secret=b"s", num_restarts=before, epoch=epoch, rejoin_seconds=1.5
    )
    read = Bootstrap.from_line(words.to_line(), num_restarts=before + more)

    assert words == Bootstrap.from_line(words.to_line())
    assert (life + more, before + more, epoch, 1.5) == (read.life, read.num_restarts, read.epoch, read.rejoin_seconds)


def test_epochs_only_grow(files):
    """Each controller is the latest; where nothing can be read, nobody is superseded."""
    assert [2, 3] == [files.begin_epoch(), files.begin_epoch()]
    assert 3 == read_epoch(files.path)
    (files.path / "epoch").write_text("what")
    assert 0 == read_epoch(files.path)
    with pytest.raises(SchedulerError, match="does not say how many controllers"):
        files.begin_epoch()


def test_each_process_of_each_start_counts_for_itself(files):
    """Processes of a start that is over are not others, and words to an earlier controller are none to ours."""
    for restarts, rank, epoch in (("", "", 2), ("", "1", 2), ("1", "0", 2), ("1", "1", 1), ("1", "0", 2)):
        confirm_release(files.path, JOB, epoch, {"SLURM_RESTART_COUNT": restarts, "SLURM_PROCID": rank})
    (files.path / "let-go" / f"{JOB}.x.y").write_text("2")
    (files.path / "let-go" / f"{JOB}.2.0").write_text("what")

    assert {(JOB, 0): 2, (JOB, 1): 1} == count_releases(files.path, 2)
    files.remove_bootstrap(JOB)
    assert not count_releases(files.path, 2)


@pytest.mark.anyio
async def test_it_waits_for_a_later_controller_and_says_that_it_has_let_go(files):
    """It connects to no address before it has that of the later controller; the former secret does not suffice."""
    async with listen("tcp://127.0.0.1:0", secret=LATER) as later, anyio.create_task_group() as tasks:
        files.write_bootstrap(JOB, told("tcp://127.0.0.1:9"))
        with anyio.fail_after(20):
            tasks.start_soon(check, path_of(files), 15.0, 1)
            epoch = files.begin_epoch()
            await wait_let_go(files, epoch)
            files.write_bootstrap(JOB, told(later.address, secret=LATER, epoch=epoch))

    assert 1 == count_releases(files.path, 2)[JOB, 0]


@pytest.mark.anyio
async def test_a_job_that_begins_between_two_homes_goes_to_the_later_one(files):
    """It had lost nobody, but its first words are those of a controller that is no more."""
    async with listen("tcp://127.0.0.1:0", secret=FORMER) as former, listen("tcp://127.0.0.1:0", secret=LATER) as later:
        files.write_bootstrap(JOB, told(former.address))
        epoch = files.begin_epoch()
        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(check, path_of(files), 15.0)
                await wait_let_go(files, epoch)
                files.write_bootstrap(JOB, told(later.address, secret=LATER, epoch=epoch))

    assert [] == list(former.peers)


@pytest.mark.anyio
async def test_it_gives_up_where_nobody_wants_it(files):
    """The controller that it lost answers; its job is not wanted; nobody comes; the words are gone."""
    async with listen("tcp://127.0.0.1:0", secret=FORMER) as former:
        files.write_bootstrap(JOB, told(former.address))
        with pytest.raises(SchedulerError, match="has done without this worker"):
            await check(path_of(files), 5.0, 1)
    with pytest.raises(SchedulerError, match="cannot be reached"):
        await check(path_of(files), 0.2, 1)
    files.begin_epoch()
    with pytest.raises(SchedulerError, match="controller 2 of this run has not published its address yet"):
        await check(path_of(files), 0.2, 1)
    files.mark_stopped(JOB)
    with pytest.raises(SchedulerError, match="not wanted any longer"):
        await check(path_of(files), 5.0, 1)
    files.remove_bootstrap(JOB)
    with pytest.raises(SchedulerError, match="file system"):
        await check(path_of(files), 5.0, 1)


def list_open(process):
    """What a process has open."""
    return [str(path.readlink()) for path in Path(f"/proc/{process}/fd").iterdir()]


LOSES_HOME = """
import os, signal, sys, threading
from areal_actors.schedulers.bootstrap import read_bootstrap
from areal_actors.schedulers.bootstrap import rejoin_next_controller
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.alarm(60)
kept = open(sys.argv[1])
os.set_inheritable(kept.fileno(), True)
threading.Thread(target=threading.Event().wait).start()
print("lost")
rejoin_next_controller(read_bootstrap(""), "platform")
"""


@pytest.mark.anyio
async def test_a_process_that_looks_for_the_next_controller_keeps_nothing_but_its_place(files, tmp_path):
    """Neither threads nor files nor signals that it ignored outlive it; told to end, it does."""
    files.write_bootstrap(JOB, told("tcp://127.0.0.1:9", rejoin_seconds=30.0))
    kept = tmp_path / "kept"
    kept.touch()
    environment = {**os.environ, "AREAL_BOOTSTRAP": path_of(files)}
    command = [sys.executable, "-c", LOSES_HOME, str(kept)]
    async with await anyio.open_process(command, env=environment, stderr=None) as process:
        with anyio.fail_after(30):
            files.begin_epoch()
            await wait_let_go(files, 2)
            opened = list_open(process.pid)
            process.terminate()
            await process.wait()

    assert str(kept) not in opened
    assert -15 == process.returncode


@pytest.mark.anyio
async def test_a_process_that_finds_no_other_controller_says_so_with_its_status(files):
    """Its script does not ask for another start then."""
    files.write_bootstrap(JOB, told("tcp://127.0.0.1:9", rejoin_seconds=1.0))
    environment = {**os.environ, "AREAL_BOOTSTRAP": path_of(files), "AREAL_FORMER_EPOCH": "1"}
    command = [sys.executable, "-m", "areal_actors.schedulers.preflight", "1", "platform"]
    done = await anyio.run_process(command, env=environment, check=False)

    assert CONTROLLER_LOST == done.returncode
    assert b"the controller cannot be reached" in done.stderr
