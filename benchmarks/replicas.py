"""Replicas: what a generation costs through the router, beside the generation actor alone.

The engine says what it was told to without computing, so that what is measured is the way to it: from the asker to one
actor, and from the asker through the router to one of eight. ``per stream`` is a generation of one chunk, ``per chunk``
what each further one adds.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import count

import anyio
from benchmarks.harness import Result
from benchmarks.null_engine import IdleEngine

from areal_actors.domain import (
    Chunk,
    EngineInfo,
    EngineRequest,
    FinishReason,
    SampleKey,
)
from areal_actors.generation.actor import GenerationActor
from areal_actors.generation.replicas import ReplicaSet
from areal_actors.kernel import ActorSystem, Ref
from areal_actors.messages import AddReplica, Generate, Generation

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
    """CPU time per stream and per chunk, with and without a router."""
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
    return results


def _figure(name: str, value: float, *, gate: float | None = None) -> Result:
    return Result(benchmark="replicas", name=name, value=value, unit="µs/operation", gate=gate)


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
    router = await system.spawn(ReplicaSet())
    for number in range(_NUM_REPLICAS):
        ref = await system.spawn(GenerationActor(Tape(num_chunks)))
        await router.ask(AddReplica(name=str(number), ref=ref))
    await anyio.wait_all_tasks_blocked()
    return router
