"""Descriptors that the proxy keeps of clients that came, asked once, and closed their connections.

::

    python -m benchmarks.connections                 100,000 connections on asyncio, and as many on trio
    python -m benchmarks.connections --count 2000

The server is a process of its own whose limit of open files is lowered to 256, so that a leak would also be seen as a
connection that is not answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import struct
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import click
from attrs import frozen
from benchmarks.harness import Result

__all__ = ["Outcome", "measure", "run"]

LOOPS = ("asyncio", "trio")
GATE = 20
"""Descriptors beyond those that the server held before the first connection."""

_LIMIT = 256
_NUM_AT_ONCE = 16
_NUM_SOURCES = 32
"""Loopback addresses to connect from: each has 28,000 ports, and a closed one rests for a minute."""
_ANSWER_SECONDS = 10.0
_SETTLE_SECONDS = 5.0
_REQUEST = b"GET /health HTTP/1.1\r\nhost: proxy\r\n\r\n"
_RESET = struct.pack("ii", 1, 0)


@frozen(kw_only=True)
class Outcome:
    """What a server held after ``num_connections`` were opened and closed, and what it had not answered."""

    loop: str
    num_connections: int
    num_held: int
    num_unanswered: int
    seconds: float


async def measure(loop: str, num_connections: int) -> Outcome:
    """Open and close connections to a proxy on ``loop``, sixteen at a time, and count its descriptors."""
    async with _serving(loop) as (port, pid):
        await _visit(port, 0)
        base = await _settled(pid, 0)
        start = time.perf_counter()
        unanswered = 0
        numbers = iter(range(num_connections))

        async def visit() -> None:
            nonlocal unanswered
            for number in numbers:
                unanswered += not await _visit(port, number)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(_NUM_AT_ONCE):
                tasks.create_task(visit())
        seconds = time.perf_counter() - start
        held = await _settled(pid, base) - base
    return Outcome(
        loop=loop, num_connections=num_connections, num_held=held, num_unanswered=unanswered, seconds=seconds
    )


async def _visit(port: int, number: int) -> bool:
    """Open a connection, ask once, and close it; every fourth asks nothing, and every eighth is reset."""
    source = (f"127.0.0.{1 + number % _NUM_SOURCES}", 0) if sys.platform == "linux" else None
    try:
        async with asyncio.timeout(_ANSWER_SECONDS):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=source)
            try:
                if number % 4 == 1:
                    return True
                writer.write(_REQUEST)
                answer = await reader.readuntil(b"\r\n\r\n")
                if number % 8 == 2:
                    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                return answer.startswith(b"HTTP/1.1 200 ")
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
    except (TimeoutError, OSError, asyncio.IncompleteReadError):
        return False


async def _settled(pid: int, base: int) -> int:
    """Open descriptors of the process, once they are few or time is up: the server closes just after its client."""
    deadline = time.monotonic() + _SETTLE_SECONDS
    while _num_open(pid) > base and time.monotonic() < deadline:  # noqa: ASYNC110 - a process tells nothing
        await asyncio.sleep(0.02)
    return _num_open(pid)


def _num_open(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


@asynccontextmanager
async def _serving(loop: str) -> AsyncIterator[tuple[int, int]]:
    """Serve the proxy in a child process; yields its port and its process id."""
    command = (sys.executable, "-m", "benchmarks.connections", "--serve", loop)
    pipe = asyncio.subprocess.PIPE
    server = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        yield int(await server.stdout.readline()), server.pid
    finally:
        server.stdin.close()
        await server.wait()


async def _serve() -> None:
    """Serve until standard input ends."""
    from areal_actors.testing.serving import open_scripted_proxy

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (_LIMIT, hard))
    async with open_scripted_proxy() as proxy:
        print(proxy.url.rsplit(":", 1)[1], flush=True)
        await anyio.wait_readable(sys.stdin.fileno())


def run(quick: bool) -> list[Result]:  # noqa: FBT001 - the protocol of all benchmarks
    """Descriptors held after many short-lived connections, by event loop."""
    return [
        Result(
            benchmark="connections",
            name=f"held after {outcome.num_connections:,} short connections, {outcome.loop}",
            value=outcome.num_held,
            unit="descriptors",
            gate=GATE,
            detail={"unanswered": outcome.num_unanswered, "seconds": round(outcome.seconds, 1)},
        )
        for outcome in (asyncio.run(measure(loop, 2_000 if quick else 100_000)) for loop in LOOPS)
    ]


@click.command()
@click.option("--count", default=100_000, show_default=True, help="Connections on each event loop.")
@click.option("--loop", "loops", type=click.Choice(LOOPS), multiple=True, default=LOOPS, help="Which event loops.")
@click.option("--serve", type=click.Choice(LOOPS), hidden=True)
def main(count: int, loops: tuple[str, ...], serve: str | None) -> None:
    """Count what is held after many short connections; exit 1 if it is beyond the gate, or one was not answered."""
    if serve is not None:
        anyio.run(_serve, backend=serve)
        return
    is_good = True
    for loop in loops:
        outcome = asyncio.run(measure(loop, count))
        print(
            f"{loop:8} {outcome.num_connections:,} connections in {outcome.seconds:.0f} s: "
            f"{outcome.num_held} descriptors held (gate {GATE}), {outcome.num_unanswered} not answered",
            flush=True,
        )
        is_good = is_good and outcome.num_held <= GATE and not outcome.num_unanswered
    if not is_good:
        sys.exit(os.EX_SOFTWARE)


if __name__ == "__main__":
    main()
