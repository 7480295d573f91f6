"""Several proxies in front of one service: processes of their own that listen on the same port.

A proxy owns no facts, so any of them can answer for any session, and the kernel is router enough: all listen on one
port (``SO_REUSEPORT``), and each connection goes to one of them. The proxy of the service's own process is one; the
others reach its actors over a unix socket. One that dies is replaced; the clients of its connections send again.
"""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

import anyio
from anyio.streams.buffered import BufferedByteReceiveStream
from attrs import field, frozen

from areal_actors.core import Ref
from areal_actors.core.remote import listen
from areal_actors.run.inference import Inference
from areal_actors.telemetry import get_logger
from areal_actors.workflows.processes import BoundedLog, Child

__all__ = ["Proxies", "open_proxies"]

_log = get_logger(__name__)

_START_SECONDS = 120.0
_MAX_BACKOFF_SECONDS = 30.0
_MAX_LINE = 64 * 1024


@frozen(kw_only=True)
class _Order:
    """What a proxy is told on its standard input."""

    address: str
    secret: str = field(repr=False)
    config: Path
    port: int
    admin_key: str = field(repr=False)

    def to_line(self, name: str) -> bytes:
        told = {
            "role": "proxy",
            "name": name,
            "address": self.address,
            "secret": self.secret,
            "config": str(self.config),
            "port": self.port,
            "admin_key": self.admin_key,
        }
        return json.dumps(told).encode() + b"\n"


class Proxies:
    """How many of the proxies beside the first one serve."""

    def __init__(self) -> None:
        self._up: set[str] = set()
        self._changed = anyio.Event()

    @property
    def num_up(self) -> int:
        """Those that have said so and have not ended."""
        return len(self._up)

    async def wait_for(self, num: int) -> None:
        """Until exactly ``num`` of them serve."""
        while self.num_up != num:
            await self._changed.wait()

    def note(self, name: str, *, is_up: bool) -> None:
        """One came up, or ended."""
        (self._up.add if is_up else self._up.discard)(name)
        self._changed.set()
        self._changed = anyio.Event()


@asynccontextmanager
async def open_proxies(inference: Inference, *, num_more: int, config: Path, logs: Path) -> AsyncIterator[Proxies]:
    """Start ``num_more`` proxies beside the one of ``inference``, which has to listen on a shared port.

    ``config`` is the file with the service's settings; ``logs`` a directory for what the processes say. They are there
    some seconds later, and all end with the block.
    """
    proxies = Proxies()
    if num_more == 0:
        yield proxies
        return
    secret = secrets.token_bytes(32)
    # A path of its own: that of a run may be longer than the name of a socket can be.
    with TemporaryDirectory(prefix="areal-") as directory:
        address = f"unix:{directory}/actors.sock"
        async with listen(address, secret=secret, expose=_actors_of(inference)), anyio.create_task_group() as tasks:
            order = _Order(
                address=address,
                secret=secret.hex(),
                config=config,
                port=urlsplit(inference.endpoint.url).port or 0,
                admin_key=inference.endpoint.admin_key,
            )
            for number in range(1, num_more + 1):
                tasks.start_soon(_keep_up, order, f"proxy-{number}", BoundedLog(logs / f"proxy-{number}.log"), proxies)
            yield proxies
            tasks.cancel_scope.cancel()


def _actors_of(inference: Inference) -> dict[str, Ref[Any]]:
    found: dict[str, Ref[Any] | None] = {
        "sessions": inference.sessions,
        "exports": inference.exports,
        "capacity": inference.capacity,
        "generation": inference.generation,
        "intake": inference.intake,
        "accounts": inference.accounts,
    }
    return {name: ref for name, ref in found.items() if ref is not None}


async def _keep_up(order: _Order, name: str, log: BoundedLog, proxies: Proxies) -> None:
    """Run one proxy after another, with longer and longer pauses while they do not come up."""
    pause = 0.5
    while True:
        child = await Child.start(lambda _: [sys.executable, "-m", "areal_actors.worker"], log=log)
        try:
            is_up = await _run(child, order, name, proxies)
        finally:
            proxies.note(name, is_up=False)
            await child.kill()
        pause = 0.5 if is_up else min(2 * pause, _MAX_BACKOFF_SECONDS)
        _log.warning("proxy_ended", proxy=name, again_in_seconds=pause, reason=child.describe_end())
        await anyio.sleep(pause)


async def _run(child: Child, order: _Order, name: str, proxies: Proxies) -> bool:
    """Until the process has ended; returns whether it had come up."""
    assert child.process.stdin is not None
    assert child.process.stdout is not None
    is_up = False
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(child.listen)
        try:
            await child.process.stdin.send(order.to_line(name))
            with anyio.fail_after(_START_SECONDS):
                line = await BufferedByteReceiveStream(child.process.stdout).receive_until(b"\n", _MAX_LINE)
            is_up = True
            proxies.note(name, is_up=True)
            _log.info("proxy_started", proxy=name, url=json.loads(line)["url"])
            await child.wait_for_leader()
        except (OSError, TimeoutError, anyio.BrokenResourceError, anyio.IncompleteRead, anyio.EndOfStream):
            _log.warning("proxy_did_not_start", proxy=name)
        tasks.cancel_scope.cancel()
    return is_up
