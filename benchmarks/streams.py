"""Streams of a placed engine: what a generation costs the controller, through its process and past it.

Three processes: the controller with the router, a worker with an engine that plays chunks of one token, and a worker
that asks. ``controller, per chunk`` is what each further chunk adds there, ``all processes`` the sum over the three.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from itertools import count
from pathlib import Path

import anyio
from anyio import to_thread
from attrs import frozen
from benchmarks.harness import Result
from benchmarks.replicas import Tape

from areal_actors.domain import EngineRequest, SampleKey
from areal_actors.generation.actor import GenerationActor
from areal_actors.generation.rerouting import DirectGeneration
from areal_actors.generation.router import GenerationRouter
from areal_actors.kernel import Actor, ActorSystem, Message, Ref
from areal_actors.kernel.remote import Peer, connect, listen
from areal_actors.messages import AddReplica, Generate, Generation

_SECRET = b"a secret of three benchmark processes"
_NUM_CHUNKS = 64
_NUM_ASKERS = 16
_MAX_US_PER_CHUNK = 3.0
"""What the controller may spend on a chunk that does not pass through it."""

_ids = count()


class Asks:
    """Address of the worker that asks, and of the one with the engine."""


@frozen(kw_only=True)
class Drive(Message[Asks, None]):
    """Read so many generations to their ends, some at once."""

    is_direct: bool
    num_streams: int
    num_chunks: int


@frozen(kw_only=True)
class CpuSeconds(Message[Asks, float]):
    """The CPU time of this process."""


class Asker(Actor[Asks]):
    """Asks through the controller, or past it."""

    def __init__(self, generations: dict[bool, Ref[Generation]]) -> None:
        self._generations = generations

    @Drive.handler
    async def drive(self, message: Drive) -> None:
        """Ask."""
        generation = self._generations[message.is_direct]

        async def read() -> None:
            for _ in range(message.num_streams // _NUM_ASKERS):
                number = next(_ids)
                # The engine plays one chunk, or all of them, as the prompt says.
                request = EngineRequest(
                    id=str(number),
                    prompt=[message.num_chunks, 2],
                    key=SampleKey(seed=1),
                    routing_key=f"s{number % 100}",
                )
                async with generation.stream(Generate(request=request)) as chunks:
                    async for _ in chunks:
                        pass

        async with anyio.create_task_group() as tasks:
            for _ in range(_NUM_ASKERS):
                tasks.start_soon(read)

    @CpuSeconds.handler
    async def cpu_seconds(self, message: CpuSeconds) -> float:  # noqa: ARG002
        """User and system time."""
        return time.process_time()


class TwoTapes(Tape):
    """Plays as many chunks as the first id of the prompt says: one, or all."""

    @asynccontextmanager
    async def generate(self, request: EngineRequest) -> AsyncIterator[AsyncIterator]:
        """The same every time."""
        self._chunks = self._all[-int(request.prompt[0]) :]
        yield self._play()

    def __init__(self) -> None:
        super().__init__(1 + _NUM_CHUNKS)
        self._all = self._chunks


def run(quick: bool) -> list[Result]:  # noqa: FBT001 - the signature of every benchmark
    """CPU time per generation and per chunk, through the controller and past it, on both loops."""
    num_streams, rounds = (320, 2) if quick else (1_600, 5)
    results = []
    for backend in ("asyncio", "trio"):
        with tempfile.TemporaryDirectory() as directory:
            folder = Path(directory) / "own"
            folder.mkdir(mode=0o700)
            with _child("engine", backend, folder) as engine:
                _wait_ready(engine)
                measure = partial(_measure, folder, backend, num_streams, rounds)
                for name, value in anyio.run(measure, backend=backend).items():
                    gate = _MAX_US_PER_CHUNK if name == "controller, past it, per chunk" else None
                    title = f"{backend}: {name}"
                    results.append(Result(benchmark="streams", name=title, value=value, unit="CPU µs", gate=gate))
    return results


@contextmanager
def _child(kind: str, backend: str, folder: Path) -> Iterator[subprocess.Popen]:
    command = [sys.executable, "-m", "benchmarks.streams", kind, backend, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ.copy()) as child:
        try:
            yield child
        finally:
            child.kill()


def _wait_ready(child: subprocess.Popen) -> None:
    assert child.stdout is not None
    child.stdout.readline()


def _at(folder: Path, name: str) -> str:
    return f"unix:{folder}/{name}"


async def _measure(folder: Path, backend: str, num_streams: int, rounds: int) -> dict[str, float]:
    figures: dict[str, float] = {}
    async with ActorSystem.open() as system:
        router = await system.spawn(GenerationRouter())
        async with (
            listen(_at(folder, "controller"), secret=_SECRET, expose={"generation": router}, node="controller"),
            connect(_at(folder, "engine"), secret=_SECRET) as engine,
        ):
            ref = engine.ref(Generation, "replica")
            await router.ask(AddReplica(name="a", ref=ref, address=_at(folder, "engine")))
            with _child("asker", backend, folder) as asker:
                await to_thread.run_sync(_wait_ready, asker)  # it connects to this process
                async with connect(_at(folder, "asker"), secret=_SECRET) as asking:
                    others = [asking.ref(Asks, "asker"), engine.ref(Asks, "clock")]
                    for is_direct, way in ((False, "through it"), (True, "past it")):
                        cost = partial(_cpu_us, others, is_direct, num_streams, rounds)
                        short, long = await cost(1), await cost(1 + _NUM_CHUNKS)
                        for place, before, after in zip(("controller", "all processes"), short, long, strict=True):
                            figures[f"{place}, {way}, per generation"] = before
                            figures[f"{place}, {way}, per chunk"] = (after - before) / _NUM_CHUNKS
    return figures


async def _cpu_us(
    others: list[Ref[Asks]],
    is_direct: bool,  # noqa: FBT001 - of a benchmark's own
    num_streams: int,
    rounds: int,
    num_chunks: int,
) -> tuple[float, float]:
    """CPU microseconds per generation of this process and of all three, the minimum of the rounds."""
    own, total = [], []
    for _ in range(rounds + 1):  # the first one warms up
        before, began = [await one.ask(CpuSeconds()) for one in others], time.process_time()
        await others[0].ask(Drive(is_direct=is_direct, num_streams=num_streams, num_chunks=num_chunks))
        own.append(time.process_time() - began)
        after = [await one.ask(CpuSeconds()) for one in others]
        total.append(own[-1] + sum(after) - sum(before))
    return min(own[1:]) / num_streams * 1e6, min(total[1:]) / num_streams * 1e6


async def _serve_engine(folder: Path) -> None:
    async with ActorSystem.open() as system:
        actors = {"replica": await system.spawn(GenerationActor(TwoTapes())), "clock": await system.spawn(Asker({}))}
        async with listen(_at(folder, "engine"), secret=_SECRET, expose=actors, node="engine"):
            print("ready", flush=True)
            await anyio.sleep_forever()


async def _serve_asker(folder: Path) -> None:
    @asynccontextmanager
    async def dial(address: str) -> AsyncIterator[Peer]:
        async with connect(address, secret=_SECRET) as peer:
            yield peer

    async with connect(_at(folder, "controller"), secret=_SECRET) as controller, ActorSystem.open() as system:
        through = controller.ref(Generation, "generation")
        past = await system.spawn(DirectGeneration(through, dial, actor="replica"))
        asker = await system.spawn(Asker({False: through, True: past}))
        async with listen(_at(folder, "asker"), secret=_SECRET, expose={"asker": asker}, node="asker"):
            print("ready", flush=True)
            await anyio.sleep_forever()


if __name__ == "__main__":
    kind, backend, folder = sys.argv[1:]
    anyio.run(_serve_engine if kind == "engine" else _serve_asker, Path(folder), backend=backend)
