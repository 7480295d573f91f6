"""Who keeps the weights: nobody waits for a server that does not come, and what is kept is given in one directory.

What is sent to servers is tested in ``tests/engines/servers``, the groups by themselves in ``tests/training``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from attrs import define

from areal_actors.actors.weights import WeightKeeper
from areal_actors.core import ActorSystem, Ref
from areal_actors.errors import ArealError, CheckpointError, EngineError
from areal_actors.messages import (
    CloseGroup,
    DescribeWeights,
    GroupPlace,
    OpenGroup,
    SendBucket,
    TensorBucket,
    Weights,
    WriteWeights,
)
from areal_actors.models import load_policy
from areal_actors.models.tiny import create_tiny
from areal_actors.training.shelf import Shelf, ShelfPublisher

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Real time: a virtual clock would run past the threads."""
    return str(request.param)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_policy(create_tiny(tmp_path_factory.mktemp("models")))


@define
class Policy:
    """A model at a version."""

    model: Any
    version: int = 3

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(self.model.state_dict())


@asynccontextmanager
async def keeping(root: Path, model: Any, *, grace: float = 5.0) -> AsyncIterator[Ref[Weights]]:
    shelf = Shelf(root=root, bucket_bytes=1 << 20)
    ShelfPublisher(shelf=shelf).publish(Policy(model))
    async with ActorSystem.open(grace=grace) as system:
        yield await system.spawn(WeightKeeper(shelf), name="weights")


async def open_group(keeper: Ref[Weights], *, server: str = "a", seconds: float = 20.0) -> GroupPlace:
    wanted = OpenGroup(server=server, machine="localhost", device="cpu", num_ranks=1, timeout_seconds=seconds)
    return await keeper.ask(wanted)


async def test_what_is_kept_is_described_and_written_once(tmp_path: Path, model: Any) -> None:
    """Many that ask at once get one directory; another version than the one that is kept is refused."""
    paths: list[Path] = []

    async with keeping(tmp_path / "kept", model) as keeper:

        async def write() -> None:
            paths.append(await keeper.ask(WriteWeights(version=3)))

        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(write)
        buckets = await keeper.ask(DescribeWeights(version=3))
        for message in (DescribeWeights(version=2), WriteWeights(version=4)):
            with pytest.raises(EngineError, match="version 3 is"):
                await keeper.ask(message)

    assert {tmp_path / "kept" / "version-00000003"} == set(paths)
    assert all(isinstance(bucket, TensorBucket) and bucket.names for bucket in buckets)


async def test_a_disk_that_refuses_is_told(tmp_path: Path, model: Any) -> None:
    """To whoever asks, and the keeper lives on."""
    (tmp_path / "file").touch()
    async with keeping(tmp_path / "file" / "kept", model) as keeper:
        with pytest.raises(CheckpointError):
            await keeper.ask(WriteWeights(version=3))
        assert await keeper.ask(DescribeWeights(version=3))


async def test_a_server_that_does_not_come_is_given_up(tmp_path: Path, model: Any) -> None:
    """After its time; then its group is unknown, and closing it again is fine."""
    async with keeping(tmp_path, model) as keeper:
        place = await open_group(keeper, seconds=0.1)
        wanted = SendBucket(group=place.name, version=3, number=0)
        with pytest.raises(EngineError, match="No process has joined"):
            await keeper.ask(wanted)
        with pytest.raises(EngineError, match="There is no group"):
            await keeper.ask(wanted)
        await keeper.ask(CloseGroup(group=place.name))


async def test_a_group_that_is_closed_or_replaced_holds_up_nobody(tmp_path: Path, model: Any) -> None:
    """Whoever waits to send in it hears of it at once; another server's group stays."""
    said: list[str] = []

    async with keeping(tmp_path, model) as keeper:

        async def send(place: GroupPlace) -> None:
            try:
                await keeper.ask(SendBucket(group=place.name, version=3, number=0))
            except ArealError as error:
                said.append(str(error))

        first, other = await open_group(keeper), await open_group(keeper, server="b")
        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                for place in (first, other):
                    tasks.start_soon(send, place)
                await anyio.wait_all_tasks_blocked()
                second = await open_group(keeper)
                while not said:
                    await anyio.lowlevel.checkpoint()
                assert len(said) == 1
                await keeper.ask(CloseGroup(group=other.name))
        assert second.name != first.name
        assert all("closed" in text for text in said)
        assert len(said) == 2


async def test_a_keeper_ends_while_servers_are_waited_for(tmp_path: Path, model: Any) -> None:
    """Those that ask hear of its end, and nothing is left that would hold the process up."""
    said: list[ArealError] = []

    async def send(keeper: Ref[Weights], place: GroupPlace) -> None:
        try:
            await keeper.ask(SendBucket(group=place.name, version=3, number=0))
        except ArealError as error:
            said.append(error)

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks, keeping(tmp_path, model, grace=0.1) as keeper:
            tasks.start_soon(send, keeper, await open_group(keeper))
            await anyio.wait_all_tasks_blocked()
    assert len(said) == 1
