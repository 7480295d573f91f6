"""The kernel: the cost of an ask, a tell, a streamed item, and an ask of another process over a unix socket.

The baseline of the first two does the same sum with an ``asyncio.Queue`` and a future for each reply, measured in the
same run. It has no types, no cancellation of running work, no errors to the asker and no supervision. The cost of an
ask of another process is the CPU time of both processes.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
from attrs import frozen
from benchmarks.harness import Result

from areal_actors.kernel import Actor, ActorSystem, Message, Ref, StreamMessage
from areal_actors.kernel.remote import connect, listen

_NUM_ASKERS = 64
_GATES = {"ask": 25.0, "tell": 2.0, "ask of another process, 1 KiB": 300.0}
_SECRET = b"a secret of two benchmark processes"

Measurement = Callable[[], Awaitable[object]]


class Sums:
    """Address of the adder."""


@frozen(kw_only=True)
class Add(Message[Sums, int]):
    """Asked: add and return the sum."""

    n: int


@frozen(kw_only=True)
class Weigh(Message[Sums, int]):
    """Asked: the number of bytes."""

    content: bytes


@frozen(kw_only=True)
class CpuSeconds(Message[Sums, float]):
    """Asked: the CPU time of the actor's process."""


@frozen(kw_only=True)
class Note(Message[Sums, None]):
    """Told: add."""

    n: int


@frozen(kw_only=True)
class Count(StreamMessage[Sums, int]):
    """Streamed: the numbers below ``n``."""

    n: int


class Adder(Actor[Sums]):
    """Does next to nothing, so that what is measured is the way to it."""

    def __init__(self) -> None:
        self.total = 0

    @Add.handler
    async def add(self, message: Add) -> int:
        """Add in turn."""
        self.total += message.n
        return self.total

    @Weigh.handler
    async def weigh(self, message: Weigh) -> int:
        """Count bytes."""
        return len(message.content)

    @CpuSeconds.handler
    async def cpu_seconds(self, message: CpuSeconds) -> float:  # noqa: ARG002 - the message has no fields
        """Return user and system time."""
        return time.process_time()

    @Note.handler
    async def note(self, message: Note) -> None:
        """Add without a reply."""
        self.total += message.n

    @Count.handler
    async def count(self, message: Count) -> AsyncIterator[int]:
        """Count upwards."""
        for n in range(message.n):
            yield n


def run(quick: bool) -> list[Result]:  # noqa: FBT001 - the signature of every benchmark
    """Return the CPU time per operation on both loops, and the ratio of a serial ask to the baseline."""
    num_operations, rounds = (2_000, 3) if quick else (10_000, 7)
    baseline = anyio.run(_measure_baseline, num_operations, rounds)
    results = [_result("asyncio", f"queue and future, {name}", value) for name, value in baseline.items()]
    for backend in ("asyncio", "trio"):
        figures = anyio.run(_measure_actor, num_operations, rounds, backend=backend)
        with _other_process(backend) as path:
            figures["ask of another process, 1 KiB"] = anyio.run(_measure_remote, path, rounds, backend=backend)
        results += [_result(backend, name, value) for name, value in figures.items()]
        if backend == "asyncio":
            results += [_ratio(name, figures[name] / baseline[name]) for name in baseline]
    return results


def _result(backend: str, name: str, value: float) -> Result:
    gate = _GATES.get(name)
    return Result(benchmark="kernel", name=f"{backend}: {name}", value=value, unit="µs/operation", gate=gate)


def _ratio(name: str, value: float) -> Result:
    baseline = f"asyncio: queue and future, {name}"
    return Result(benchmark="kernel", name=f"asyncio: {name}, ratio", value=value, unit="ratio", baseline=baseline)


async def _measure_actor(num_operations: int, rounds: int) -> dict[str, float]:
    async with ActorSystem.open() as system:
        ref = await system.spawn(Adder())
        add = Add(n=1)
        operations: dict[str, Measurement] = {
            "ask": lambda: _repeat(lambda: ref.ask(add), num_operations),
            "ask, 64 in flight": lambda: _repeat_in_flight(lambda: ref.ask(add), num_operations),
            "tell": lambda: _tell(ref, num_operations),
            "streamed item": lambda: _stream(ref, num_operations),
        }
        return {name: await _cpu_us(operation, num_operations, rounds) for name, operation in operations.items()}


@contextmanager
def _other_process(backend: str) -> Iterator[str]:
    """Serve an adder in a child process; yields the path of its socket."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "socket")
        command = [sys.executable, "-m", "benchmarks.kernel", backend, str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
            try:
                assert child.stdout is not None
                child.stdout.readline()
                yield str(path)
            finally:
                child.kill()


async def _serve(path: str) -> None:
    async with ActorSystem.open() as system:
        adder = await system.spawn(Adder())
        async with listen(f"unix:{path}", secret=_SECRET, expose={"adder": adder}):
            print("listening", flush=True)
            await anyio.sleep_forever()


async def _measure_remote(path: str, rounds: int, num_asks: int = 640) -> float:
    best, message = float("inf"), Weigh(content=bytes(1024))
    async with connect(f"unix:{path}", secret=_SECRET) as peer:
        adder = peer.ref(Sums, "adder")
        for _ in range(rounds):
            start = time.process_time() + await adder.ask(CpuSeconds())
            await _repeat(lambda: adder.ask(message), num_asks)
            best = min(best, time.process_time() + await adder.ask(CpuSeconds()) - start)
    return best / num_asks * 1e6


async def _measure_baseline(num_operations: int, rounds: int) -> dict[str, float]:
    """The least that a mailbox with replies can be on asyncio."""
    queue: asyncio.Queue[tuple[int, asyncio.Future[int] | None]] = asyncio.Queue(1024)
    loop = asyncio.get_running_loop()

    async def serve() -> None:
        total = 0
        while True:
            n, reply = await queue.get()
            total += n
            if reply is not None:
                reply.set_result(total)

    async def ask() -> int:
        reply: asyncio.Future[int] = loop.create_future()
        await queue.put((1, reply))
        return await reply

    async def tell() -> None:
        for _ in range(num_operations):
            await queue.put((1, None))
        await ask()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(serve)
        operations: dict[str, Measurement] = {
            "ask": lambda: _repeat(ask, num_operations),
            "ask, 64 in flight": lambda: _repeat_in_flight(ask, num_operations),
            "tell": tell,
        }
        figures = {name: await _cpu_us(operation, num_operations, rounds) for name, operation in operations.items()}
        tasks.cancel_scope.cancel()
    return figures


async def _cpu_us(operation: Measurement, num_operations: int, rounds: int) -> float:
    """As ``harness.cpu_us_per_operation``, inside a running event loop."""
    best = float("inf")
    for _ in range(rounds):
        start = time.process_time()
        await operation()
        best = min(best, time.process_time() - start)
    return best / num_operations * 1e6


async def _repeat(operation: Measurement, times: int) -> None:
    for _ in range(times):
        await operation()


async def _repeat_in_flight(operation: Measurement, times: int) -> None:
    async with anyio.create_task_group() as tasks:
        for _ in range(_NUM_ASKERS):
            tasks.start_soon(_repeat, operation, times // _NUM_ASKERS)


async def _tell(ref: Ref[Sums], times: int) -> None:
    note = Note(n=1)
    for _ in range(times):
        await ref.tell(note)
    await ref.ask(Add(n=0))


async def _stream(ref: Ref[Sums], times: int) -> None:
    async with ref.stream(Count(n=times)) as items:
        async for _ in items:
            pass


if __name__ == "__main__":
    anyio.run(_serve, sys.argv[2], backend=sys.argv[1])
