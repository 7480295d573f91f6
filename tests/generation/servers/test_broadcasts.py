"""Weights that servers are sent: the same as those on disk, and where sending fails, those on disk are loaded."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import cycle
from pathlib import Path

import anyio
import numpy as np
import pytest
import torch
from anyio.streams.buffered import BufferedByteReceiveStream
from attrs import evolve
from tests.generation.servers import weight_store_process
from tests.generation.servers.server_stack import (
    CONFIG,
    WHOLE,
    ReplicatedServers,
    Trainer,
    ask,
    ids_of,
    open_engine,
    open_trainer,
    script,
)

import areal_actors
from areal_actors.domain import Snapshot, as_floats
from areal_actors.errors import ConfigError, EngineError, ModelError
from areal_actors.generation.servers.broadcasting import create_weight_receiver
from areal_actors.generation.servers.server import open_server
from areal_actors.generation.servers.vllm import VllmDialect
from areal_actors.generation.torch import TorchEngine, TorchEngineConfig
from areal_actors.kernel import Ref
from areal_actors.kernel.remote import connect
from areal_actors.lib.change_signal import ChangeSignal
from areal_actors.messages import Weights
from areal_actors.testing.engines import EchoEngine
from areal_actors_testing.engine_contract import ENGINE_CHECKS, Check, Subject, collect
from areal_actors_testing.sglang_server import FakeSGLang, UpdateFault, open_sglang_server

pytestmark = pytest.mark.anyio

RECEIVE, LOAD = "/update_weights_from_distributed", "/update_weights_from_disk"


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Real time: a virtual clock would run past the threads."""
    return str(request.param)


class Holding(EchoEngine):
    """An echo that remembers the weights that it was given."""

    held: Snapshot | None = None

    async def load(self, snapshot: Snapshot) -> None:
        await super().load(snapshot)
        self.held = snapshot


@asynccontextmanager
async def open_server_stack(
    model: Path, tmp_path: Path, *, num_servers: int = 1, seconds: float = 20.0, **options
) -> AsyncIterator[tuple[ReplicatedServers, list[FakeSGLang], Trainer]]:
    async with AsyncExitStack() as stack:
        trainer = await stack.enter_async_context(open_trainer(model, tmp_path))
        servers = [
            await stack.enter_async_context(
                open_sglang_server(Holding(script, vocab_size=384, context_length=256, **options), model=model)
            )
            for _ in range(num_servers)
        ]
        config = evolve(CONFIG, update_timeout_seconds=seconds)
        opening = open_engine(servers, model, tmp_path, config=config, find_weights=trainer.find)
        engine = await stack.enter_async_context(opening)
        for server in servers:
            server.paths.clear()
        yield engine, servers, trainer


def find_weights(directory: Path) -> list[Path]:
    """Files of weights on the disk."""
    return list(directory.rglob("*.safetensors"))


def has_weights_of(server: FakeSGLang, trainer: Trainer) -> bool:
    """Whether a server was given all that the trainer has, each tied tensor once."""
    held = server.engine.held
    state = held.state
    own = trainer.policy.state_dict()
    names = {tensor.data_ptr() for tensor in own.values()}
    return len(state) == len(names) and all(torch.equal(own[name], tensor) for name, tensor in state.items())


FAULTS = tuple(
    # Each on one loop, since a fault costs seconds.
    zip(
        (fault for fault in UpdateFault if fault is not UpdateFault.LEFT_OPEN), cycle(("asyncio", "trio")), strict=False
    )
)
LOADING = [check for check in ENGINE_CHECKS if "load" in check.__name__]


@pytest.mark.parametrize("anyio_backend", ["trio"])  # broadcasts change nothing that depends on the event loop
@pytest.mark.parametrize("check", LOADING, ids=lambda check: check.__name__)
async def test_broadcast_servers_keep_the_engine_contract(model: Path, tmp_path: Path, check: Check) -> None:
    """What holds for an engine that loads weights holds with weights that come in a group."""
    settings = TorchEngineConfig(dtype="float32", max_concurrent=8, max_length=512)
    async with (
        open_trainer(model, tmp_path) as trainer,
        TorchEngine.open(settings, model=model) as torch_engine,
        open_sglang_server(torch_engine, model=model) as server,
        open_engine([server], model, tmp_path, find_weights=trainer.find) as engine,
    ):
        policy = trainer.policy.model

        def recompute(prompt, output):
            ids = torch.tensor(np.concatenate([prompt, output]), dtype=torch.long)
            with torch.no_grad():
                logprobs = torch.log_softmax(policy(ids[None]).logits[0, len(prompt) - 1 : -1], -1)
            return as_floats(logprobs.gather(1, ids[len(prompt) :, None])[:, 0])

        def create_snapshot(version: int) -> Snapshot:
            trainer.policy.version = version
            return trainer.publish()

        server.paths.clear()
        await check(
            Subject(
                engine=engine,
                create_snapshot=create_snapshot,
                prompt=np.random.default_rng(3).integers(3, 384, 40),
                recompute=recompute,
                num_tokens=100,
            )
        )
        assert LOAD not in server.paths


