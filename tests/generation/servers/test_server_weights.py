"""Weights of servers: requests are sampled with published weights only."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest
from attrs import evolve
from tests.generation.servers.server_stack import CONFIG, WHOLE, ask, ids_of, open_engine, open_server_stack

from areal_actors.domain import Snapshot
from areal_actors.errors import EngineError, ModelError
from areal_actors.models import load_policy
from areal_actors.testing.engines import EchoEngine
from areal_actors_testing.engine_contract import collect

pytestmark = pytest.mark.anyio


class Slow(EchoEngine):
    """Takes its time to load, if it is told to."""

    load_seconds = 0.0

    async def load(self, snapshot: Snapshot) -> None:
        await anyio.sleep(self.load_seconds)
        await super().load(snapshot)


async def test_gateway_requests_wait_until_all_servers_have_the_weights(model: Path, tmp_path: Path) -> None:
    """The gateway may choose a server that is back without our weights: one attempt detects it, the next one waits."""
    async with open_server_stack(model, tmp_path, num_servers=2, create_engine=Slow) as (_, servers):
        gateway = servers[0]
        config = evolve(CONFIG, gateway_url=gateway.url, health_interval_seconds=60)
        async with open_engine(servers, model, tmp_path, config=config) as engine:
            await gateway.kill()
            await gateway.start()
            gateway.engine.load_seconds = 0.5  # three attempts would be over by then
            chunks = await collect(engine, ask())

        assert ids_of(chunks) == WHOLE
        assert {chunk.version for chunk in chunks} == {0}
        assert len(gateway.bodies) == 2
        assert not servers[1].bodies


async def test_weights_that_do_not_fit_are_not_sent(model: Path, tmp_path: Path) -> None:
    """Servers keep in silence what a snapshot lacks; so it is looked at before, and the old weights stay."""
    state = load_policy(model).state_dict()
    name = next(iter(state))
    async with open_server_stack(model, tmp_path) as (engine, (server,)):
        server.paths.clear()
        for broken in ({}, {**state, name: state[name][:5]}, {key: state[key] for key in list(state)[3:]}):
            with pytest.raises(ModelError, match="does not fit"):
                await engine.load(Snapshot(version=1, state=broken))
        with pytest.raises(ModelError, match="safetensors"):
            await engine.load(Snapshot(version=1, path=tmp_path))

        assert "/update_weights_from_disk" not in server.paths
        assert engine.version == 0
        assert ids_of(await collect(engine, ask())) == WHOLE


class Picky(EchoEngine):
    """Refuses weights that were written here."""

    async def load(self, snapshot: Snapshot) -> None:
        if "published" in snapshot.path.parts:
            raise ModelError("no room")
        await super().load(snapshot)


class Refusing(EchoEngine):
    """Refuses weights while it is told to."""

    is_refusing = False

    async def load(self, snapshot: Snapshot) -> None:
        if self.is_refusing:
            raise ModelError("no room")
        await super().load(snapshot)


async def test_snapshot_refused_by_all_servers_is_not_recorded(model: Path, tmp_path: Path) -> None:
    """They serve the old ones on, under the old label, and nothing that was published stays."""
    async with open_server_stack(model, tmp_path, num_servers=2, create_engine=Picky) as (engine, servers):
        with pytest.raises(EngineError, match=r"No replica could load version 1.*no room.*Version 0 is kept"):
            await engine.load(Snapshot(version=1, state=load_policy(model).state_dict()))
        await engine.wait_until_all_serve()

        assert [server.label for server in servers] == ["0", "0"]
        assert engine.version == 0
        assert not list((tmp_path / "published").glob("*/*-*"))
        for number in range(4):
            assert ids_of(await collect(engine, ask(number, routing_key=str(number)))) == WHOLE


async def test_server_that_refuses_weights_is_out_until_it_accepts(model: Path, tmp_path: Path) -> None:
    """The other one answers with the new weights meanwhile."""
    async with open_server_stack(model, tmp_path, num_servers=2, create_engine=Refusing) as (engine, servers):
        servers[1].engine.is_refusing = True
        await engine.load(Snapshot(version=1, state=load_policy(model).state_dict()))
        for number in range(4):
            chunks = await collect(engine, ask(number, routing_key=str(number)))
            assert ids_of(chunks) == WHOLE
            assert {chunk.version for chunk in chunks} == {1}
        assert not servers[1].bodies

        servers[1].engine.is_refusing = False
        await servers[0].kill()
        chunks = await collect(engine, ask())
        assert ids_of(chunks) == WHOLE
        assert {chunk.version for chunk in chunks} == {1}
        assert servers[1].bodies


async def test_only_the_present_weights_are_kept_on_disk(model: Path, tmp_path: Path) -> None:
    """Of all that was published one directory stays, and none once the engine is closed."""
    state = load_policy(model).state_dict()
    async with open_server_stack(model, tmp_path) as (engine, _):
        for version in (1, 2, 3):
            await engine.load(Snapshot(version=version, state=state))
            (kept,) = (tmp_path / "published").glob("*/*-*")

            assert kept.name.startswith(f"{version}-")
            assert (kept / "config.json").exists()
    assert not list((tmp_path / "published").iterdir())


async def test_returning_server_loads_weights_before_requests(model: Path, tmp_path: Path) -> None:
    """A load does not wait for the dead; they get the weights when they are back, before they are asked."""
    async with open_server_stack(model, tmp_path, num_servers=2) as (engine, servers):
        await servers[0].kill()
        await engine.load(Snapshot(version=5, path=model))
        await engine.pause()
        await servers[0].start()
        await engine.resume()
        await servers[1].kill()

        assert {chunk.version for n in range(6) for chunk in await collect(engine, ask(n, routing_key=str(n)))} == {5}
