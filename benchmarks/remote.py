"""Remote actors: what an ask and an array cost between two processes over a unix socket, beside a raw asyncio socket.

CPU time is that of both processes together. The baseline writes a length and 1 KiB to an ``asyncio`` stream and reads a
few bytes back, in the same run; it has no types, no names, no bounds and no way to cancel. The gates are CPU
microseconds on two shared cores of a server.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import contextmanager
from pathlib import Path

import anyio
import numpy as np
from attrs import frozen
from benchmarks.harness import Result

from areal_actors.core import Actor, ActorSystem, Message, Ref
from areal_actors.core.remote import connect, listen
from areal_actors.domain import Ints

_SECRET = b"a secret of two benchmark processes"
_NUM_ASKERS = 64
_MEBIBYTES = 16
_GATES = {
    "asyncio": {"ask of 1 KiB": 230.0, "ask of 1 KiB, 64 in flight": 45.0, "array of 16 MiB, per MiB": 800.0},
    "trio": {"ask of 1 KiB": 180.0, "ask of 1 KiB, 64 in flight": 50.0, "array of 16 MiB, per MiB": 800.0},
}


class Scales:
    """Address of the actor that weighs."""


@frozen(kw_only=True)
class Weigh(Message[Scales, int]):
    """Asked: how many bytes there are."""

    id: int
    content: bytes


@frozen(kw_only=True)
class WeighArray(Message[Scales, int]):
    """Asked: the first item and the last one, so that the array must exist."""

    array: Ints


@frozen(kw_only=True)
class CpuSeconds(Message[Scales, float]):
    """Asked: the CPU time of the other process."""


class Scale(Actor[Scales]):
    """Does next to nothing, so that what is measured is the way to it."""

    @Weigh.handler
    async def weigh(self, message: Weigh) -> int:
        """Count bytes."""
        return len(message.content) + message.id

    @WeighArray.handler
    async def weigh_array(self, message: WeighArray) -> int:
        """Look at both ends."""
        return int(message.array[0]) + int(message.array[-1])

    @CpuSeconds.handler
    async def cpu_seconds(self, message: CpuSeconds) -> float:  # noqa: ARG002
        """User and system time."""
        return time.process_time()


def run(quick: bool) -> list[Result]:  # noqa: FBT001 - the signature of every benchmark
    """CPU time per ask and per MiB on both loops, and the ratio to a raw socket."""
    num_asks, rounds = (640, 2) if quick else (3_200, 5)
    results = []
    for backend in ("asyncio", "trio"):
        with _child("actor", backend) as path:
            figures = anyio.run(_measure, path, num_asks, rounds, backend=backend)
        results += [_result(backend, name, value) for name, value in figures.items()]
        if backend == "asyncio":
            with _child("raw", backend) as path:
                raw = asyncio.run(_measure_raw(path, num_asks, rounds))
            results.append(_result("asyncio", "raw socket, ask of 1 KiB", raw))
            results.append(_ratio(figures["ask of 1 KiB"] / raw))
    return results


def _result(backend: str, name: str, value: float) -> Result:
    gate = _GATES[backend].get(name)
    unit = "µs/MiB" if "MiB" in name else "µs/operation"
    return Result(benchmark="remote", name=f"{backend}: {name}", value=value, unit=unit, gate=gate)


def _ratio(value: float) -> Result:
    return Result(
        benchmark="remote",
        name="asyncio: ask of 1 KiB, ratio",
        value=value,
        unit="ratio",
        baseline="asyncio: raw socket, ask of 1 KiB",
    )


@contextmanager
def _child(kind: str, backend: str):
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "own" / "socket"
        path.parent.mkdir(mode=0o700)
        command = [sys.executable, "-m", "benchmarks.remote", kind, backend, str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ.copy()) as child:
            try:
                assert child.stdout is not None
                child.stdout.readline()
                yield str(path)
            finally:
                child.kill()


async def _measure(path: str, num_asks: int, rounds: int) -> dict[str, float]:
    content, array = bytes(1024), np.ones(_MEBIBYTES << 18, dtype=np.int32)
    async with connect(f"unix:{path}", secret=_SECRET) as peer:
        scale = peer.ref(Scales, "scale")

        async def ask() -> None:
            await scale.ask(Weigh(id=1, content=content))

        async def ask_in_flight() -> None:
            async with anyio.create_task_group() as tasks:
                for _ in range(_NUM_ASKERS):
                    tasks.start_soon(_repeat, ask, num_asks // _NUM_ASKERS)

        async def send_arrays() -> None:
            for _ in range(4):
                await scale.ask(WeighArray(array=array))

        return {
            "ask of 1 KiB": await _cpu_us(scale, lambda: _repeat(ask, num_asks), num_asks, rounds),
            "ask of 1 KiB, 64 in flight": await _cpu_us(scale, ask_in_flight, num_asks, rounds),
            "array of 16 MiB, per MiB": await _cpu_us(scale, send_arrays, 4 * _MEBIBYTES, rounds),
        }


async def _cpu_us(scale: Ref[Scales], work: Callable[[], Awaitable[None]], num_operations: int, rounds: int) -> float:
    best = float("inf")
    for _ in range(rounds):
        start = time.process_time() + await scale.ask(CpuSeconds())
        await work()
        best = min(best, time.process_time() + await scale.ask(CpuSeconds()) - start)
    return best / num_operations * 1e6


async def _repeat(work: Callable[[], Awaitable[None]], times: int) -> None:
    for _ in range(times):
        await work()


async def _measure_raw(path: str, num_asks: int, rounds: int) -> float:
    reader, writer = await asyncio.open_unix_connection(path)
    content, best = bytes(1024), float("inf")

    async def ask(message: bytes) -> bytes:
        writer.write(len(message).to_bytes(4, "little") + message)
        return await reader.readexactly(8)

    for _ in range(rounds):
        start = time.process_time() + _seconds(await ask(b""))
        for _ in range(num_asks):
            await ask(content)
        best = min(best, time.process_time() + _seconds(await ask(b"")) - start)
    writer.close()
    return best / num_asks * 1e6


def _seconds(answer: bytes) -> float:
    return int.from_bytes(answer, "little") / 1e9


async def _serve_raw(path: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while length := await reader.read(4):
            content = await reader.readexactly(int.from_bytes(length, "little"))
            number = time.process_time_ns() if not content else len(content)
            writer.write(number.to_bytes(8, "little"))

    server = await asyncio.start_unix_server(answer, path)
    print("listening", flush=True)
    await server.serve_forever()


async def _serve_actor(path: str) -> None:
    async with ActorSystem.open() as system:
        scale = await system.spawn(Scale())
        async with listen(f"unix:{path}", secret=_SECRET, expose={"scale": scale}):
            print("listening", flush=True)
            await anyio.sleep_forever()


if __name__ == "__main__":
    anyio.run({"raw": _serve_raw, "actor": _serve_actor}[sys.argv[1]], sys.argv[3], backend=sys.argv[2])
