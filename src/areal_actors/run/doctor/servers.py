"""Check inference servers: ask those that run already, and import the package of those to be started."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator

import anyio

from areal_actors.config import RunConfig
from areal_actors.domain import Role
from areal_actors.errors import EngineError
from areal_actors.generation.servers.config import Backend, ServerConfig
from areal_actors.generation.servers.dialect import ServerFacts
from areal_actors.generation.servers.http import create_client, parse_version
from areal_actors.generation.servers.launching import PYTHON_VARIABLES, choose_ports, find_kind
from areal_actors.generation.servers.server import read_key
from areal_actors.run.doctor.findings import Examination, Finding, Verdict
from areal_actors.schedulers.config import SchedulerType

_ASK_SECONDS = 15.0
_IMPORT_SECONDS = 180.0
"""A server's package takes long to import, on a cold disk even longer."""
_ABSENT = 3
_IMPORT = f"""
import importlib, sys
try:
    module = importlib.import_module(sys.argv[1])
except ModuleNotFoundError as error:
    if error.name != sys.argv[1]:
        raise
    sys.exit({_ABSENT})
print()
print(getattr(module, "__version__", ""))
"""


def examine_servers(config: RunConfig) -> Iterator[Finding]:
    """Check the inference servers of the run, if it uses any. Blocks."""
    backend = config.rollout.backend
    if backend is Backend.TORCH:
        return
    settings: ServerConfig = getattr(config, backend)

    async def describe(url: str) -> ServerFacts:
        async with create_client(url, api_key=read_key(settings), read_timeout_seconds=_ASK_SECONDS) as client:
            try:
                with anyio.fail_after(_ASK_SECONDS):
                    return await find_kind(backend).create().describe(client)
            except TimeoutError:
                message = f"{url} did not answer within {_ASK_SECONDS:g} s. Does the server run there?"
                raise EngineError(message) from None

    for url in settings.urls:
        with Examination(f"{backend} server") as found:
            facts = anyio.run(describe, url)
            about = f"{facts.model}, {facts.context_length} tokens of context, {facts.dtype}"
            found.add(Verdict.OK, f"{url} is {facts.software} with {about}")
        yield from found.findings
    if settings.urls:
        return
    with Examination(f"{backend} server") as found:
        if settings.command:
            found.add(Verdict.SKIPPED, f"{settings.command[0]} starts it")
        else:
            _examine_package(config, backend, settings, found)
    yield from found.findings
    if settings.port:
        with Examination(f"{backend} port") as found:
            found.add(Verdict.OK, f"free: {', '.join(map(str, choose_ports(settings)))}")
        yield from found.findings


def _examine_package(config: RunConfig, backend: Backend, settings: ServerConfig, found: Examination) -> None:
    """Import the package of a server in the Python and with the variables that start it."""
    module = find_kind(backend).module.partition(".")[0]
    python = settings.python
    environment = {name: value for name, value in os.environ.items() if name not in PYTHON_VARIABLES}
    environment |= {**find_kind(backend).environment, **settings.environment}
    limit = min(_IMPORT_SECONDS, settings.start_timeout_seconds)
    advice = (
        f"Install {module} in a separate environment, and set {backend}.python to its Python. The documentation of "
        "servers has the two commands."
    )
    try:
        done = subprocess.run(  # noqa: S603 - the configuration's own interpreter
            [python, "-c", _IMPORT, module],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit,
            check=False,
            env=environment,
            stdin=subprocess.DEVNULL,
        )
    except OSError as error:
        found.add(Verdict.FAILED, f"{python} cannot be run: {error}", advice)
        return
    except subprocess.TimeoutExpired:
        found.add(Verdict.FAILED, f"{python} did not import {module} within {limit:g} s", advice)
        return
    if done.returncode == _ABSENT:
        found.add(Verdict.FAILED, f"{python} does not find {module}", advice)
    elif done.returncode:
        how = f"status {done.returncode}" if done.returncode > 0 else signal.Signals(-done.returncode).name
        reason = "\n".join(done.stderr.strip().splitlines()[-3:])
        # A package may need a GPU to be imported, which a node has and the machine that submits its job has not.
        placed = config.scheduler.roles.placed
        is_elsewhere = config.scheduler.type is SchedulerType.SLURM and Role.GENERATION in placed
        verdict, where = (Verdict.WARNING, " on this machine") if is_elsewhere else (Verdict.FAILED, "")
        found.add(verdict, f"{python} cannot import {module}{where} ({how}):\n{reason}", advice)
    elif (version := done.stdout.splitlines()[-1]) and parse_version(version) < find_kind(backend).oldest:
        oldest = ".".join(map(str, find_kind(backend).oldest))
        found.add(Verdict.FAILED, f"{python} has {module} {version}; {oldest} is the oldest that can be used", advice)
    else:
        found.add(Verdict.OK, f"{python} imports {module} {version}".rstrip())
