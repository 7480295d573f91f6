"""How a worker that a cluster has started ends when its controller does; ``nox -s slurm`` has whole ones."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from areal_actors import worker
from areal_actors.domain import Role
from areal_actors.errors import EngineError
from areal_actors.kernel import ActorSystem
from areal_actors.kernel.remote import Listener, ReconnectingConnection, listen
from areal_actors.messages import Directory, ExpectWorker, RoleSpec
from areal_actors.run import ranks
from areal_actors.run.control_plane import DirectoryActor
from areal_actors.schedulers.base import CONTROLLER_LOST
from areal_actors.schedulers.bootstrap import Bootstrap
from areal_actors.schedulers.slurm import SlurmFiles

pytestmark = pytest.mark.anyio

SECRET = b"known to a controller and to its workers"
Serve = Callable[[Bootstrap, ReconnectingConnection], Awaitable[None]]


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Real time: a virtual clock would run past the threads."""
    return str(request.param)


@pytest.fixture(autouse=True)
def alarm() -> Iterator[None]:
    """Clear the alarm that a worker sets when it has lost its controller."""
    yield
    signal.alarm(0)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmFiles:
    """Those of a run that has a controller."""
    files = SlurmFiles(path=tmp_path / "slurm")
    files.create()
    monkeypatch.setenv("AREAL_BOOTSTRAP", str(files.path / "bootstrap" / "x.json"))
    return files


@asynccontextmanager
async def controller(tmp_path: Path) -> AsyncIterator[Listener]:
    """Where a generation is expected."""
    spec = RoleSpec(role=Role.GENERATION, config=tmp_path, directory=tmp_path, lease_seconds=5.0)
    async with ActorSystem.open() as system:
        known = await system.spawn(DirectoryActor())
        await known.ask(ExpectWorker(worker="generation-0", incarnation=1000, spec=spec))
        async with listen(
            "tcp://127.0.0.1:0", secret=SECRET, expose={"directory": known}, node="controller"
        ) as listener:
            yield listener


async def work(monkeypatch: pytest.MonkeyPatch, address: str, serve: Serve, *, rank: int = 0) -> int:
    """The status of a worker that does this instead of its role."""
    module, name = (ranks, "serve_task") if rank else (worker, "_serve")
    monkeypatch.setattr(module, name, serve)
    with anyio.fail_after(20):
        return await worker._work(
            Bootstrap(
                name="generation-0",
                life=1000,
                address=address,
                secret=SECRET,
                rank=rank,
            )
        )


async def fail(bootstrap: Bootstrap, controller: ReconnectingConnection) -> None:
    """A role whose engine breaks."""
    raise EngineError("the engine broke")


async def test_worker_whose_role_fails_exits_with_failure(files, tmp_path, monkeypatch):
    """The controller decides what is next, if it can be told."""
    async with controller(tmp_path) as listener:

        async def serve(bootstrap: Bootstrap, connection: ReconnectingConnection) -> None:
            await connection.wait_connected()
            await fail(bootstrap, connection)

        assert 1 == await work(monkeypatch, listener.address, serve)
    assert 1 == await work(monkeypatch, "tcp://127.0.0.1:9", fail)


async def test_worker_exits_as_controller_lost_when_its_lease_expires(files, monkeypatch):
    """The status says so, and an alarm ends a role that hangs."""

    async def serve(bootstrap: Bootstrap, connection: ReconnectingConnection) -> None:
        await worker._keep_lease(bootstrap, connection.ref(Directory, "directory"), 0.2)

    assert CONTROLLER_LOST == await work(monkeypatch, "tcp://127.0.0.1:9", serve)
    assert 0 < signal.alarm(0)


@pytest.mark.parametrize("is_lost", [False, True])
async def test_rank_ends_with_its_first_process_or_with_controller(files, tmp_path, monkeypatch, is_lost):
    """The first process may be gone because its controller is: the status says so."""
    async with controller(tmp_path) as listener:

        async def serve(bootstrap: Bootstrap, connection: ReconnectingConnection) -> None:
            if not is_lost:
                await connection.wait_connected()

        address = "tcp://127.0.0.1:9" if is_lost else listener.address
        assert (CONTROLLER_LOST if is_lost else 0) == await work(monkeypatch, address, serve, rank=1)


async def test_worker_that_is_done_exits_with_success(files, tmp_path, monkeypatch):
    """Whether the controller answers at that moment or not."""

    async def serve(bootstrap: Bootstrap, connection: ReconnectingConnection) -> None:
        """Nothing."""

    assert 0 == await work(monkeypatch, "tcp://127.0.0.1:9", serve)


@pytest.mark.parametrize("is_early", [False, True])
async def test_warning_while_role_is_opened_is_kept(monkeypatch, is_early):
    """Loading a model takes minutes; the signal would end the worker by default."""
    heard = []
    monkeypatch.setattr(worker, "_early_warnings", [signal.SIGUSR1] if is_early else [])

    async def serve(_bootstrap, _controller, warnings) -> None:
        if not is_early:
            signal.raise_signal(signal.SIGUSR1)
        await anyio.wait_all_tasks_blocked()  # as if it loaded
        heard.append(await anext(warnings))

    monkeypatch.setattr(worker, "_serve_until_warned", serve)
    with anyio.fail_after(10):
        await worker._serve(None, None)

    assert [signal.SIGUSR1] == heard


@pytest.mark.skipif(sys.platform != "linux", reason="the handlers of a process are read from /proc")
def test_warning_before_bootstrap_message_does_not_end_worker():
    """It goes on to read the message, of which there is none here."""
    command = [sys.executable, "-m", "areal_actors.worker"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:
        status = Path(f"/proc/{process.pid}/status")
        is_caught = False
        while not is_caught and process.poll() is None:
            time.sleep(0.01)
            caught = next(line for line in status.read_text().splitlines() if line.startswith("SigCgt"))
            is_caught = bool(int(caught.split()[1], 16) >> (signal.SIGUSR1 - 1) & 1)
        process.send_signal(signal.SIGUSR1)
        process.communicate(b"")

    assert is_caught
    assert 0 < process.returncode


def test_worker_ends_with_its_parent():
    """Its standard input closes, also when nothing can be connected to."""
    spec = b'{"name": "p", "life": 1, "address": "unix:/nowhere/at/all.sock", "secret": "%s"}\n' % (b"00" * 32)
    command = [sys.executable, "-m", "areal_actors.worker"]
    ended = subprocess.run(command, input=spec, capture_output=True, timeout=120, check=False)

    assert ended.returncode == 0


def test_worker_started_by_hand_explains_itself():
    """What it is told cannot be read: it says who starts workers."""
    command = [sys.executable, "-m", "areal_actors.worker"]
    ended = subprocess.run(command, input=b"hello\n", capture_output=True, timeout=120, check=False)

    assert ended.returncode == 1
    assert b"areal-actors train, with scheduler.roles" in ended.stderr
