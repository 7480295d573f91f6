"""SGLang's gateway as a process of its own: ``smg``, in the Python that it is installed for."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import httpx

HOST = "127.0.0.1"
START_SECONDS = 300
ARGUMENTS = (
    *("--policy", "round_robin", "--routing-key-override", "--assignment-mode", "min_group"),
    # A server that is paused answers neither of these in time, and is well all the same.
    *("--disable-health-check", "--disable-circuit-breaker", "--worker-wedge-secs", "3600"),
    *("--request-timeout-secs", "14400", "--worker-startup-check-interval", "1"),
)
"""Those that docs/guides/servers.md recommends."""


def choose_ports(number: int) -> list[int]:
    """Free ones of this machine."""
    sockets = [socket.create_server((HOST, 0)) for _ in range(number)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@asynccontextmanager
async def open_gateway(python: str, urls: Sequence[str], *, log: Path) -> AsyncIterator[str]:
    """The URL of a gateway in front of ``urls``, once it knows all of them."""
    port, metrics = choose_ports(2)
    place = ["--host", HOST, "--port", str(port), "--prometheus-host", HOST, "--prometheus-port", str(metrics)]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as stream:
        process = subprocess.Popen(  # noqa: ASYNC220 - at once
            [python, "-m", "smg.launch_router", *place, *ARGUMENTS, "--worker-urls", *urls],
            stdout=stream,
            stderr=stream,
        )
    try:
        url = f"http://{HOST}:{port}"
        with anyio.fail_after(START_SECONDS):
            await _wait_for_workers(url, len(urls), process)
        yield url
    finally:
        process.kill()
        process.wait()


async def _wait_for_workers(url: str, number: int, process: subprocess.Popen[bytes]) -> None:
    async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
        while True:
            assert process.poll() is None, "The gateway has ended; see its log."
            try:
                workers = (await client.get("/workers")).json()["workers"]
            except (httpx.HTTPError, ValueError, KeyError):
                workers = []
            if sum(bool(worker.get("is_healthy", True)) for worker in workers) >= number:
                return
            await anyio.sleep(0.2)
