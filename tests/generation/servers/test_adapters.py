"""Adapters on servers: each token under one version, all old ones unloaded, and servers that cannot take them."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack, asynccontextmanager

import anyio
import pytest
from attrs import evolve
from safetensors.torch import save_file
from tests.generation.servers.server_stack import CONFIG, WHOLE, ask, open_replicated, script

from areal_actors.domain import Snapshot
from areal_actors.domain.grammar import FreeText
from areal_actors.errors import EngineError, ModelError
from areal_actors.generation.servers.config import AdapterSlots, Backend
from areal_actors.generation.servers.launching import find_kind, format_command
from areal_actors.testing.engines import EchoEngine
from areal_actors_testing.engine_contract import collect
from areal_actors_testing.sglang_server import open_sglang_server
from areal_actors_testing.vllm_server import open_vllm_server

pytestmark = pytest.mark.anyio

SLOTS = AdapterSlots(rank=8)
SERVERS = {Backend.SGLANG: open_sglang_server, Backend.VLLM: open_vllm_server}
ECHO = {"vocab_size": 384, "context_length": 256}


@pytest.fixture
def anyio_backend() -> str:
    """Use one event loop: adapters change nothing that depends on it."""
    return "asyncio"


@pytest.fixture(params=list(SERVERS))
def backend(request) -> Backend:
    """Each kind of server."""
    return request.param


@pytest.fixture
def model(tmp_path):
    """The directory of a base model, as far as the engine reads it."""
    import torch

    directory = tmp_path / "base"
    directory.mkdir()
    (directory / "config.json").write_text('{"vocab_size": 384}')
    save_file({"w": torch.zeros(2)}, directory / "model.safetensors")
    return directory


def snapshot(model, version: int, *, rank: int = 8) -> Snapshot:
    """An adapter of that version."""
    import torch

    directory = model.parent / f"adapter-{version}"
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps({"r": rank}))
    save_file({"a": torch.zeros(2)}, directory / "adapter_model.safetensors")
    return Snapshot(version=version, path=model, adapter=directory)


@asynccontextmanager
async def opened(backend, model, *, num_servers=1, is_gated=False, max_adapter_rank=8, slots=SLOTS, served=None):
    """An engine of fakes over echoes, with adapters."""
    async with AsyncExitStack() as stack:
        engines = [EchoEngine(script, is_gated=is_gated, **ECHO) for _ in range(num_servers)]
        servers = [
            await stack.enter_async_context(
                SERVERS[backend](engine, model=served or model, max_adapter_rank=max_adapter_rank)
            )
            for engine in engines
        ]
        engine = await stack.enter_async_context(
            open_replicated(
                find_kind(backend).create(),
                CONFIG,
                urls=[server.url for server in servers],
                model=model,
                snapshot=Snapshot(version=0, path=model),
                publish_directory=model.parent / "published",
                adapters=slots,
            )
        )
        yield engine, servers, engines


def named(server, backend) -> list[str]:
    """The adapters that the requests to a server named, in order."""
    return [body.get("lora_path" if backend is Backend.SGLANG else "model") for body in server.bodies]


async def refusal(opening) -> str:
    """The error with which an engine does not open; the fakes around it may wrap it in groups."""
    try:
        async with opening:
            pytest.fail("it opened")
    except (EngineError, BaseExceptionGroup) as error:
        found: BaseException = error
        while isinstance(found, BaseExceptionGroup):
            (found,) = found.exceptions
    assert isinstance(found, EngineError)
    return str(found)


async def test_requests_sample_under_the_adapter_of_their_version(backend, model):
    """On all servers; servers keep one adapter, are never paused and keep their weights."""
    async with opened(backend, model, num_servers=2) as (engine, servers, _):
        for version in (3, 4, 5):
            await engine.load(snapshot(model, version))
            assert engine.version == version
            for number in range(6):
                chunks = await collect(engine, ask(number, routing_key=f"{number}", max_new_tokens=5))
                assert {chunk.version for chunk in chunks if len(chunk.token_ids)} == {version}
        for server in servers:
            names = named(server, backend)
            assert [name.split("-")[2] for name in names] == sorted(name.split("-")[2] for name in names)
            assert [name.split("-")[2] for name in server.adapters] == ["4", "5"]
            assert server.label == "default"
        if backend is Backend.SGLANG:
            assert not {"/pause_generation", "/update_weights_from_disk"} & set(servers[0].paths)
        first = set(servers[0].adapters)
    assert first
    assert not servers[0].adapters  # unloaded at the end, for the next run


async def test_running_request_continues_under_the_new_adapter(backend, model):
    """Its tokens have two versions, none is lost or repeated, and the former adapter is not unloaded under it."""
    async with opened(backend, model, is_gated=True) as (engine, (server,), (echo,)):
        await engine.load(snapshot(model, 1))
        found = []
        async with engine.generate(ask(max_new_tokens=40)) as chunks, anyio.create_task_group() as tasks:
            echo.release(7)
            async for chunk in chunks:
                found.append(chunk)
                if len(chunk.token_ids) and sum(len(each.token_ids) for each in found) == 7:
                    tasks.start_soon(_load_and_release, engine, echo, snapshot(model, 2))
        ids = [int(token) for chunk in found for token in chunk.token_ids]
        versions = [chunk.version for chunk in found for _ in chunk.token_ids]
        assert ids == WHOLE
        assert versions == [1] * 7 + [2] * 33
        assert [name.split("-")[2] for name in named(server, backend)] == ["1", "2"]
        await engine.load(snapshot(model, 3))
        assert [name.split("-")[2] for name in server.adapters] == ["2", "3"]


async def _load_and_release(engine, echo, following):
    await engine.load(following)
    echo.release(100)


async def test_grammar_is_sampled_under_one_adapter(model):
    """It cannot be taken up in the middle, so its adapter stays until it has ended."""
    async with opened(Backend.SGLANG, model, is_gated=True) as (engine, (server,), (echo,)):
        await engine.load(snapshot(model, 1))
        (one,) = engine.engines
        one._info = evolve(one._info, has_grammars=True)
        echo._info = evolve(echo._info, has_grammars=True)
        request = evolve(ask(max_new_tokens=40), grammar=FreeText())
        found = []
        async with engine.generate(request) as chunks:
            echo.release(3)
            async for chunk in chunks:
                found.append(chunk)
                if len(found) == 3:
                    for version in (2, 3, 4):
                        await engine.load(snapshot(model, version))
                    assert [name.split("-")[2] for name in server.adapters] == ["1", "3", "4"]
                    echo.release(100)
        assert {chunk.version for chunk in found} == {1}


async def test_returning_server_gets_the_adapter(model):
    """Before requests go there, and without loading weights."""
    async with opened(Backend.SGLANG, model) as (engine, (server,), _):
        await engine.load(snapshot(model, 1))
        await collect(engine, ask(0, max_new_tokens=5))
        await server.kill()
        await server.start()
        chunks = await collect(engine, ask(1, max_new_tokens=5))
        assert {chunk.version for chunk in chunks} == {1}
        assert len(server.adapters) == 1
        assert "/update_weights_from_disk" not in server.paths


async def test_two_runs_share_servers(backend, model):
    """Each samples under adapters of its own, and unloads only these."""
    async with opened(backend, model) as (first, (server,), _):
        sharing = open_replicated(
            find_kind(backend).create(),
            CONFIG,
            urls=[server.url],
            model=model,
            snapshot=Snapshot(version=0, path=model),
            publish_directory=model.parent / "second",
            adapters=SLOTS,
        )
        async with sharing as second:
            await first.load(snapshot(model, 1))
            await second.load(snapshot(model, 7))
            for engine, version in ((first, 1), (second, 7), (first, 1)):
                chunks = await collect(engine, ask(max_new_tokens=5))
                assert {chunk.version for chunk in chunks} == {version}
            assert len(server.adapters) == 2
        assert [name.split("-")[2] for name in server.adapters] == ["1"]


async def test_servers_without_lora_are_named(backend, model):
    """With the options that they lack, before anything is sampled."""
    told = await refusal(opened(backend, model, max_adapter_rank=0))
    assert "started without LoRA" in told
    assert "--max-lora-rank 8" in told
    assert "trainer.lora.serving=merged" in told
    told = await refusal(opened(backend, model, slots=AdapterSlots(rank=16)))
    assert "rank 8 at most, and trainer.lora.rank is 16" in told


async def test_servers_of_another_base_are_refused(backend, model, tmp_path):
    """An adapter means nothing there."""
    (tmp_path / "other").mkdir()
    told = await refusal(opened(backend, model, served=tmp_path / "other"))
    assert f"serves {tmp_path / 'other'}, and the adapter is one of {model}" in told


async def test_refused_adapter_changes_nothing(backend, model):
    """Neither the version nor the adapter of the next requests."""
    async with opened(backend, model, num_servers=2) as (engine, servers, _):
        await engine.load(snapshot(model, 1))
        empty = evolve(snapshot(model, 2), adapter=model)
        for wrong in (snapshot(model, 3, rank=64), empty, Snapshot(version=2, path=model)):
            with pytest.raises((ModelError, EngineError)):
                await engine.load(wrong)
            chunks = await collect(engine, ask(max_new_tokens=5))
            assert {chunk.version for chunk in chunks} == {engine.version} == {1}
        assert [len(server.adapters) for server in servers] == [1, 1]


async def test_servers_opened_for_weights_refuse_adapters(model):
    """Instead of loading the base weights and calling them the new version."""
    async with opened(Backend.SGLANG, model, slots=None) as (engine, _, _), anyio.create_task_group():
        with pytest.raises(ModelError, match=r"trainer\.lora\.serving to merged"):
            await engine.load(snapshot(model, 1))


def test_started_servers_have_room_for_adapters(model):
    """SGLang takes any rank, vLLM the next that it supports."""
    slots = AdapterSlots(rank=12)
    commands = {
        backend: " ".join(format_command(find_kind(backend), CONFIG, model=model, port=1, adapters=slots))
        for backend in SERVERS
    }
    assert "--enable-lora --max-lora-rank 12 --max-loras-per-batch 4 --lora-target-modules all" in commands["sglang"]
    assert "--enable-lora --max-lora-rank 16" in commands["vllm"]
