"""The router of a service with several processes: it forwards each request to the process that has its session.

::

    agent ─▶ router ─┬─▶ process 0: proxy, sessions, journal; engine, exporter, trainer
                     ├─▶ process 1: proxy, sessions, journal
                     └─▶ process 2: proxy, sessions, journal

A session's id and keys end with the number of its process (``cache.session``); requests without a number are those of
process 0. Each process serves HTTP on a unix socket in a private directory, and the router, a process of its own, on
the address of the service. A process that ends is replaced at the same socket; requests for it wait meanwhile.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import httpx
from attrs import asdict, field, frozen
from starlette.applications import Starlette

from areal_actors.cache.session import process_of
from areal_actors.lib.child_process import BoundedLog, Child
from areal_actors.lib.loops import child_variables, run
from areal_actors.lib.scratch import scratch_directory
from areal_actors.lib.task_groups import open_tasks
from areal_actors.lib.telemetry import get_logger
from areal_actors.messages import ServiceProcess
from areal_actors.proxy.config import HttpServer, ProxyConfig
from areal_actors.proxy.exchange import Exchange, Traffic
from areal_actors.proxy.forwarding import FORWARDED_FOR, Backend, EveryPath, forward, names_in
from areal_actors.proxy.server import bind, serve_until_cancelled, url_of

_log = get_logger(__name__)

_BACKLOG = 4096
_PATIENCE_SECONDS = 60.0
"""How long a request waits for the successor of a process that has ended."""
_RESTART_SECONDS = 0.5
_GRACE_SECONDS = 2.0
_PROGRAM = "from areal_actors.proxy.router import main; main()"


def listen_as(process: ServiceProcess) -> socket.socket:
    """Return the socket at which ``process`` serves, in place of that of an earlier process."""
    with suppress(FileNotFoundError):
        process.socket.unlink()
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(str(process.socket))
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


@asynccontextmanager
async def open_router(config: ProxyConfig, *, log: Path | None = None) -> AsyncIterator[ServiceProcess | None]:
    """Run the router while the block lasts, and yield the first process of the service; ``None`` if there is only one.

    The router's output goes to the file ``log``. Raises ``ConfigError`` as ``bind``.
    """
    if config.num_processes == 1:
        yield None
        return
    with bind(config) as listener, scratch_directory() as sockets:
        async with open_tasks() as tasks:
            tasks.start_soon(_keep_running, listener, sockets, config, BoundedLog(log))
            yield ServiceProcess(number=0, sockets=sockets, url=url_of(listener, config.public_host))
            tasks.cancel_scope.cancel()


async def _keep_running(listener: socket.socket, sockets: Path, config: ProxyConfig, log: BoundedLog) -> None:
    """Run the router, and start it again if it ends. Connections wait meanwhile, in the backlog of ``listener``."""
    settings = _Settings(
        descriptor=listener.fileno(),
        sockets=str(sockets),
        num_processes=config.num_processes,
        max_body_bytes=config.max_body_bytes,
        body_timeout_seconds=config.body_timeout_seconds,
        drain_seconds=config.drain_seconds,
        server=config.server,
    )

    def create_command(_: int) -> list[str]:
        return [sys.executable, "-c", _PROGRAM, json.dumps(asdict(settings))]

    while True:
        child = await Child.start(
            create_command,
            log=log,
            environment={**os.environ, **child_variables()},
            pass_fds=(listener.fileno(),),
        )
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(child.listen)
                tasks.start_soon(child.drain)
                tasks.start_soon(child.kill_when_stopped)
                await child.wait_for_leader()
                tasks.cancel_scope.cancel()
        finally:
            await child.kill(grace_seconds=config.drain_seconds + _GRACE_SECONDS)
        _log.warning("router_ended", reason=child.describe_end(), detail="It is started again.")
        await anyio.sleep(_RESTART_SECONDS)


# ------------------------------------------------------------------------------------------------------- the process


@frozen(kw_only=True)
class _Settings:
    """What the router is told by the process that starts it."""

    descriptor: int
    sockets: str
    num_processes: int
    max_body_bytes: int
    body_timeout_seconds: float
    drain_seconds: float
    server: HttpServer = field(converter=HttpServer)


class _Router(EveryPath):
    """Forwards every request to the process that it names."""

    def __init__(self, settings: _Settings, client: httpx.AsyncClient, traffic: Traffic) -> None:
        super().__init__(traffic)
        self._settings = settings
        self._client = client

    async def serve(self, exchange: Exchange) -> None:
        """Forward one request."""
        settings = self._settings
        body = await exchange.read_body(
            max_bytes=settings.max_body_bytes, timeout_seconds=settings.body_timeout_seconds
        )
        number = next((found for found in map(process_of, names_in(exchange, body)) if found), 0)
        if number >= settings.num_processes:
            number = 0  # not one of ours: the first process knows how to refuse it
        backend = Backend(f"process-{number}", _url_of(number))
        # A proxy behind a unix socket logs this address, as it sees no other.
        client = exchange.scope.get("client")
        headers = [header for header in exchange.scope["headers"] if header[0] != FORWARDED_FOR]
        exchange.scope["headers"] = [*headers, (FORWARDED_FOR, str(client[0]).encode())] if client else headers
        async with exchange.cut_on_disconnect():
            await forward(
                exchange,
                body=body,
                backends=lambda: (backend,),
                client=self._client,
                patience_seconds=_PATIENCE_SECONDS,
            )


def _url_of(number: int) -> str:
    return f"http://process-{number}"


async def _serve(settings: _Settings, listener: socket.socket) -> None:
    """Serve until cancelled."""
    traffic = Traffic()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=1024, keepalive_expiry=15.0)
    mounts = {
        _url_of(number): httpx.AsyncHTTPTransport(uds=str(_socket_of(Path(settings.sockets), number)), limits=limits)
        for number in range(settings.num_processes)
    }
    # A request may wait for hours while weights are published.
    async with httpx.AsyncClient(mounts=mounts, timeout=httpx.Timeout(None, connect=5.0), trust_env=False) as client:
        app = Starlette(routes=[_Router(settings, client, traffic)])
        await serve_until_cancelled(
            app, listener, traffic, drain_seconds=settings.drain_seconds, server=settings.server
        )


def _socket_of(sockets: Path, number: int) -> Path:
    return ServiceProcess(number=number, sockets=sockets, url="").socket


async def _run(settings: _Settings) -> None:
    with socket.socket(fileno=settings.descriptor) as listener:
        listener.setblocking(False)
        async with anyio.create_task_group() as tasks:
            with anyio.open_signal_receiver(signal.SIGTERM) as signals:
                tasks.start_soon(_serve, settings, listener)
                async for _ in signals:
                    tasks.cancel_scope.cancel()
                    break


def main() -> None:
    """Serve as the arguments of the process say, until SIGTERM."""
    run(_run, _Settings(**json.loads(sys.argv[1])))
