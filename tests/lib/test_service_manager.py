"""What the service manager hears on its socket."""

from __future__ import annotations

import socket
from pathlib import Path

import anyio
import pytest

from areal_actors.lib.service_manager import open_service_manager


@pytest.mark.anyio
@pytest.mark.parametrize("is_abstract", [False, True])
async def test_service_manager_hears_that_the_service_is_ready_and_alive(tmp_path: Path, *, is_abstract: bool):
    """Twice in its interval, under a name in the file system or in the abstract namespace; children are not heard."""
    name = f"@{tmp_path.name}-{id(tmp_path)}" if is_abstract else str(tmp_path / "notify")
    environment = {"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "20000", "WATCHDOG_PID": "1", "PATH": "/bin"}
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(name.replace("@", "\0", 1))
        manager.setblocking(False)

        async def hear() -> str:
            await anyio.wait_readable(manager)
            return manager.recv(64).decode()

        with anyio.fail_after(30):
            async with open_service_manager(environment) as notify:
                assert {"PATH": "/bin"} == environment
                assert ["WATCHDOG=1"] * 3 == [await hear() for _ in range(3)]
                notify("READY=1")
                while await hear() != "READY=1":
                    pass


@pytest.mark.anyio
@pytest.mark.parametrize("environment", [{}, {"NOTIFY_SOCKET": "/absent/socket", "WATCHDOG_USEC": "1000000"}])
async def test_service_without_manager_runs(environment: dict[str, str]):
    """Also if the manager has gone."""
    async with open_service_manager(environment) as notify:
        notify("READY=1")
