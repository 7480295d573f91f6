"""The online service: training on the sessions of external agents over HTTP (``areal-actors serve``, ``Server``).

It opens the same actors as ``training``, with an intake of sessions instead of a runner of agents. If the configuration
names held-out problems and an agent, that agent is run for evaluation only.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from anyio import to_thread
from attrs import evolve

from areal_actors.config import RunConfig
from areal_actors.dashboard import RunDirectory, RunSummary
from areal_actors.domain import Role
from areal_actors.errors import ConfigError
from areal_actors.lib import loops
from areal_actors.lib.atomic_write import atomic_write
from areal_actors.lib.notebooks import require_no_event_loop
from areal_actors.lib.service_manager import open_service_manager
from areal_actors.messages import Endpoint, ServiceOpened
from areal_actors.proxy.server import check_access
from areal_actors.run.checks import require_config
from areal_actors.run.directory import directory_of
from areal_actors.run.job import prepare_agents
from areal_actors.run.plan import RunPlan, has_rollouts
from areal_actors.run.training import run_in_directory
from areal_actors.training.phases import PhaseName

Announce = Callable[[Endpoint, RunDirectory], None]


def serve(
    config: RunConfig,
    *,
    resume: bool = False,
    run_dir: Path | None = None,
    announce: Announce | None = None,
    admin_key: str | None = None,
) -> RunSummary:
    """Serve a configuration until training is finished, in a new event loop. Raises ``ArealError``."""
    return Server(config, admin_key=admin_key).serve(resume=resume, run_dir=run_dir, announce=announce)


class Server:
    """The Python interface of the service. ``announce`` is called with the endpoint once agents are answered.

    ``admin_key`` is used if the configuration has none. It is not written to ``config.yaml``.
    """

    def __init__(self, config: RunConfig, *, admin_key: str | None = None) -> None:
        self.config = require_config(config)
        self._admin_key = admin_key

    def serve(
        self,
        *,
        resume: bool = False,
        run_dir: Path | None = None,
        announce: Announce | None = None,
        backend: str = "asyncio",
    ) -> RunSummary:
        """Serve in a new event loop (``backend``: ``asyncio``, as configured, or ``trio``) until training has ended."""

        async def main() -> RunSummary:
            return await self.run(resume=resume, run_dir=run_dir, announce=announce, is_handling_signals=True)

        require_no_event_loop("serve()", "run()")
        return loops.run(main, event_loop=self.config.event_loop, backend=backend)

    async def run(
        self,
        *,
        resume: bool = False,
        run_dir: Path | None = None,
        announce: Announce | None = None,
        is_handling_signals: bool = False,
    ) -> RunSummary:
        """Serve inside the running event loop. Signals are handled only if ``is_handling_signals`` is set."""
        config, directory = self.config, directory_of(self.config, run_dir)
        if config.phases != (PhaseName.RL,):
            raise ConfigError(
                f"phases: a service trains in the phase rl only, not [{', '.join(config.phases)}]; run the others with "
                "train, then set model to the weights of that run"
            )
        # A resumed service may have its key in its directory.
        if not resume:
            check_access(evolve(config.proxy, admin_key=config.proxy.admin_key or self._admin_key))
        placed = config.scheduler.roles.placed
        # An agent whose role is placed in a worker is prepared there.
        is_run_here = has_rollouts(config, is_service=True) and Role.ROLLOUT not in placed
        opening = prepare_agents(config, logs=directory.agent_logs) if is_run_here else nullcontext()

        async def tell(endpoint: Endpoint) -> ServiceOpened:
            # Before the announcement, which tells agents to read the key from this file.
            key = f"{endpoint.admin_key}\n"
            await to_thread.run_sync(partial(atomic_write, directory.admin_key, key, mode=0o600))
            if announce is not None:
                announce(endpoint, directory)
            notify("READY=1")
            return ServiceOpened(url=endpoint.url, export=_format_export(endpoint, directory))

        plan = RunPlan(
            config=config,
            directory=directory,
            is_service=True,
            resume=resume,
            admin_key=self._admin_key,
            announce=tell,
            is_handling_signals=is_handling_signals,
        )
        # A program that embeds the service has its own service manager, if any.
        manager = open_service_manager(os.environ if is_handling_signals else {})
        async with manager as notify:
            return await run_in_directory(plan, opening)


def describe_service(endpoint: Endpoint, directory: RunDirectory) -> str:
    """Return instructions for using a service. They contain no key: the shell command reads it from the file."""
    return (
        f"Listening at {endpoint.url}; the admin key is in {directory.admin_key}.\n"
        f"For a program that opens sessions:\n  {_format_export(endpoint, directory)}"
    )


def _format_export(endpoint: Endpoint, directory: RunDirectory) -> str:
    key = shlex.quote(str(directory.admin_key))
    return f'export OPENAI_BASE_URL={endpoint.base_url} OPENAI_API_KEY="$(cat {key})"'


def format_service(endpoint: Endpoint, directory: RunDirectory) -> str:
    """Return the address of the service, and the paths of its key file and run directory, as one line of JSON."""
    return json.dumps({"url": endpoint.url, "admin_key_file": str(directory.admin_key), "run_dir": str(directory.path)})
