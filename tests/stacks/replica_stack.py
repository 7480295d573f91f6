"""A router with replicas that can be killed, held back and brought back: their engines count upwards."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from copy import copy
from itertools import count as numbers
from pathlib import Path

import anyio
from anyio.lowlevel import checkpoint
from attrs import define, field

from areal_actors.domain import Chunk, EngineRequest, Ints, SampleKey, Sampling, Snapshot
from areal_actors.errors import ModelError
from areal_actors.generation.replicas import Replica, ReplicaSet, ReplicaSetConfig
from areal_actors.kernel import ActorSystem, Ref
from areal_actors.messages import AddReplica, Generate, Generation, PublishWeights, Replicas
from areal_actors.run.inference import spawn_generation
from areal_actors.testing.engines import EchoEngine

START = 10
"""The last id of each prompt; what is sampled counts on from there."""

EIGHT = list(range(START + 1, START + 9))
"""What is sampled for a request of the usual length."""

_ids = numbers()


def count(prompt: Ints) -> range:
    """The ids after the last one."""
    return range(int(prompt[-1]) + 1, int(prompt[-1]) + 10_000)


class CountingEngine(EchoEngine):
    """Counts on from its prompt. ``loaded`` are the snapshots that it took; ``refuses`` are versions that it does not.

    Loads wait for ``gate``, which is open.
    """

    def __init__(self, *, version: int = 0, is_gated: bool = False, **options) -> None:
        super().__init__(count, version=version, is_gated=is_gated, **options)
        self.loaded: list[Snapshot] = []
        self.refuses: set[int] = set()
        self.gate = anyio.Event()
        self.gate.set()

    async def load(self, snapshot: Snapshot) -> None:
        await self.gate.wait()
        if snapshot.version in self.refuses:
            await checkpoint()
            raise ModelError("It does not fit.")
        await super().load(snapshot)
        self.loaded.append(snapshot)


def request(num_tokens: int = 8, *, key: str = "", **options) -> EngineRequest:
    """A generation that counts from ``START``."""
    sampling = Sampling(max_new_tokens=num_tokens, **options.pop("sampling", {}))
    return EngineRequest(
        id=f"r-{next(_ids)}", prompt=[1, START], sampling=sampling, key=SampleKey(seed=1), routing_key=key, **options
    )


def on_disk(version: int) -> Snapshot:
    """Weights that anybody can load at any time."""
    return Snapshot(version=version, path=Path(f"/weights/{version}"))


def in_memory(version: int) -> Snapshot:
    """Weights that are lent."""
    return Snapshot(version=version, state={"weight": version})


def ids_of(chunks: list[Chunk]) -> list[int]:
    """What was sampled."""
    return [int(token_id) for chunk in chunks for token_id in chunk.token_ids]


@define
class ReplicaStack:
    """What is open, and short ways to ask it."""

    system: ActorSystem
    actor: ReplicaSet
    router: Ref[Generation | Replicas]
    engines: dict[str, CountingEngine] = field(factory=dict)
    refs: dict[str, Ref[Generation]] = field(factory=dict)
    _num_spawned: int = 0

    async def add(self, name: str, engine: CountingEngine | None = None) -> CountingEngine:
        """A replica of this name joins, or comes back."""
        self._num_spawned += 1
        engine = self.engines[name] = engine or CountingEngine()
        ref = await spawn_generation(self.system, engine, name=f"{name}-{self._num_spawned}")
        self.refs[name] = ref
        await self.router.ask(AddReplica(name=name, ref=ref))
        await anyio.wait_all_tasks_blocked()
        return engine

    async def kill(self, name: str) -> None:
        """It ends at once."""
        await self.refs[name].stop(grace=0)

    async def publish(self, version: int, *, is_lent: bool = False) -> int:
        snapshot = in_memory(version) if is_lent else on_disk(version)
        return await self.router.ask(PublishWeights(snapshot=snapshot))

    def views(self) -> dict[str, Replica]:
        """Copies of the replicas by name."""
        return {name: copy(replica) for name, replica in self.actor.replicas.items()}

    def states(self) -> dict[str, str]:
        return {name: str(replica.state) for name, replica in self.actor.replicas.items()}

    async def generate(self, asked: EngineRequest | None = None) -> list[Chunk]:
        """All chunks of a generation."""
        async with self.router.stream(Generate(request=asked or request())) as chunks:
            return [chunk async for chunk in chunks]


@asynccontextmanager
async def open_replica_stack(
    *names: str, config: ReplicaSetConfig | None = None, version: int = 0
) -> AsyncIterator[ReplicaStack]:
    """A router with replicas of these names, all serving. What hangs for too long fails."""
    with anyio.fail_after(20_000):
        async with ActorSystem.open() as system:
            actor = ReplicaSet(config, version=version)
            stack = ReplicaStack(system, actor, await system.spawn(actor, name="router"))
            for name in names:
                await stack.add(name, CountingEngine(version=version))
            yield stack


class Reading:
    """A generation that is read in the background."""

    def __init__(self, stack: ReplicaStack, asked: EngineRequest) -> None:
        self.stack, self.asked = stack, asked
        self.chunks: list[Chunk] = []
        self.error: Exception | None = None
        self.is_over = False

    async def run(self) -> None:
        try:
            async with self.stack.router.stream(Generate(request=self.asked)) as chunks:
                async for chunk in chunks:
                    self.chunks.append(chunk)
        except Exception as error:  # noqa: BLE001 - looked at by the test
            self.error = error
        self.is_over = True

    @property
    def ids(self) -> list[int]:
        return ids_of(self.chunks)

    @property
    def versions(self) -> list[int]:
        return [chunk.version for chunk in self.chunks]

    def is_whole_under(self, version: int) -> bool:
        """Whether all tokens came, each once, from weights of this version alone."""
        return (EIGHT, {version}) == (self.ids, set(self.versions))


@asynccontextmanager
async def reading(stack: ReplicaStack, asked: EngineRequest):
    """One generation, begun."""
    one = Reading(stack, asked)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one.run)
        await anyio.wait_all_tasks_blocked()
        yield one
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()


def whereabouts(stack: ReplicaStack) -> dict[str, int]:
    """How many generations each engine was asked for."""
    return {name: len(engine.requests) for name, engine in stack.engines.items()}
