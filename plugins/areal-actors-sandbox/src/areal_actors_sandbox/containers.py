"""Boxes in containers: ``sandbox: docker``, ``podman`` and ``apptainer``, for agents that need the files of an image.

The same program as under bubblewrap is process 1 of the container (``inside``), so that commands, copies and the way to
the model are the same; it is run by the image's python3. It connects to the runner by a socket in a directory that the
container sees. A container ends with its process 1, which ends with the runner.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

from anyio import to_thread
from attrs import field, frozen
from attrs.validators import in_

from areal_actors.errors import SandboxError
from areal_actors.lib.child_process import BoundedLog
from areal_actors.lib.scratch import scratch_directory
from areal_actors.sandbox import BoxRequest, Network, Sandbox, SandboxConfig, passed_environment
from areal_actors_sandbox.box import Box, Start, program
from areal_actors_sandbox.system_calls import create_profile

_SOCKETS = "/run/areal"
_HOME = "/tmp"  # noqa: S108 - a path inside the box
_CHECK_SECONDS = 300.0
"""How long a check may take, which pulls the image if it is not here."""
_ADVICE = "Set `systemd cgroups = no` in apptainer.conf: systemd does not run here."
_DISKS = ("/dev", "/dev/shm")  # noqa: S108
"""Directories in memory that apptainer makes writable, but for those that it is asked for."""
_SETTINGS = ("acpi", "bus", "driver", "fs", "irq", "scsi", "sys", "sysrq-trigger")
"""Entries of /proc in which root may set the kernel of the host, even without capabilities."""
_INSTALL = {
    "docker": "apt-get install docker.io, and a running dockerd",
    "podman": "apt-get install podman",
    "apptainer": "see https://apptainer.org/docs/admin/latest/installation.html",
}
_SHOWS_MORE = re.compile(r"(APPTAINER|SINGULARITY)_(BIND|BINDPATH|MOUNT|OVERLAY|OVERLAYIMAGE)")
"""Variables by which a site shows directories in every container: a box shows those of its settings only."""


@frozen(kw_only=True)
class ContainerSandbox:
    """Opens boxes with docker or podman, whose command lines are the same, or with apptainer."""

    kind: str = field(default="docker", validator=in_(_INSTALL))
    log: Path | None = None
    """File for what the program itself says."""

    def check(self, config: SandboxConfig) -> str:
        """Run python3 in a container, and return what was found. Raises ``SandboxError`` with what to install."""
        found = shutil.which(self.kind)
        if found is None:
            raise SandboxError(
                f"The sandbox {self.kind} needs the program {self.kind}, which is not installed here: "
                f"{_INSTALL[self.kind]}."
            )
        # With the limits of a box, because some machines cannot set them, which runtimes say at the first container.
        tried = _try([*self._command(BoxRequest(config=config), None), ""])
        if tried.returncode != 0:
            said = tried.stderr.strip()
            advice = f"\n{_ADVICE}" if "systemd not running" in said else ""
            raise SandboxError(f"{self.kind} cannot run python3 of {config.image}: {said}{advice}")
        counted = self.kind == "apptainer" and not _has_cgroups(config.image)
        return f"{self.kind} ({found}) with {config.image}{', without cgroups' if counted else ''}"

    @asynccontextmanager
    async def open(self, request: BoxRequest) -> AsyncIterator[Sandbox]:
        """Open a box for a block."""
        with scratch_directory() as directory, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
            # An image may run as another user, who has to connect; the directory above lets only us in.
            directory.chmod(0o755)
            server.bind(str(directory / "socket"))
            (directory / "socket").chmod(0o777)
            server.listen(1)
            # In a thread, since it may ask apptainer what it can limit.
            command = await to_thread.run_sync(self._command, request, directory)

            def prepare(channel: list[Any]) -> Start:
                channel[0] = f"{_SOCKETS}/socket"
                disks = _DISKS if self.kind == "apptainer" else ()
                channel[1]["disks"] = (request.work_directory, *request.directories, "/tmp", *disks)  # noqa: S108
                environment = passed_environment(request.config) | {"HOME": _HOME}
                environment.pop("PATH", None)  # that of the image
                return Start(
                    command=[*command, f"{program()}\nmain(*{channel!r})\n"],
                    environment=environment,
                    own_environment=_own_environment(),
                )

            async with Box.open(request, prepare, BoundedLog(self.log), server=server) as box:
                yield box

    def _command(self, request: BoxRequest, sockets: Path | None) -> list[str]:
        """Return the command line that runs a Python program, which is its next word, in a container."""
        assert request.config.image is not None
        image = request.config.image
        python = ["-I", "-S", "-c"]
        if self.kind == "apptainer":
            return ["apptainer", "exec", *_apptainer_options(request, sockets), image, "python3", *python]
        return [self.kind, "run", *_docker_options(request, sockets), image, *python]


open_docker = partial(ContainerSandbox, kind="docker")
open_podman = partial(ContainerSandbox, kind="podman")
open_apptainer = partial(ContainerSandbox, kind="apptainer")


def _own_environment() -> dict[str, str]:
    """Return the environment of the container program, which finds its settings there."""
    return {name: value for name, value in os.environ.items() if not _SHOWS_MORE.fullmatch(name)}


def _limits(config: SandboxConfig) -> Iterator[str]:
    """Yield the limits of the container's cgroup. Memory of every kind counts for it."""
    yield f"--pids-limit={config.max_processes + 1}"
    yield from (f"--memory={config.memory_mib}m", f"--memory-swap={config.memory_mib}m")
    if config.cpus is not None:
        yield f"--cpus={config.cpus}"


