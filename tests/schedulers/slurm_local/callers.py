"""Controllers, schedulers and specifications for ``caller``, the worker of these tests."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.schedulers.slurm_local.cluster import Cluster

from areal_actors.kernel.remote import Limits, Listener, listen
from areal_actors.schedulers.base import ControllerAddress, Resources, WorkerSpec
from areal_actors.schedulers.slurm import SlurmConfig, SlurmScheduler

__all__ = ["CALLER", "SECRET", "SETTINGS", "open_controller", "open_scheduler", "spec"]

CALLER = "tests.schedulers.slurm_local.caller"
SECRET = b"known only to both sides of a test"
_LIMITS = Limits(heartbeat_seconds=0.3, silence_seconds=1.5)
SETTINGS = {
    "poll_seconds": 0.3,
    "time_minutes": 10,
    "margin_seconds": 60,
    "preflight_seconds": 5.0,
    "command_timeout_seconds": 5.0,
}
"""Of the scheduler."""


@asynccontextmanager
async def open_scheduler(
    cluster: Cluster,
    directory: Path,
    *,
    environment: Mapping[str, str] | None = None,
    **settings: Any,
) -> AsyncIterator[SlurmScheduler]:
    """A scheduler of the cluster whose workers are callers."""
    async with SlurmScheduler.open(
        SlurmConfig(**(SETTINGS | settings)),
        directory=directory,
        environment=cluster.environment | (environment or {}),
        module=CALLER,
    ) as scheduler:
        yield scheduler


@asynccontextmanager
async def open_controller(address: str, *, secret: bytes = SECRET) -> AsyncIterator[tuple[Listener, ControllerAddress]]:
    """A listener that callers find, and how they find it."""
    async with listen(address, secret=secret, node="controller", limits=_LIMITS) as listener:
        yield listener, ControllerAddress(address=listener.address, secret=secret)


def spec(
    controller: ControllerAddress,
    name: str = "caller-0",
    *,
    order: str = "",
    lease: float = 4.0,
    environment: Mapping[str, str] | None = None,
    resources: Resources | None = None,
    life: int = 0,
) -> WorkerSpec:
    """A caller that is told ``order``, and leaves when it has been without controller for ``lease`` seconds."""
    return WorkerSpec(
        name=name,
        controller=controller,
        life=life,
        environment={"CALLER_ORDER": order, "CALLER_LEASE": str(lease), **(environment or {})},
        resources=resources or Resources(),
        python=Path(sys.executable),
    )
