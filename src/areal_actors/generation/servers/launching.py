"""Start servers of the supported kinds as child processes, and restart them when they exit.

A server runs in a Python of the user's choice and keeps its port for the whole block. This module only keeps a process
running and records how the last one ended; ``server`` checks whether it answers, and ``engine`` gives it weights. Each
server logs to its own file, whose end is part of the error if a server never becomes ready.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import cast

import anyio
from attrs import define, evolve, field

from areal_actors.errors import EngineError
from areal_actors.generation.servers.config import AdapterSlots, Backend, ServerConfig
from areal_actors.generation.servers.dialect import ServerKind
from areal_actors.lib.backoff import Backoff
from areal_actors.lib.child_process import BoundedLog, Child
from areal_actors.lib.task_groups import open_tasks
from areal_actors.lib.telemetry import get_logger

_log = get_logger(__name__)

PYTHON_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
"""Variables for this process's Python; a server runs in another one."""
HOST = "127.0.0.1"
"""Servers that are started here have no API key, so they must not be reachable from other machines."""
_ABSENT = "No module named"
"""How Python ends a server that is not installed."""
_FIRST_PAUSE_SECONDS = 1.0
_MAX_PAUSE_SECONDS = 60.0
_HEALTHY_SECONDS = 60.0
"""A server that ran for this long is restarted without a growing delay."""


@define(eq=False)
class LaunchedServers:
    """Running servers. ``ends`` records for each URL how its last process ended, if one has."""

    urls: tuple[str, ...]
    ends: dict[str, str] = field(factory=dict)
    processes: dict[str, int] = field(factory=dict)
    """Process ids by URL."""

    def diagnose(self, url: str) -> str | None:
        """Return how the last process of ``url`` ended, or ``None`` if none has."""
        end = self.ends.get(url)
        if end is not None and _ABSENT in end:
            return (
                f"{end}\nInstall the server in a separate environment, and name its Python: sglang.python or "
                "vllm.python. The documentation of servers has the two commands."
            )
        return end

    def kill(self, url: str) -> None:
        """Kill the process group of ``url``, also if it is stopped. Another process is started in its place."""
        if (group := self.processes.get(url)) is not None:
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)


def format_command(
    kind: ServerKind,
    config: ServerConfig,
    *,
    model: Path,
    port: int,
    adapters: AdapterSlots | None = None,
    records_experts: bool = False,
) -> list[str]:
    """Return the command that starts a server of ``kind`` for ``model``, with room for ``adapters``.

    Unless ``config`` names a program, that is the module of the server in ``config.python``.
    """
    program = config.command
    if not program:
        program = (config.python, "-m", kind.module, *kind.arguments)
    more = () if adapters is None else kind.describe_adapters(adapters)
    recording = kind.recording if records_experts else ()
    return [*program, *kind.describe_place(model, HOST, port), *more, *recording, *config.arguments]


@asynccontextmanager
async def launch_servers(
    kind: ServerKind,
    config: ServerConfig,
    *,
    model: Path,
    logs: Path,
    adapters: AdapterSlots | None = None,
    records_experts: bool = False,
) -> AsyncIterator[LaunchedServers]:
    """Keep ``config.num_servers`` running while the block lasts; their process groups end with it.

    Several servers share the GPUs of this machine by ``CUDA_VISIBLE_DEVICES`` (``split_devices``). Raises
    ``EngineError`` if the program does not exist, a port is in use, or there are too few GPUs.
    """
    config = evolve(config, environment={**kind.environment, **config.environment})
    devices = _assign_devices(config)
    ports = choose_ports(config)
    launched = LaunchedServers(urls=tuple(f"http://{HOST}:{port}" for port in ports))
    async with open_tasks() as tasks:
        for number, (url, port) in enumerate(zip(launched.urls, ports, strict=True)):
            command = format_command(
                kind, config, model=model, port=port, adapters=adapters, records_experts=records_experts
            )
            environment = {**config.environment, **devices[number]}
            log = BoundedLog(logs / f"server-{number}.log")
            await tasks.start(_RestartingServer(launched, url, command, environment, log).run)
        yield launched
        tasks.cancel_scope.cancel()


