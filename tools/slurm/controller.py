"""A controller to kill: ``python -m tools.slurm.controller ADDRESS DIRECTORY SETTINGS NAME...``.

It places a caller for each name, says so as they connect, and stays. SETTINGS are those of the scheduler, as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import anyio
from anyio import to_thread
from tests.schedulers.slurm_local.callers import CALLER, SETTINGS, open_controller, spec
from tests.schedulers.slurm_local.cluster import ROOT, Cluster

from areal_actors.errors import SchedulerError
from areal_actors.kernel.remote import Listener
from areal_actors.schedulers.slurm import SlurmConfig, SlurmScheduler

__all__ = ["hear", "shard_of"]


@contextmanager
def shard_of(cluster: Cluster, directory: Path, *names: str, **settings: Any) -> Iterator[Popen[str]]:
    """One in a process of its own."""
    command = [sys.executable, "-m", "tools.slurm.controller", cluster.address, str(directory)]
    command += [json.dumps(settings), *names]
    with Popen(command, env=cluster.environment, stdout=PIPE, text=True, cwd=ROOT) as controller:
        try:
            yield controller
        finally:
            controller.kill()


async def hear(controller: Popen[str], word: str, number: int = 1) -> list[str]:
    """What it says in so many lines that begin with ``word``; others are skipped."""
    assert controller.stdout is not None
    said: list[str] = []
    while len(said) < number:
        line = await to_thread.run_sync(controller.stdout.readline)
        assert line, "the controller has ended"
        if line.startswith(word):
            said.append(line.removeprefix(word).strip())
    return said


async def _be_controller(address: str, directory: Path, settings: Mapping[str, Any], names: Sequence[str]) -> None:
    config = SlurmConfig(**(SETTINGS | dict(settings)))
    async with (
        open_controller(address) as (listener, controller),
        SlurmScheduler.open(config, directory=directory, module=CALLER) as scheduler,
        AsyncExitStack() as stack,
        anyio.create_task_group() as tasks,
    ):
        for name in names:
            placement = await stack.enter_async_context(scheduler.place(spec(controller, name)))
            print(f"placed {placement.job}", flush=True)
            tasks.start_soon(_tell, listener, name)
        await anyio.sleep_forever()


async def _tell(listener: Listener, name: str) -> None:
    while True:
        peer = await listener.wait_for(name)
        print(f"here {name}", flush=True)
        await peer.wait_closed()


if __name__ == "__main__":
    try:
        anyio.run(_be_controller, sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4:])
    except SchedulerError as error:
        print(f"ended {error}", flush=True)
        sys.exit(1)
