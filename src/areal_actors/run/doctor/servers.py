"""Check inference servers: ask those that run already, and look for the package of those to be started."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import anyio

from areal_actors.config import RunConfig
from areal_actors.errors import EngineError
from areal_actors.generation.servers.config import Backend, ServerConfig
from areal_actors.generation.servers.dialect import ServerFacts
from areal_actors.generation.servers.environments import find_environment
from areal_actors.generation.servers.http import create_client
from areal_actors.generation.servers.launching import KINDS, choose_ports
from areal_actors.generation.servers.server import read_key
from areal_actors.run.doctor.findings import Examination, Finding, Verdict

__all__ = ["examine_servers"]

_ASK_SECONDS = 15.0
_IMPORT_SECONDS = 180.0
"""A server's package takes long to import, on a cold disk even longer."""


def examine_servers(config: RunConfig) -> Iterator[Finding]:
    """Check the inference servers of the run, if it uses any. Blocks."""
    backend = config.rollout.backend
    if backend is Backend.TORCH:
        return
    settings = config.sglang if backend is Backend.SGLANG else config.vllm
    for url in settings.urls:
        with Examination(f"{backend} server") as found:
            facts = anyio.run(_describe, url, backend, settings)
            about = f"{facts.model}, {facts.context_length} tokens of context, {facts.dtype}"
            found.add(Verdict.OK, f"{url} is {facts.software} with {about}")
        yield from found.findings
    if settings.urls:
        return
    with Examination(f"{backend} server") as found:
        if settings.command:
            found.add(Verdict.SKIPPED, f"{settings.command[0]} starts it")
        else:
            module = KINDS[backend].module.partition(".")[0]
            installed = find_environment(backend, settings)
            python = settings.python or (str(installed.python) if installed else "python")
            # Found, not imported: the import may need a GPU, which the machine of the doctor may not have.
            look = f"import importlib.util as u, sys; s = u.find_spec({module!r}); sys.exit(0 if s else 3)"
            advice = (
                f"Run `areal-actors server install {backend}`, or set {backend}.python to the Python of an environment "
                f"in which {module} is installed."
            )
            command = [python, "-c", look]
            try:
                done = subprocess.run(command, capture_output=True, timeout=_IMPORT_SECONDS, check=False)  # noqa: S603 - the configuration's own interpreter
            except (OSError, subprocess.TimeoutExpired) as error:
                found.add(Verdict.FAILED, f"{python} cannot be run: {error}", advice)
            else:
                finds = "finds" if done.returncode == 0 else "does not find"
                verdict, advised = (Verdict.OK, "") if done.returncode == 0 else (Verdict.FAILED, advice)
                found.add(verdict, f"{python} {finds} {module}", advised)
    yield from found.findings
    if settings.port:
        with Examination(f"{backend} port") as found:
            found.add(Verdict.OK, f"free: {', '.join(map(str, choose_ports(settings)))}")
        yield from found.findings


async def _describe(url: str, backend: Backend, settings: ServerConfig) -> ServerFacts:
    """Return the server's description of itself. Raises ``EngineError`` if it does not answer in time."""
    async with create_client(url, api_key=read_key(settings), read_timeout_seconds=_ASK_SECONDS) as client:
        try:
            with anyio.fail_after(_ASK_SECONDS):
                return await KINDS[backend].create_dialect({}).describe(client)
        except TimeoutError:
            raise EngineError(f"{url} did not answer within {_ASK_SECONDS:g} s. Does the server run there?") from None
