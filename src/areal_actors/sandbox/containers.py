"""Boxes in containers: ``sandbox: docker`` and ``podman``, for agents that need the files of an image.

The same program as under bubblewrap is process 1 of the container (``inside``), so that commands, copies and the way to
the model are the same; it is run by the image's python3. It connects to the runner by a socket in a directory that the
container sees. A container ends with its process 1, which ends with the runner.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from attrs import field, frozen
from attrs.validators import in_

from areal_actors.errors import SandboxError
from areal_actors.lib.child_process import BoundedLog
from areal_actors.sandbox.base import BoxRequest, Sandbox
from areal_actors.sandbox.box import Box, Start, program
from areal_actors.sandbox.config import Network, SandboxConfig, SandboxKind
from areal_actors.sandbox.environment import passed_environment
from areal_actors.sandbox.scratch import scratch_directory

__all__ = ["ContainerSandbox"]

_SOCKETS = "/run/areal"
_HOME = "/tmp"  # noqa: S108 - a path inside the box
_CHECK_SECONDS = 300.0
"""How long a check may take, which pulls the image if it is not here."""


@frozen(kw_only=True)
class ContainerSandbox:
    """Opens boxes with docker or podman, whose command lines are the same."""

    kind: SandboxKind = field(default=SandboxKind.DOCKER, validator=in_((SandboxKind.DOCKER, SandboxKind.PODMAN)))
    log: Path | None = None
    """File for what the program itself says."""

    def check(self, config: SandboxConfig) -> str:
        """Run python3 in the image, and return what was found. Raises ``SandboxError`` with what to install."""
        found = shutil.which(self.kind)
        if found is None:
            raise SandboxError(f"The sandbox {self.kind} needs the program {self.kind}, which is not installed here.")
        assert config.image is not None
        words = [found, "run", "--rm", "--network=none", "--entrypoint=python3", config.image, "-c", ""]
        tried = subprocess.run(  # noqa: S603 - our own words
            words, check=False, capture_output=True, text=True, timeout=_CHECK_SECONDS
        )
        if tried.returncode != 0:
            raise SandboxError(f"{self.kind} cannot run python3 of {config.image}: {tried.stderr.strip()}")
        return f"{self.kind} ({found}) with {config.image}"

    @asynccontextmanager
    async def open(self, request: BoxRequest) -> AsyncIterator[Sandbox]:
        """Open a box for a block."""
        with scratch_directory() as directory, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
            # An image may run as another user, who has to connect; the directory above lets only us in.
            directory.chmod(0o755)
            server.bind(str(directory / "socket"))
            (directory / "socket").chmod(0o777)
            server.listen(1)

            def prepare(channel: list[Any]) -> Start:
                assert request.config.image is not None
                channel[0] = f"{_SOCKETS}/socket"
                channel[1]["disks"] = (request.work_directory, *request.directories, "/tmp")  # noqa: S108
                source = f"{program()}\nmain(*{channel!r})\n"
                environment = passed_environment(request.config) | {"HOME": _HOME}
                environment.pop("PATH", None)  # that of the image
                return Start(
                    command=[self.kind, *_options(request, directory), request.config.image, "-I", "-S", "-c", source],
                    environment=environment,
                    own_environment=dict(os.environ),  # docker and podman find their settings there
                )

            async with Box.open(request, prepare, BoundedLog(self.log), server=server) as box:
                yield box


def _options(request: BoxRequest, sockets: Path) -> Iterator[str]:
    """Yield the arguments up to the image."""
    config = request.config
    yield from ("run", "--rm", "--interactive", "--entrypoint=python3", "--read-only", "--cap-drop=ALL")
    # The seccomp profile is the default one. Memory of every kind counts for the container's cgroup.
    yield from ("--security-opt=no-new-privileges", f"--pids-limit={config.max_processes + 1}")
    yield from (f"--memory={config.memory_mib}m", f"--memory-swap={config.memory_mib}m")
    if config.cpus is not None:
        yield f"--cpus={config.cpus}"
    yield "--network=host" if config.network is Network.HOST else "--network=none"
    for writable in (request.work_directory, *request.directories, "/tmp"):  # noqa: S108
        yield f"--tmpfs={writable}:rw,exec,mode=1777,size={config.disk_mib}m"
    yield f"--workdir={request.work_directory}"
    yield f"--volume={sockets}:{_SOCKETS}:ro"
    for shown in (*config.readable, *request.readable):
        yield f"--volume={shown}:{shown}:ro"
    for inside, source in request.mounts.items():
        yield f"--volume={source}:{inside}:ro"
    for shared in config.writable:
        yield f"--volume={shared}:{shared}"