async def test_servers_receive_each_version_and_nothing_is_written(model: Path, tmp_path: Path) -> None:
    """One group for each server serves all versions; the disk is not touched."""
    async with open_server_stack(model, tmp_path, num_servers=2) as (engine, servers, trainer):
        for version in (1, 2, 3):
            await engine.load(trainer.step())

            assert engine.version == version
            assert [server.label for server in servers] == [str(version)] * 2
            assert all(has_weights_of(server, trainer) for server in servers)
        for server in servers:
            assert server.paths.count("/init_weights_update_group") == 1
            assert server.paths.count(RECEIVE) > 3  # several buckets each
            assert LOAD not in server.paths
        assert not find_weights(tmp_path)
        assert {chunk.version for chunk in await collect(engine, ask())} == {3}
        for server in servers:
            server.paths.clear()
    assert all("/destroy_weights_update_group" in server.paths for server in servers)


async def load_all(engines: Sequence[ReplicatedServers], snapshot: Snapshot) -> None:
    """Have all engines load at the same time, as the router of replicas does."""
    async with anyio.create_task_group() as tasks:
        for engine in engines:
            tasks.start_soon(engine.load, snapshot)


async def test_servers_of_several_engines_receive_one_broadcast(model: Path, tmp_path: Path) -> None:
    """All are in one group; an engine that joins is in the next one, and one whose server dies stops no other."""
    async with AsyncExitStack() as stack:
        trainer = await stack.enter_async_context(open_trainer(model, tmp_path))
        servers, engines = [], []
        config = evolve(CONFIG, update_timeout_seconds=20)
        for number in range(3):
            echo = Holding(script, vocab_size=384, context_length=256)
            server = await stack.enter_async_context(open_sglang_server(echo, model=model))
            opening = open_engine([server], model, tmp_path / str(number), config=config, find_weights=trainer.find)
            servers.append(server)
            engines.append(await stack.enter_async_context(opening))
        await load_all(engines[:2], trainer.step())
        first = servers[0].groups
        assert len(first) == 1
        assert [server.groups for server in servers] == [first, first, ()]

        await load_all(engines, trainer.step())
        second = servers[0].groups
        assert second != first
        assert [server.groups for server in servers] == [second] * 3
        await load_all(engines, trainer.step())
        assert [server.groups for server in servers] == [second] * 3

        servers[2].update_faults.append(UpdateFault.DEATH)
        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(load_all, engines, trainer.step())
                while not (servers[0].label == servers[1].label == "4"):
                    await anyio.lowlevel.checkpoint()
                await servers[2].kill()
                await servers[2].start()
        assert [engine.version for engine in engines] == [4] * 3
        assert has_weights_of(servers[0], trainer)
        assert has_weights_of(servers[1], trainer)
        assert servers[2].engine.held.path is not None  # it came back, and has the version from disk


async def test_versions_are_exact_to_the_token(model: Path, tmp_path: Path) -> None:
    """Tokens sampled before weights were received have the old version, those after it the new one."""
    async with open_server_stack(model, tmp_path, is_gated=True) as (engine, (server,), trainer):
        server.engine.release(5)
        async with engine.generate(ask()) as chunks:
            seen = [await anext(aiter(chunks)) for _ in range(2)]
            while server.engine.statistics().sampled_tokens < 5:
                await anyio.lowlevel.checkpoint()
            await engine.load(trainer.step())
            server.engine.release(100)
            seen += [chunk async for chunk in chunks]

        assert ids_of(seen) == WHOLE
        assert [chunk.version for chunk in seen for _ in chunk.token_ids] == [0] * 5 + [1] * 35


@pytest.mark.parametrize(("fault", "anyio_backend"), FAULTS)
async def test_server_that_does_not_receive_loads_from_disk(model: Path, tmp_path: Path, fault: UpdateFault) -> None:
    """The failing server loads the weights from disk, the other one receives them, and neither hangs."""
    async with open_server_stack(model, tmp_path, num_servers=2, seconds=4.0) as (engine, servers, trainer):
        await engine.load(trainer.step())
        # A server that answers has a second chance; a refused update is begun again in each.
        times = {UpdateFault.SILENCE: 1, UpdateFault.DEATH: 1, UpdateFault.REFUSED_BEGIN: 4}
        servers[0].update_faults += [fault] * times.get(fault, 2)
        with anyio.fail_after(30):
            await engine.load(trainer.step())
            if fault is UpdateFault.DEATH:
                await servers[0].start()
            await engine.wait_until_all_serve()
            assert servers[0].label == "2"

        assert [server.label for server in servers] == ["2", "2"]
        # A server that waits for a silent one is as late, and cannot be told from it: both have a second chance.
        if fault is not UpdateFault.SILENCE:
            assert servers[0].engine.held.path == tmp_path / "kept" / "version-00000002"
            assert has_weights_of(servers[1], trainer)
        assert {chunk.version for n in range(4) for chunk in await collect(engine, ask(n, routing_key=str(n)))} == {2}

        for server in servers:
            server.paths.clear()
        await engine.load(trainer.step())
        assert all(has_weights_of(server, trainer) for server in servers)
        assert all(LOAD not in server.paths for server in servers)