@define(eq=False)
class _RestartingServer:
    """Keeps one server running by starting a new process whenever the last one has ended."""

    launched: LaunchedServers
    url: str
    command: list[str]
    environment: Mapping[str, str]
    log: BoundedLog

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        # Redirect stdout to stderr, which is logged.
        command = ["/bin/sh", "-c", 'exec "$@" >&2', "sh", *self.command]
        environment = {name: value for name, value in os.environ.items() if name not in PYTHON_VARIABLES}
        environment |= self.environment
        backoff = Backoff(first_seconds=_FIRST_PAUSE_SECONDS, max_seconds=_MAX_PAUSE_SECONDS)
        while True:
            began = anyio.current_time()
            try:
                child = await Child.start(lambda _: command, log=self.log, environment=environment)
            except OSError as error:
                raise EngineError(f"The server cannot be started by {' '.join(self.command[:3])}: {error}") from error
            try:
                self.launched.processes[self.url] = child.process.pid
                task_status.started()
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(child.listen)
                    await child.wait_for_leader()
                    await child.kill()  # also waits for its last output
                    tasks.cancel_scope.cancel()
            finally:
                del self.launched.processes[self.url]
                await child.kill()
            self.launched.ends[self.url] = reason = child.describe_end()
            task_status = anyio.TASK_STATUS_IGNORED
            if _ABSENT not in reason:  # the error of the engine says so, with what to install
                _log.warning("server_died", url=self.url, reason=reason)
            if anyio.current_time() - began > _HEALTHY_SECONDS:
                backoff.reset()
            await anyio.sleep(backoff.next_delay())


_DEVICES = "CUDA_VISIBLE_DEVICES"
_NVIDIA = Path("/proc/driver/nvidia/gpus")
"""Where the driver lists the GPUs of a machine; absent without one."""
_PARALLEL = {
    "tensor": ("--tp", "--tp-size", "--tensor-parallel-size", "-tp"),
    "pipeline": ("--pp", "--pp-size", "--pipeline-parallel-size", "-pp"),
    "data": ("--dp", "--dp-size", "--data-parallel-size", "-dp"),
}
"""The options of SGLang and vLLM that multiply the GPUs of a server."""


def _assign_devices(config: ServerConfig) -> list[dict[str, str]]:
    """Return the variable that names the GPUs of each server; empty for a single server, and without GPUs."""
    named = config.environment.get(_DEVICES, os.environ.get(_DEVICES))
    if named is None:
        visible = [str(number) for number in range(len(list(_NVIDIA.iterdir())))] if _NVIDIA.is_dir() else []
    else:  # numbers, or ids such as GPU-8932f937
        visible = [name.strip() for name in named.split(",") if name.strip()]
    if config.num_servers == 1 or not visible:
        return [{}] * config.num_servers
    slices = split_devices(visible, num_servers=config.num_servers, num_each=count_devices(config.arguments))
    return [{_DEVICES: ",".join(one)} for one in slices]


def split_devices(visible: Sequence[str], *, num_servers: int, num_each: int) -> list[tuple[str, ...]]:
    """Return ``num_each`` of the ``visible`` GPUs for each of ``num_servers`` servers, in their order.

    Raises ``EngineError`` if there are fewer than the servers need.
    """
    if num_servers * num_each > len(visible):
        raise EngineError(
            f"{num_servers} servers with {num_each} GPUs each need {num_servers * num_each}, and {len(visible)} can be "
            f"used: {', '.join(visible)}. Start fewer servers, or name the GPUs in environment.{_DEVICES} of their "
            "section; servers share a GPU that is named several times, as in 0,0."
        )
    return [tuple(visible[number * num_each : (number + 1) * num_each]) for number in range(num_servers)]


def count_devices(arguments: Sequence[str]) -> int:
    """Return the number of GPUs that a server with these arguments uses: tensor by pipeline by data parallelism."""
    sizes = dict.fromkeys(_PARALLEL, 1)
    for index, word in enumerate(arguments):
        option, equals, value = word.partition("=")
        following = value if equals else next(iter(arguments[index + 1 : index + 2]), "")
        for dimension, names in _PARALLEL.items():
            if option in names and following.isdecimal():
                sizes[dimension] = max(1, int(following))
    # SGLang's data-parallel attention divides the GPUs of tensor parallelism instead of adding some.
    data = 1 if "--enable-dp-attention" in arguments else sizes["data"]
    return sizes["tensor"] * sizes["pipeline"] * data


def choose_ports(config: ServerConfig) -> tuple[int, ...]:
    """Return free ports. Raises ``EngineError`` for a configured port that is in use."""
    # Another program that listens on a port could be mistaken for our server.
    wanted = range(config.port, config.port + config.num_servers) if config.port else [0] * config.num_servers
    with ExitStack() as stack:
        # All sockets stay open until every port is chosen, so that no port is chosen twice.
        found = []
        for port in wanted:
            holder = stack.enter_context(socket.socket())
            if port:  # connections of a server that has ended must not keep its port from the next one
                holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                holder.bind((HOST, port))
            except (OSError, OverflowError) as error:
                raise EngineError(
                    f"No server can be started at port {port} of {HOST}: {error}. End what listens there, or set "
                    "another port in the section of the server; 0 takes any that are free."
                ) from error
            found.append(int(holder.getsockname()[1]))
        return tuple(found)


def find_kind(backend: Backend) -> ServerKind:
    """Return how servers of a backend are started and spoken to; its module is imported when it is first needed."""
    return cast("ServerKind", import_module(f"areal_actors.generation.servers.{backend}").KIND)
