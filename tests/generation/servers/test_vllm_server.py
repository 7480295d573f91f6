"""vLLM's dialect keeps the engine contract over a real socket, in front of the public fake over the embedded engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.generation.servers.server_stack import ReplicatedServers, open_replicated
from tests.generation.tiny_models import create_llama
from transformers import LlamaForCausalLM

from areal_actors.domain import EngineRequest, SampleKey, Sampling, Snapshot, as_floats
from areal_actors.errors import EngineError
from areal_actors.generation.servers.config import ServerConfig
from areal_actors.generation.servers.vllm import VllmDialect
from areal_actors.generation.torch import TorchEngine, TorchEngineConfig
from areal_actors.testing.engines import EchoEngine
from areal_actors_testing.engine_contract import ENGINE_CHECKS, Check, Subject, collect, join_ids
from areal_actors_testing.vllm_server import Failure, VllmServer, open_vllm_server

PROMPT = np.random.default_rng(3).integers(0, 96, 40)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> tuple[LlamaForCausalLM, Path]:
    """A model and its directory."""
    model, directory = create_llama(), tmp_path_factory.mktemp("model")
    model.save_pretrained(directory)
    return model, directory


@pytest.fixture
def open_remote(model, tmp_path) -> Callable:
    """Opens an engine of one fake server over ``engine``, by default over an echo."""
    _, directory = model

    @asynccontextmanager
    async def open_it(engine=None, **settings) -> AsyncIterator[tuple[ReplicatedServers, VllmServer]]:
        engine = engine or EchoEngine(vocab_size=96, context_length=256)
        config = ServerConfig(health_interval_seconds=0.05, **settings)
        async with (
            open_vllm_server(engine, model=directory) as server,
            open_replicated(
                VllmDialect(),
                config,
                urls=[server.url],
                model=directory,
                snapshot=Snapshot(version=0, path=directory),
                publish_directory=tmp_path,
            ) as remote,
        ):
            yield remote, server

    return open_it


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # on trio, SGLang's dialect passes the same contract
@pytest.mark.parametrize("check", ENGINE_CHECKS, ids=lambda check: check.__name__)
async def test_vllm_dialect_keeps_the_engine_contract(open_remote, model, check: Check) -> None:
    """What the check says holds through HTTP, on this event loop, for weights that travel by disk."""
    network, _ = model

    def recompute(prompt, output):
        ids = torch.tensor(np.concatenate([prompt, output]), dtype=torch.long)
        with torch.no_grad():
            logprobs = torch.log_softmax(network(ids[None]).logits[0, len(prompt) - 1 : -1], -1)
        return as_floats(logprobs.gather(1, ids[len(prompt) :, None])[:, 0])

    async with (
        TorchEngine.open(TorchEngineConfig(dtype="float32", max_concurrent=4), model=network) as engine,
        open_remote(engine) as (remote, _),
    ):
        subject = Subject(
            engine=remote,
            create_snapshot=lambda version: Snapshot(version=version, state=network.state_dict()),
            prompt=PROMPT,
            num_tokens=100,
            recompute=recompute,
        )
        await check(subject)


@pytest.mark.anyio
@pytest.mark.parametrize("failure", Failure)
async def test_failed_answer_is_retried(open_remote, failure: Failure) -> None:
    """What a server fails to answer is answered whole all the same, each token once and in its place."""
    async with open_remote() as (remote, server):
        server.failures.append(failure)
        request = EngineRequest(id="1", prompt=PROMPT, sampling=Sampling(max_new_tokens=20), key=SampleKey(seed=1))
        chunks = await collect(remote, request)

    assert 20 == len(join_ids(chunks))
    assert 2 == len(server.bodies)
    assert 20 == sum(1 for chunk in chunks for _ in chunk.token_ids if chunk.version == 0)


@pytest.mark.anyio
async def test_answer_that_always_fails_is_an_error(open_remote) -> None:
    """A server that fails every time is named, with what it said."""
    async with open_remote(max_failures=2) as (remote, server):
        server.failures.extend([Failure.ERROR] * 9)
        request = EngineRequest(id="1", prompt=PROMPT, sampling=Sampling(), key=SampleKey(seed=1))

        with pytest.raises(EngineError, match="The engine core died"):
            await collect(remote, request)