async def test_open_update_of_another_client_is_ended_first(model: Path, tmp_path: Path) -> None:
    """Who was killed between begin and end must not keep the next one from it."""
    async with open_server_stack(model, tmp_path) as (engine, (server,), trainer):
        server.update_faults.append(UpdateFault.LEFT_OPEN)
        await engine.load(trainer.step())

        assert has_weights_of(server, trainer)
        assert LOAD not in server.paths


async def test_server_that_comes_back_loads_from_disk_and_is_sent_the_next_version(model: Path, tmp_path: Path) -> None:
    """One that was started anew has none of our weights and is in no group."""
    async with open_server_stack(model, tmp_path, num_servers=2) as (engine, servers, trainer):
        await engine.load(trainer.step())
        await servers[0].kill()
        await engine.load(trainer.step())
        await servers[0].start()
        await engine.wait_until_all_serve()

        assert servers[0].label == "2"
        assert servers[0].engine.held.path is not None
        await engine.load(trainer.step())
        assert all(has_weights_of(server, trainer) for server in servers)


async def test_server_with_partial_weights_gets_no_requests(model: Path, tmp_path: Path) -> None:
    """Its label is the old one; it serves again once it has all weights."""
    async with open_server_stack(model, tmp_path, num_servers=2) as (engine, servers, trainer):
        await engine.load(trainer.step())
        servers[0].update_faults += [UpdateFault.HALF] * 2
        trainer.store.is_full = True
        await engine.load(trainer.step())

        assert [server.label for server in servers] == ["1", "2"]
        for number in range(4):
            assert {chunk.version for chunk in await collect(engine, ask(number, routing_key=str(number)))} == {2}
        assert servers[0].paths.count("/generate") == 0
        trainer.store.is_full = False
        await engine.wait_until_all_serve()
        assert [server.label for server in servers] == ["2", "2"]


@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # the process takes seconds to start, and knows no other loop
async def test_killed_sender_leaves_no_partial_weights_in_use(model: Path, tmp_path: Path) -> None:
    """The sender is another process. No server hangs, or gets requests before the next trainer has published."""
    (tmp_path / "own").mkdir(mode=0o700)
    path = os.pathsep.join([str(Path(areal_actors.__file__).parents[1]), str(Path(__file__).parents[3])])
    command = [sys.executable, weight_store_process.__file__, str(model), str(tmp_path), "1"]
    config = evolve(CONFIG, update_timeout_seconds=10)
    async with (
        await anyio.open_process(command, env=os.environ | {"PYTHONPATH": path}, stderr=None) as trainer,
        open_sglang_server(EchoEngine(script, vocab_size=384, context_length=256), model=model) as server,
    ):
        address = (await BufferedByteReceiveStream(trainer.stdout).receive_until(b"\n", 999)).decode()
        async with connect(address, secret=weight_store_process.SECRET) as peer:

            async def find() -> Ref[Weights]:
                return peer.ref(Weights, "weights")

            async with open_engine([server], model, tmp_path, config=config, find_weights=find) as engine:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(engine.load, Snapshot(version=1, is_kept=True))
                    while server.paths.count(RECEIVE) < 3:
                        await anyio.lowlevel.checkpoint()
                    trainer.kill()
                assert not engine.engines[0].server.is_ready
                assert server.label == "0"
                await engine.load(Snapshot(version=2, path=model))
                assert {chunk.version for chunk in await collect(engine, ask())} == {2}


async def test_unfit_or_expired_weights_are_not_sent(model: Path, tmp_path: Path) -> None:
    """They are looked at before any server hears of them; the old weights stay."""
    async with open_server_stack(model, tmp_path) as (engine, (server,), trainer):
        with pytest.raises(EngineError, match="kept no longer"):
            await engine.load(Snapshot(version=7, is_kept=True))
        trainer.policy.num_lost = 3
        with pytest.raises(ModelError, match="does not fit"):
            await engine.load(trainer.step())

        assert not {RECEIVE, LOAD} & set(server.paths)
        assert engine.version == 0
        assert ids_of(await collect(engine, ask())) == WHOLE


async def test_missing_weight_store_is_named(model: Path, tmp_path: Path) -> None:
    """A kept snapshot is of no use to an engine that cannot ask for it; other servers cannot be sent it."""
    async with (
        open_sglang_server(EchoEngine(script, vocab_size=384), model=model) as server,
        open_engine([server], model, tmp_path) as engine,
    ):
        with pytest.raises(ModelError, match="does not know"):
            await engine.load(Snapshot(version=1, is_kept=True))
    async with open_server("http://127.0.0.1:1", VllmDialect(), CONFIG, changed=ChangeSignal(), processes=None) as vllm:
        with pytest.raises(ConfigError, match="vllm cannot be sent weights"):
            create_weight_receiver(vllm, anyio.lowlevel.checkpoint)
