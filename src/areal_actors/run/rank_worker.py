"""What a rank of a training gang runs: it makes its policy, offers its actor, and trains along (``ranks``)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
from anyio import to_thread

from areal_actors.config import load_config
from areal_actors.core import ActorSystem
from areal_actors.core.remote import Peer, connect
from areal_actors.models import resolve_model
from areal_actors.run.endings import until_orphaned, until_signalled
from areal_actors.run.job import create_policy

if TYPE_CHECKING:
    from areal_actors.training.trainer import PolicyTrainer

__all__ = ["serve_rank"]


async def serve_rank(order: Mapping[str, Any]) -> None:
    """Be a rank until the first one is gone."""
    from areal_actors.actors.gang import RankActor  # torch takes seconds, and other workers do without

    policy = await to_thread.run_sync(_load_policy, order)
    async with ActorSystem.open() as system:
        actor = RankActor(policy)
        rank = await system.spawn(actor, name="rank")
        secret = bytes.fromhex(order["secret"])
        async with connect(order["address"], secret=secret, node=order["name"], expose={"rank": rank}) as peer:
            await _stay(peer, order["name"], failed=actor.failed)


def _load_policy(order: Mapping[str, Any]) -> PolicyTrainer:
    config = load_config(Path(order["config"]))
    policy = create_policy(config, resolve_model(config.model))
    if order["is_resumed"]:
        policy.restore(Path(order["checkpoints"]))
    return policy


async def _stay(peer: Peer, name: str, *, failed: anyio.Event) -> None:
    """Say that we serve; until nobody is connected, whoever started us is gone, we are asked to leave, or we failed."""
    print(json.dumps({"name": name}), flush=True)  # noqa: T201 - the line that is waited for
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(until_orphaned, tasks.cancel_scope)
        tasks.start_soon(until_signalled, tasks.cancel_scope)
        tasks.start_soon(_until_failed, failed, tasks.cancel_scope)
        await peer.wait_closed()
        tasks.cancel_scope.cancel()


async def _until_failed(failed: anyio.Event, scope: anyio.CancelScope) -> None:
    await failed.wait()
    scope.cancel()