def _bindings(request: BoxRequest, sockets: Path | None) -> Iterator[str]:
    """Yield what the container sees of the host's files, as ``source:inside:options``."""
    if sockets is not None:
        yield f"{sockets}:{_SOCKETS}:ro"
    for shown in (*request.config.readable, *request.readable):
        yield f"{shown}:{shown}:ro"
    for inside, source in request.mounts.items():
        yield f"{source}:{inside}:ro"
    for shared in request.config.writable:
        yield f"{shared}:{shared}"


def _docker_options(request: BoxRequest, sockets: Path | None) -> Iterator[str]:
    """Yield the options of docker and podman up to the image."""
    config = request.config
    yield from ("--rm", "--interactive", "--entrypoint=python3", "--read-only", "--cap-drop=ALL")
    # The seccomp profile is the default one.
    yield "--security-opt=no-new-privileges"
    yield from _limits(config)
    yield "--network=host" if config.network is Network.HOST else "--network=none"
    for writable in (request.work_directory, *request.directories, "/tmp"):  # noqa: S108
        yield f"--tmpfs={writable}:rw,exec,mode=1777,size={config.disk_mib}m"
    yield f"--workdir={request.work_directory}"
    yield from (f"--volume={binding}" for binding in _bindings(request, sockets))


def _apptainer_options(request: BoxRequest, sockets: Path | None) -> Iterator[str]:
    """Yield the options of apptainer up to the image.

    /tmp and the home directory of ``--containall`` are in memory, in one file system with all scratch directories, of
    the size ``sessiondir max size`` in apptainer.conf unless the run is root. ``--no-init`` makes the program inside
    process 1.
    """
    config = request.config
    assert config.image is not None
    yield from ("--containall", "--no-init", "--no-privs", "--no-eval")
    # Its configuration may show directories of the site in every container, and /sys is writable by root.
    yield "--no-mount=sys,bind-paths"
    yield f"--security=seccomp:{create_profile()}"
    if _has_cgroups(config.image):
        yield from _limits(config)
    if config.network is not Network.HOST:
        yield from ("--net", "--network=none")
    for writable in (request.work_directory, *request.directories):
        yield f"--scratch={writable}"
    yield f"--pwd={request.work_directory}"
    for shown in (Path("/etc/hosts"), *(Path("/proc", name) for name in _SETTINGS)):
        if shown.exists():
            yield f"--bind={shown}:{shown}:ro"
    yield from (f"--bind={binding}" for binding in _bindings(request, sockets))


@cache
def _has_cgroups(image: str) -> bool:
    """Return whether apptainer is to limit a container by cgroups.

    Ordinary users need cgroups v2 that systemd manages, and a session of systemd, which jobs of a cluster seldom have.
    Without them, process 1 of the box enforces the limits, as it does under bubblewrap. Not for root, which
    ``RLIMIT_NPROC`` exempts: a fork bomb had started thousands of processes before process 1 looked.
    """
    if os.geteuid() == 0:
        return True
    limited = ["apptainer", "exec", "--no-privs", "--memory=64m", "--pids-limit=64", image, "python3", "-I", "-S"]
    tried = _try([*limited, "-c", ""])
    return tried.returncode == 0 or "cgroup" not in tried.stderr


def _try(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603 - our own words
        command,
        check=False,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_CHECK_SECONDS,
        env=_own_environment(),
    )
