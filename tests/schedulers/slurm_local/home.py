"""A home that somebody will kill: ``python -m tests.schedulers.slurm_local.home ADDRESS DIRECTORY NAME...``.

It places a caller for each name, says so as they connect, and stays.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
from tests.schedulers.slurm_local.callers import CALLER, open_home, spec

from areal_actors.core.remote import Listener
from areal_actors.schedulers.slurm import SlurmConfig, SlurmScheduler


async def _be_home(address: str, directory: Path, names: Sequence[str]) -> None:
    config = SlurmConfig(poll_seconds=0.5, time_minutes=10, margin_seconds=60, preflight_seconds=2.0)
    async with (
        open_home(address) as (listener, home),
        SlurmScheduler.open(config, directory=directory, module=CALLER) as scheduler,
        AsyncExitStack() as stack,
        anyio.create_task_group() as tasks,
    ):
        for name in names:
            placement = await stack.enter_async_context(scheduler.place(spec(home, name)))
            print(f"placed {placement.job}", flush=True)
            tasks.start_soon(_tell, listener, name)
        await anyio.sleep_forever()


async def _tell(listener: Listener, name: str) -> None:
    await listener.wait_for(name)
    print(f"here {name}", flush=True)


if __name__ == "__main__":
    anyio.run(_be_home, sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
