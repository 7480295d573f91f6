"""Replicas: what a generation costs through the router, beside the generation actor alone, and what publishing costs.

The engine says what it was told to without computing, so that what is measured is the way to it: from the asker to one
actor, and from the asker through the router to one of eight. ``per stream`` is a generation of one chunk, ``per chunk``
what each further one adds. Weights have the shapes of SmolLM2-135M (a tenth of them with ``--quick``) and are published
to an engine in the same process, by reference and by disk; that is wall time, of the machine's disk as well.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio
import torch
from attrs import define
from benchmarks.harness import Result
from benchmarks.null_engine import IdleEngine

from areal_actors.actors.generation import GenerationActor
from areal_actors.actors.replicas import GenerationRouter
from areal_actors.core import ActorSystem, Ref
from areal_actors.domain import (
    Chunk,
    EngineInfo,
    EngineRequest,
    FinishReason,
    SampleKey,
)
from areal_actors.engines.torch import TorchEngine, TorchEngineConfig
from areal_actors.messages import AddReplica, Generate, Generation
from areal_actors.training.publication import DiskPublisher, MemoryPublisher, Publisher

_NUM_REPLICAS = 8
_NUM_CHUNKS = 32
_MAX_RATIO = 3.0
"""Of a stream to one without a router: there are two streams where there was one, and a choice."""
_MAX_US_PER_CHUNK = {"asyncio": 15.0, "trio": 25.0}
"""Not as a ratio: a chunk that waits in a buffer costs next to nothing, and one that comes from a server far more."""

_ids = count()


class Tape(IdleEngine):
    """An engine that plays chunks of one token."""

    def __init__(self, num_chunks: int) -> None:
        self.info = EngineInfo(
            name="tape",
            model="tape",
            vocab_size=9,
            context_length=2**20,
            dtype="none",
            device="none",
            max_concurrent=2**10,
        )
        chunks = [_chunk(None)] * (num_chunks - 1)
        self._chunks = [*chunks, _chunk(FinishReason.LENGTH)]

    @asynccontextmanager
    async def generate(self, request: EngineRequest) -> AsyncIterator[AsyncIterator[Chunk]]:  # noqa: ARG002
        """The same every time."""
        yield self._play()

    async def _play(self) -> AsyncIterator[Chunk]:
        for chunk in self._chunks:
            yield chunk


def _chunk(finish: FinishReason | None) -> Chunk:
    return Chunk(token_ids=[1], logprobs=[-0.5], raw_logprobs=[-0.5], version=0, finish=finish)


def run(quick: bool) -> list[Result]:  # noqa: FBT001 - the signature of every benchmark
    """CPU time per stream and per chunk, with and without a router, and the time that a publication takes."""
    num_streams, rounds = (500, 3) if quick else (2_000, 7)
    results = []
    for backend in ("asyncio", "trio"):
        alone, routed = (
            anyio.run(partial(_measure, is_routed, num_streams, rounds), backend=backend) for is_routed in (False, True)
        )
        for name, value in alone.items():
            results.append(_figure(f"{backend}: actor alone, {name}", value))
            gate = _MAX_US_PER_CHUNK[backend] if name == "per chunk" else None
            results.append(_figure(f"{backend}: {_NUM_REPLICAS} replicas, {name}", routed[name], gate=gate))
        results.append(_ratio(backend, "per stream", routed["per stream"] / alone["per stream"]))
    return [*results, *anyio.run(_measure_publishing, quick)]


def _figure(name: str, value: float, *, unit: str = "µs/operation", gate: float | None = None) -> Result:
    return Result(benchmark="replicas", name=name, value=value, unit=unit, gate=gate)


def _ratio(backend: str, name: str, value: float) -> Result:
    return Result(
        benchmark="replicas",
        name=f"{backend}: {name}, ratio",
        value=value,
        unit="ratio",
        gate=_MAX_RATIO,
        baseline=f"{backend}: actor alone, {name}",
    )


async def _measure(is_routed: bool, num_streams: int, rounds: int) -> dict[str, float]:  # noqa: FBT001
    short = await _cpu_us(is_routed, 1, num_streams, rounds)
    long = await _cpu_us(is_routed, 1 + _NUM_CHUNKS, num_streams, rounds)
    return {"per stream": short, "per chunk": (long - short) / _NUM_CHUNKS}


async def _cpu_us(is_routed: bool, num_chunks: int, num_streams: int, rounds: int) -> float:  # noqa: FBT001
    """CPU microseconds per generation, the minimum of the rounds."""
    async with ActorSystem.open() as system:
        generation = await _open(system, is_routed, num_chunks)
        best = float("inf")
        for _ in range(rounds + 1):  # the first one warms up
            start = time.process_time()
            for number in range(num_streams):
                request = EngineRequest(
                    id=str(next(_ids)), prompt=[1, 2], key=SampleKey(seed=1), routing_key=f"s{number % 100}"
                )
                async with generation.stream(Generate(request=request)) as chunks:
                    async for _ in chunks:
                        pass
            best = min(best, time.process_time() - start)
    return best / num_streams * 1e6


async def _open(system: ActorSystem, is_routed: bool, num_chunks: int) -> Ref[Generation]:  # noqa: FBT001
    if not is_routed:
        return await system.spawn(GenerationActor(Tape(num_chunks)))
    router = await system.spawn(GenerationRouter())
    for number in range(_NUM_REPLICAS):
        ref = await system.spawn(GenerationActor(Tape(num_chunks)))
        await router.ask(AddReplica(name=str(number), ref=ref))
    await anyio.wait_all_tasks_blocked()
    return router


@define
class _Policy:
    model: Any
    version: int = 0

    def state_dict(self) -> dict[str, Any]:
        return dict(self.model.state_dict())


def _create_model(num_layers: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1_536,
        num_hidden_layers=num_layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


async def _measure_publishing(quick: bool) -> list[Result]:  # noqa: FBT001
    """Seconds from the end of a step until an engine has the weights."""
    with torch.no_grad():
        model = _create_model(2 if quick else 30)
    policy, results = _Policy(model), []
    with TemporaryDirectory() as directory:
        settings = TorchEngineConfig(dtype="float32", device="cpu", max_length=64)
        async with TorchEngine.open(settings, model=model) as engine:
            publishers: dict[str, Publisher] = {
                "memory": MemoryPublisher(),
                "disk, float32": DiskPublisher(root=Path(directory)),
                "disk, bfloat16": DiskPublisher(root=Path(directory), dtype=torch.bfloat16),
            }
            for name, publisher in publishers.items():
                written, loaded = await _publish(engine, publisher, policy, 2 if quick else 3)
                results.append(_figure(f"publish by {name}, until it is written", written * 1e3, unit="ms"))
                results.append(_figure(f"publish by {name}, until it is loaded", loaded * 1e3, unit="ms"))
    return results


async def _publish(engine: TorchEngine, publisher: Publisher, policy: _Policy, rounds: int) -> tuple[float, float]:
    times = []
    for _ in range(rounds):
        policy.version += 1
        start = time.perf_counter()
        snapshot = publisher.publish(policy)
        written = time.perf_counter()
        await engine.load(snapshot)
        times.append((written - start, time.perf_counter() - start))
    return min(written for written, _ in times), min(loaded for _, loaded in times)
