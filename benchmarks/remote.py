"""Remote actors: what an ask and an array cost between two processes over a unix socket, beside a raw asyncio socket.

CPU time is that of both processes together. The baselines are measured in the same run: a length and 1 KiB written to a
stream of asyncio or of trio and a few bytes read back, and 16 MiB received from a blocking socket into fresh memory.
They have no types, no names, no bounds and no way to cancel. The gates are CPU microseconds on two shared cores.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import numpy as np
from attrs import frozen
from benchmarks.harness import Result

from areal_actors.domain import Ints
from areal_actors.kernel import Actor, ActorSystem, Message, Ref
from areal_actors.kernel.remote import connect, listen
from areal_actors.lib.loops import is_trio

_SECRET = b"a secret of two benchmark processes"
_NUM_ASKERS = 64
_MEBIBYTES = 16
_GATES = {
    "asyncio": {"ask of 1 KiB": 300.0, "ask of 1 KiB, 64 in flight": 65.0, "array of 16 MiB, per MiB": 800.0},
    "trio": {"ask of 1 KiB": 300.0, "ask of 1 KiB, 64 in flight": 65.0, "array of 16 MiB, per MiB": 800.0},
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
        with _child("raw", backend) as path:
            raw = anyio.run(_measure_raw, path, num_asks, rounds, backend=backend)
        for name, value in raw.items():
            results += [_result(backend, f"raw socket, {name}", value), _ratio(backend, name, figures[name] / value)]
    return results


def _result(backend: str, name: str, value: float) -> Result:
    gate = _GATES[backend].get(name)
    unit = "µs/MiB" if "MiB" in name else "µs/operation"
    return Result(benchmark="remote", name=f"{backend}: {name}", value=value, unit=unit, gate=gate)


def _ratio(backend: str, name: str, value: float) -> Result:
    return Result(
        benchmark="remote",
        name=f"{backend}: {name}, ratio",
        value=value,
        unit="ratio",
        baseline=f"{backend}: raw socket, {name}",
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


async def _measure_raw(path: str, num_asks: int, rounds: int) -> dict[str, float]:
    stream, content, best = await RawStream.open(path), bytes(1024), float("inf")

    async def ask(message: bytes) -> int:
        await stream.write(len(message).to_bytes(4, "little") + message)
        return int.from_bytes(await stream.read(8), "little")

    for _ in range(rounds):
        start = time.process_time() + await ask(b"") / 1e9
        for _ in range(num_asks):
            await ask(content)
        best = min(best, time.process_time() + await ask(b"") / 1e9 - start)
    await stream.close()
    return {"ask of 1 KiB": best / num_asks * 1e6, "array of 16 MiB, per MiB": _measure_raw_arrays(rounds)}


@frozen
class RawStream:
    """What asyncio and trio offer themselves, under one name."""

    read: Callable[[int], Awaitable[bytes]]
    """Exactly so many bytes, or fewer at the end."""
    write: Callable[[bytes], Awaitable[object]]
    close: Callable[[], Awaitable[object]]

    @classmethod
    async def open(cls, path: str) -> RawStream:
        """Connect to a unix socket."""
        if not is_trio():
            return cls.of_asyncio(*await asyncio.open_unix_connection(path))
        import trio

        return cls.of_trio(await trio.open_unix_socket(path))

    @classmethod
    def of_asyncio(cls, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> RawStream:
        """A pair of streams."""

        async def read(num_bytes: int) -> bytes:
            try:
                return await reader.readexactly(num_bytes)
            except asyncio.IncompleteReadError:
                return b""

        async def write(data: bytes) -> None:
            writer.write(data)

        async def close() -> None:
            writer.close()

        return cls(read, write, close)

    @classmethod
    def of_trio(cls, stream: Any) -> RawStream:
        """A stream; with a buffer, as asyncio's has one."""
        buffer = bytearray()

        async def read(num_bytes: int) -> bytes:
            while len(buffer) < num_bytes:
                data = await stream.receive_some(65536)
                if not data:
                    return b""
                buffer.extend(data)
            data = bytes(buffer[:num_bytes])
            del buffer[:num_bytes]
            return data

        return cls(read, stream.send_all, stream.aclose)


async def _answer_raw(stream: RawStream) -> None:
    while length := await stream.read(4):
        content = await stream.read(int.from_bytes(length, "little")) if any(length) else b""
        number = time.process_time_ns() if not content else len(content)
        await stream.write(number.to_bytes(8, "little"))


def _measure_raw_arrays(rounds: int) -> float:
    """CPU µs per MiB of both ends, which are threads here: the kernel copies in and out, and nothing else happens."""
    array, best = np.ones(_MEBIBYTES << 18, dtype=np.int32), float("inf")
    near, far = socket.socketpair()
    with near, far:
        for _ in range(rounds):
            start = time.process_time()
            sender = threading.Thread(target=near.sendall, args=(array.data.cast("B"),))
            sender.start()
            received = memoryview(np.empty(array.nbytes, np.uint8))
            while received:
                received = received[far.recv_into(received[: 1 << 18]) :]
            sender.join()
            best = min(best, time.process_time() - start)
    return best / _MEBIBYTES * 1e6


async def _serve_raw(path: str) -> None:
    if is_trio():
        import trio

        listening = socket.socket(socket.AF_UNIX)
        listening.bind(path)
        listening.listen()
        print("listening", flush=True)
        raw, _ = await trio.socket.from_stdlib_socket(listening).accept()
        await _answer_raw(RawStream.of_trio(trio.SocketStream(raw)))
        return
    server = await asyncio.start_unix_server(
        lambda reader, writer: _answer_raw(RawStream.of_asyncio(reader, writer)), path
    )
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
