"""The weight store: servers that do not come are given up, and a version is written to one directory.

What is sent to servers is tested in ``tests/generation/servers``, the groups by themselves in ``tests/training``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from attrs import define, evolve

from areal_actors.errors import ArealError, CheckpointError, EngineError
from areal_actors.kernel import ActorSystem, Ref
from areal_actors.messages import (
    DescribeWeights,
    GroupPlace,
    Receiver,
    SendWeights,
    TensorBucket,
    Weights,
    WriteWeights,
)
from areal_actors.models import load_policy
from areal_actors.models.built_in import create_tiny
from areal_actors.training.weight_store import StorePublisher, WeightStore, WeightStoreActor

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
    store = WeightStore(root=root, bucket_bytes=1 << 20)
    StorePublisher(store=store).publish(Policy(model))
    async with ActorSystem.open(grace=grace) as system:
        yield await system.spawn(WeightStoreActor(store), name="weights")


def wanted(engine: str = "a", *, seconds: float = 20.0) -> SendWeights:
    """A request for a server that never joins."""
    receiver = Receiver(name=f"server of {engine}", machine="localhost", device="cpu", num_ranks=1)
    return SendWeights(engine=engine, version=3, receiver=receiver, timeout_seconds=seconds)


async def test_the_weight_store_describes_and_writes_a_version_once(tmp_path: Path, model: Any) -> None:
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


async def test_a_write_that_fails_is_raised_to_the_asker(tmp_path: Path, model: Any) -> None:
    """The store goes on."""
    (tmp_path / "file").touch()
    async with keeping(tmp_path / "file" / "kept", model) as keeper:
        with pytest.raises(CheckpointError):
            await keeper.ask(WriteWeights(version=3))
        assert await keeper.ask(DescribeWeights(version=3))


async def test_a_server_that_does_not_come_is_given_up(tmp_path: Path, model: Any) -> None:
    """After its time the engine hears of it; the next request gets another group."""
    async with keeping(tmp_path, model) as keeper:
        names = set()
        for _ in range(2):
            async with keeper.stream(wanted(seconds=0.1)) as places:
                with pytest.raises(EngineError, match="Not all of 1 processes have joined"):
                    names |= {place.name async for place in places}
        with pytest.raises(EngineError, match="version 3 is"):
            async with keeper.stream(evolve(wanted(), version=4)) as places:
                await anext(aiter(places))


async def test_engines_that_announce_themselves_share_a_group(tmp_path: Path, model: Any) -> None:
    """Each gets the ranks of its own servers; if one leaves, the other hears of it at once."""
    said: list[str] = []
    seen: dict[str, GroupPlace] = {}

    async with keeping(tmp_path, model) as keeper:

        async def send(engine: str, placed: anyio.Event) -> None:
            try:
                async with keeper.stream(wanted(engine)) as places:
                    async for place in places:
                        seen[engine] = place
                        placed.set()
            except ArealError as error:
                said.append(str(error))

        for engine in "ab":
            await keeper.ask(DescribeWeights(version=3, engine=engine))
        events = {engine: anyio.Event() for engine in "ab"}
        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks, anyio.create_task_group() as others:
                tasks.start_soon(send, "a", events["a"])
                others.start_soon(send, "b", events["b"])
                for event in events.values():
                    await event.wait()
                others.cancel_scope.cancel()

    assert seen["a"].name == seen["b"].name
    assert (seen["a"].size, seen["a"].offset, seen["b"].offset) == (3, 1, 2)
    assert len(said) == 1
    assert "b left" in said[0]


async def test_a_keeper_ends_while_servers_are_waited_for(tmp_path: Path, model: Any) -> None:
    """Those that ask hear of its end, and nothing is left that would hold the process up."""
    said: list[ArealError] = []

    async def send(keeper: Ref[Weights]) -> None:
        try:
            async with keeper.stream(wanted()) as places:
                async for _ in places:
                    pass
        except ArealError as error:
            said.append(error)

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks, keeping(tmp_path, model, grace=0.1) as keeper:
            tasks.start_soon(send, keeper)
            await anyio.wait_all_tasks_blocked()
    assert len(said) == 1
