"""A worker with nothing to do: ``python -m tests.schedulers.slurm_local.caller``.

It calls its controller, stays connected, and calls again when it is cut off, until its lease is over. Told to end, it
writes a checkpoint, and exits with the status that asks to be started again. Twice a second it leaves a sign of life,
which only one incarnation of a worker may do at a time. ``CALLER_ORDER`` can have it do something else.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import anyio

from areal_actors.errors import Unreachable
from areal_actors.kernel.remote import Limits, connect
from areal_actors.schedulers.base import CONTROLLER_LOST, RUN_AGAIN
from areal_actors.schedulers.bootstrap import BOOTSTRAP_VARIABLE, Bootstrap, read_bootstrap

_LIMITS = Limits(heartbeat_seconds=0.3, silence_seconds=1.5, hello_seconds=1.5)


def main() -> None:
    """Be a worker."""
    told = read_bootstrap("")
    order, _, value = os.environ.get("CALLER_ORDER", "").partition("=")
    print(f"{told.name} lives as {told.life} on {os.uname().nodename}", flush=True)
    if order == "exit":
        print("something went wrong here", file=sys.stderr, flush=True)
        sys.exit(int(value))
    if order == "show":
        shown = {name: text for name, text in os.environ.items() if name in value.split(",")}
        (_directory() / f"shown-{told.name}").write_text(json.dumps(shown))
    sys.exit(anyio.run(_live, told))


def _directory() -> Path:
    return Path(os.environ[BOOTSTRAP_VARIABLE]).parent.parent


async def _live(told: Bootstrap) -> int:
    status = 0
    async with anyio.create_task_group() as tasks:

        async def until_told() -> None:
            nonlocal status
            with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGUSR1) as signals:
                async for number in signals:
                    print(f"told to end by {number.name}", flush=True)
                    (_directory() / f"checkpoint-{told.name}").write_text(f"{told.life} {time.time()}")
                    status = RUN_AGAIN
                    tasks.cancel_scope.cancel()

        async def until_lost() -> None:
            nonlocal status
            await _stay_connected(told, lease=float(os.environ.get("CALLER_LEASE", "4")))
            print("controller is lost", flush=True)
            status = CONTROLLER_LOST
            tasks.cancel_scope.cancel()

        tasks.start_soon(until_told)
        tasks.start_soon(until_lost)
    return status


async def _stay_connected(told: Bootstrap, *, lease: float) -> None:
    last = anyio.current_time()
    while anyio.current_time() - last < lease:
        try:
            async with connect(
                told.address, secret=told.secret, node=told.name, incarnation=told.life + 1, limits=_LIMITS
            ) as peer:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(_send_heartbeats, told)
                    await peer.wait_closed()
                    tasks.cancel_scope.cancel()
                last = anyio.current_time()
        except Unreachable as error:
            print(error, flush=True)
        await anyio.sleep(0.2)


async def _send_heartbeats(told: Bootstrap) -> None:
    while True:
        with (_directory() / f"beats-{told.name}").open("a") as file:
            file.write(f"{told.life} {time.time():.3f}\n")
        await anyio.sleep(0.5)


if __name__ == "__main__":
    main()
