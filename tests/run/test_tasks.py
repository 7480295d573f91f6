"""A worker and the other tasks of its job find one another through the controller; ``nox -s slurm`` trains gangs."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import anyio
import pytest
from attrs import evolve

from areal_actors.config import RunConfig, load_config, save_config
from areal_actors.dashboard import RunDirectory
from areal_actors.domain import Role
from areal_actors.errors import Conflict, GangError
from areal_actors.kernel import ActorSystem
from areal_actors.kernel.remote import Listener, listen, reconnecting
from areal_actors.messages import Directory, ExpectWorker, RoleSpec
from areal_actors.run.control_plane import DirectoryActor
from areal_actors.run.ranks import expect_ranks, serve_task
from areal_actors.schedulers.bootstrap import Bootstrap

pytestmark = pytest.mark.anyio
CONFIG = Path(__file__).parents[2] / "examples" / "tiny.yaml"
SECRET = b"known to all processes of the run"


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Real time: a virtual clock would run past the threads."""
    return str(request.param)


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """A rank leaves what the cluster says to the first one."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(path=tmp_path)


@pytest.fixture
def config(directory: RunDirectory) -> RunConfig:
    loaded = load_config(CONFIG, ["trainer.gang.num_processes=2", "scheduler.start_seconds=20"])
    save_config(loaded, directory.config)
    return loaded


@asynccontextmanager
async def controller(directory: RunDirectory, *, life: int = 1000) -> AsyncIterator[Listener]:
    """Where a trainer of this life is expected."""
    spec = RoleSpec(role=Role.TRAINER, config=directory.config, directory=directory.path, lease_seconds=5.0)
    async with ActorSystem.open() as system:
        known = await system.spawn(DirectoryActor())
        await known.ask(ExpectWorker(worker="trainer-0", incarnation=life, spec=spec))
        async with listen(
            "tcp://127.0.0.1:0", secret=SECRET, expose={"directory": known}, node="controller"
        ) as listener:
            yield listener


async def be_rank(bootstrap: Bootstrap, problems: list[Exception]) -> None:
    async def locate() -> str:
        return bootstrap.address

    async with reconnecting(locate, secret=SECRET, node=bootstrap.node) as line:
        try:
            await serve_task(bootstrap, line)
        except (Conflict, GangError) as error:
            problems.append(error)


def first_of(listener: Listener) -> Bootstrap:
    return Bootstrap(name="trainer-0", life=1000, address=listener.address, secret=SECRET, num_tasks=2)


async def test_task_joins_and_leaves_with_worker(directory, config):
    """The worker has a ref to its actor, where both can be reached; the cluster's signals are left to the worker."""
    problems: list[Exception] = []
    async with controller(directory) as listener, anyio.create_task_group() as tasks:
        first = first_of(listener)
        tasks.start_soon(be_rank, evolve(first, rank=1), problems)
        async with (
            reconnecting(partial(_address, listener), secret=SECRET, node=first.node) as line,
            listen("tcp://127.0.0.1:0", secret=SECRET, node=first.node) as own,
            expect_ranks(
                SimpleNamespace(config=config, directory=directory),
                bootstrap=first,
                listener=own,
                directory=line.ref(Directory, "directory"),
            ) as members,
        ):
            heeds = signal.getsignal(signal.SIGTERM)

    assert [] == problems
    assert "127.0.0.1" == members.host
    assert 1 == len(members.ranks)
    assert f"{directory.path}/logs/workers/trainer-0.log" in members.whereabouts[0]
    assert signal.SIG_IGN is heeds


async def test_missing_task_is_named(directory, config):
    """The error comes after the time that a worker has to start."""
    config = evolve(config, scheduler=evolve(config.scheduler, start_seconds=0.05))
    async with controller(directory) as listener:
        first = first_of(listener)
        async with (
            reconnecting(partial(_address, listener), secret=SECRET, node=first.node) as line,
            listen("tcp://127.0.0.1:0", secret=SECRET, node=first.node) as own,
        ):
            known = line.ref(Directory, "directory")
            job = SimpleNamespace(config=config, directory=directory)
            with pytest.raises(GangError, match="trainer-0-rank-1 of the training gang did not join"):
                async with expect_ranks(job, bootstrap=first, listener=own, directory=known):
                    raise AssertionError


async def test_task_gives_up_on_silent_worker(directory, config):
    """It exits if its incarnation is over, or after the time that a worker has to start."""
    save_config(evolve(config, scheduler=evolve(config.scheduler, start_seconds=0.05)), directory.config)
    problems: list[Exception] = []
    async with controller(directory) as listener:
        await be_rank(evolve(first_of(listener), rank=1), problems)
    async with controller(directory, life=2000) as listener:
        await be_rank(evolve(first_of(listener), rank=1), problems)

    assert [GangError, Conflict] == [type(problem) for problem in problems]
    assert "scheduler.start_seconds" in str(problems[0])


async def _address(listener: Listener) -> str:
    return listener.address
