"""The reporter passes all messages to all listeners; one that fails is switched off or ends the run."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading

import anyio
import pytest

from areal_actors.dashboard import MetricsWriter
from areal_actors.dashboard.records import read_records
from areal_actors.dashboard.reporter import ProgressReporter
from areal_actors.domain import RunStatus
from areal_actors.errors import RunDirectoryError
from areal_actors.kernel import ActorSystem, root_cause
from areal_actors.messages import EvaluationFinished, PhaseChanged, RunEnded, StepFinished

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request):
    """Real time: the listeners work on a thread, which virtual time cannot see."""
    return request.param


class Recorder:
    """Remembers what it heard, and fails where it was asked to."""

    is_essential = False

    def __init__(self, name="recorder", *, fails_at=None, error=None, is_essential=False):
        self.name = name
        self.is_essential = is_essential
        self.heard = []
        self.threads = set()
        self._fails_at = fails_at
        self._error = error or OSError(errno.ENOSPC, "No space left on device")

    def open(self):
        self._note("open")

    def on_event(self, news):
        self._note(news)

    def close(self):
        self._note("close")

    def _note(self, event):
        self.heard.append(event)
        self.threads.add(threading.current_thread())
        if len(self.heard) - 1 == self._fails_at:
            raise self._error


def step(number):
    return StepFinished(step=number, metrics={"step": number, "reward": 0.5})


async def report(listeners, *heard):
    """Run a reporter until it has heard everything."""
    async with ActorSystem.open() as system:
        progress = await system.spawn(ProgressReporter(listeners), name="progress")
        for item in heard:
            await progress.tell(item)


async def test_listeners_get_all_messages_in_order():
    """Opened first, closed last, on a thread that is not the loop's."""
    listeners = [Recorder("a"), Recorder("b")]
    heard = [
        PhaseChanged(phase="loading"),
        EvaluationFinished(version=0, reward=0.1, num_episodes=1, num_failed=0, seconds=1.0),
        *map(step, range(20)),
    ]

    await report(listeners, *heard)

    for listener in listeners:
        assert listener.heard == ["open", *heard, "close"]
        assert threading.main_thread() not in listener.threads


@pytest.mark.parametrize("error", [OSError(errno.EACCES, "Permission denied"), KeyError("a bug")])
@pytest.mark.parametrize("fails_at", [0, 1, 2])
async def test_failing_display_is_switched_off(error, fails_at, caplog):
    """Said once, with the reason; the others, and the run, go on."""
    broken, whole = Recorder("the broken one", fails_at=fails_at, error=error), Recorder("the whole one")

    await report([broken, whole], step(1), step(2))

    assert len(whole.heard) == 4
    assert len(broken.heard) <= fails_at + 2  # it may be closed, and hears nothing more
    warnings = [record.getMessage() for record in caplog.records if "switched_off" in record.getMessage()]
    assert len(warnings) == 1
    assert "the broken one" in warnings[0]
    assert repr(error) in warnings[0]


async def test_failing_metrics_writer_ends_the_run():
    """With the cause, and what to do; the other listeners are closed all the same."""
    metrics, display = Recorder("metrics.jsonl", fails_at=2, is_essential=True), Recorder("display")

    with pytest.raises(ExceptionGroup) as caught:
        await report([metrics, display], step(1), step(2), step(3))

    cause = root_cause(caught.value)
    assert isinstance(cause, RunDirectoryError)
    assert "metrics.jsonl could not be written: [Errno 28] No space left on device" in str(cause)
    assert "--resume" in str(cause)
    assert display.heard[-1] == "close"


async def test_cancelled_reporter_reports_an_interrupted_run():
    """Unless an error has ended the run, which was said before."""
    interrupted, failed = Recorder("interrupted"), Recorder("failed")
    with anyio.CancelScope() as scope:
        async with ActorSystem.open() as system:
            await system.spawn(ProgressReporter([interrupted]), name="first")
            second = await system.spawn(ProgressReporter([failed]), name="second")
            await second.ask(RunEnded(status=RunStatus.FAILED))
            scope.cancel()
            await anyio.sleep_forever()

    assert ["open", RunEnded(status=RunStatus.INTERRUPTED), "close"] == interrupted.heard
    assert ["open", RunEnded(status=RunStatus.FAILED), "close"] == failed.heard


async def test_unwritable_run_directory_fails_before_the_first_step(tmp_path):
    """A file where a directory should be: spawning the reporter fails."""
    (tmp_path / "trial").write_text("not a directory")
    listener = MetricsWriter(tmp_path / "trial" / "metrics.jsonl")

    with pytest.raises((RunDirectoryError, ExceptionGroup)) as caught:
        await report([listener])
    assert isinstance(root_cause(caught.value), RunDirectoryError)


async def test_metrics_file_is_complete_when_the_system_ends(tmp_path):
    """What was told before the end is written before the end."""
    path = tmp_path / "metrics.jsonl"

    await report([MetricsWriter(path)], *map(step, range(1, 51)))

    assert [record["step"] for record in read_records(path)] == list(range(1, 51))


def test_records_continue_when_a_full_disk_has_space_again(tmp_path):
    """On a real file system of 1 MiB, with one warning at the beginning and one at the end; no line is cut."""
    root, marker = tmp_path / "disk", tmp_path / "mounted"
    root.mkdir()
    mounting = f"mount -t tmpfs -o size=1m tmpfs {root} && touch {marker} && "
    program = f"{sys.executable} -m tests.dashboard.full_disk {root} && cp -r {root}/. {tmp_path}/kept"
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("needs unshare (util-linux)")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [unshare, "-rm", "sh", "-c", mounting + program], env=environment, capture_output=True, text=True, check=False
    )
    if not marker.exists():
        pytest.skip(f"a file system cannot be mounted in a user namespace here: {done.stderr}")

    assert 0 == done.returncode, done.stderr
    for name in ("sessions.jsonl", "failures.jsonl", "trajectory dumps"):
        said = [line for line in done.stdout.splitlines() if f"listener={name}" in line]
        assert ["records_missed", "records_missing"] == [line.split()[0] for line in said], done.stdout
    sessions = [record["version"] for record in read_records(tmp_path / "kept" / "sessions.jsonl")]
    failures = [record["version"] for record in read_records(tmp_path / "kept" / "failures.jsonl")]
    assert {0, 1, 2, 6, 7, 8} <= set(sessions) < set(range(9))
    assert {0, 1, 2, 6, 7, 8} <= set(failures) < set(range(9))
    for path in (tmp_path / "kept").rglob("*.jsonl"):
        assert path.read_text().endswith("\n") or not path.read_text()
