"""A worker with nothing to do: ``python -m tests.schedulers.slurm_local.caller``.

It calls home, stays connected, and calls again when it is cut off, until its lease is over. Told to end, it writes a
checkpoint, and leaves with the status that asks to be started again. Twice a second it leaves a sign of life, which
only one life of a worker may do at a time. ``CALLER_ORDER`` can have it do something else.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import anyio

from areal_actors.core.remote import Limits, connect
from areal_actors.errors import Unreachable
from areal_actors.schedulers.statuses import HOME_LOST, RUN_AGAIN

_LIMITS = Limits(heartbeat_seconds=0.3, silence_seconds=1.5, hello_seconds=1.5)


def main() -> None:
    """Be a worker."""
    bootstrap = Path(os.environ["AREAL_BOOTSTRAP"])
    words = json.loads(bootstrap.read_text())
    life = words["life"] + int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    order, _, value = os.environ.get("CALLER_ORDER", "").partition("=")
    print(f"{words['name']} lives as {life} on {os.uname().nodename}", flush=True)
    if order == "exit":
        print("something went wrong here", file=sys.stderr, flush=True)
        sys.exit(int(value))
    if order == "show":
        shown = {name: text for name, text in os.environ.items() if name in value.split(",")}
        Path(bootstrap.parent.parent, f"shown-{words['name']}").write_text(json.dumps(shown))
    sys.exit(anyio.run(_live, words, life, bootstrap.parent.parent))


async def _live(words: dict[str, Any], life: int, directory: Path) -> int:
    lease = float(os.environ.get("CALLER_LEASE", "4"))
    status = 0
    async with anyio.create_task_group() as tasks:

        async def until_told() -> None:
            nonlocal status
            with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGUSR1) as signals:
                async for number in signals:
                    print(f"told to end by {number.name}", flush=True)
                    (directory / f"checkpoint-{words['name']}").write_text(f"{life} {time.time()}")
                    status = RUN_AGAIN
                    tasks.cancel_scope.cancel()

        async def until_lost() -> None:
            nonlocal status
            await _stay_connected(words, life, directory, lease)
            print("home is lost", flush=True)
            status = HOME_LOST
            tasks.cancel_scope.cancel()

        tasks.start_soon(until_told)
        tasks.start_soon(until_lost)
    return status


async def _stay_connected(words: dict[str, Any], life: int, directory: Path, lease: float) -> None:
    last = anyio.current_time()
    number = 0
    while anyio.current_time() - last < lease:
        address = words["addresses"][number % len(words["addresses"])]
        number += 1
        try:
            async with connect(
                address, secret=bytes.fromhex(words["secret"]), node=words["name"], incarnation=life + 1, limits=_LIMITS
            ) as peer:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(_beat, directory / f"beats-{words['name']}", life)
                    await peer.wait_closed()
                    tasks.cancel_scope.cancel()
                last = anyio.current_time()
        except Unreachable as error:
            print(error, flush=True)
        await anyio.sleep(0.2)


async def _beat(path: Path, life: int) -> None:
    while True:
        with path.open("a") as file:
            file.write(f"{life} {time.time():.3f}\n")
        await anyio.sleep(0.5)


if __name__ == "__main__":
    main()
