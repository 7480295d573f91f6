"""What it costs the controller to forward a request to a proxy on another machine, as bytes.

Client, forwarder and proxy share this process, and the proxy answers without looking: the cost is the difference to the
same exchange without the forwarder. A stream sends its events apart, each in a write of its own.
"""

from __future__ import annotations

import socket
import time
from functools import partial
from pathlib import Path

import anyio
import anyio.lowlevel
from benchmarks.harness import Result

from areal_actors.domain import Role
from areal_actors.kernel import ActorSystem
from areal_actors.kernel.remote.sockets import SocketStream, accept, dial_tcp
from areal_actors.messages import Endpoint, ExpectWorker, Report, ReportReady, RoleSpec
from areal_actors.run.control_plane import DirectoryActor
from areal_actors.run.forwarding import forwarding

_REQUEST, _ANSWER, _EVENT = b"q" * 1500, b"a" * 1000, b"e" * 250
_NUM_CONNECTIONS, _NUM_EVENTS = 32, 64


def run(*, quick: bool) -> list[Result]:
    """Microseconds per request, answered at once and as a stream."""
    num = 20 if quick else 200
    results = []
    for name, events in (("request", [_ANSWER]), (f"stream of {_NUM_EVENTS} events", [_EVENT] * _NUM_EVENTS)):
        direct, forwarded = (
            min(anyio.run(partial(_measure, events, num, is_forwarded=is_forwarded)) for _ in range(3))
            for is_forwarded in (False, True)
        )
        detail = {"without": direct, "with": forwarded}
        value = forwarded - direct
        results.append(Result(benchmark="forwarding", name=name, value=value, unit="CPU µs", detail=detail))
    return results


async def _measure(events: list[bytes], num_requests: int, *, is_forwarded: bool) -> float:
    """CPU microseconds of this process per request."""
    size, seconds = sum(map(len, events)), 0.0
    with _listen() as proxy, _listen() as front:
        async with ActorSystem.open() as system, anyio.create_task_group() as tasks:
            tasks.start_soon(_serve, proxy, events)
            port = proxy.getsockname()[1]
            directory = await system.spawn(DirectoryActor())
            spec = RoleSpec(role=Role.PROXY, config=Path("c"), directory=Path("d"), lease_seconds=60.0)
            await directory.ask(ExpectWorker(worker="proxy-0", incarnation=1, spec=spec))
            endpoint = Endpoint(url=f"http://127.0.0.1:{port}", admin_key="k")
            report = Report(address="unix:/a", endpoint=endpoint)
            await directory.ask(ReportReady(worker="proxy-0", incarnation=1, report=report))
            async with forwarding(front, directory):
                if is_forwarded:
                    port = front.getsockname()[1]
                began = time.process_time()
                async with anyio.create_task_group() as clients:
                    for _ in range(_NUM_CONNECTIONS):
                        clients.start_soon(_ask, port, size, num_requests)
                seconds = time.process_time() - began
            tasks.cancel_scope.cancel()
    return 1e6 * seconds / (_NUM_CONNECTIONS * num_requests)


def _listen() -> socket.socket:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    return listener


async def _serve(listener: socket.socket, events: list[bytes]) -> None:
    async def answer(stream: SocketStream) -> None:
        try:
            while await _read(stream, len(_REQUEST)):
                for event in events:
                    await stream.send(event)
                    if len(events) > 1:
                        await anyio.lowlevel.checkpoint()
        finally:
            await stream.aclose()

    async with anyio.create_task_group() as tasks:
        while True:
            tasks.start_soon(answer, await accept(listener))


async def _ask(port: int, size: int, num_requests: int) -> None:
    stream = await dial_tcp("127.0.0.1", port)
    for _ in range(num_requests):
        await stream.send(_REQUEST)
        assert await _read(stream, size)
    await stream.aclose()


async def _read(stream: SocketStream, size: int) -> bool:
    """Read so many bytes; return whether they came."""
    try:
        while size > 0:
            size -= len(await stream.receive())
    except anyio.EndOfStream:
        return False
    return True
