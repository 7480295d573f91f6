"""What a process runs that was started for one part of a service: ``python -m areal_actors.worker``.

It is told on its standard input what to be, as one line of JSON, because a command line is seen by everybody on the
machine and an order holds secrets. Once it serves, it says so in one line of JSON on its standard output. It ends when
its standard input does: then whoever started it is gone.

These parts can live apart:

* ``proxy``: it owns no facts and asks the actors of the service for all it says. Who starts it is ``run.proxies``.
* ``rank``: it trains along with the trainer, as one of several. Who starts it is ``run.ranks``.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
from anyio import to_thread
from attrs import evolve

from areal_actors.config import RunConfig, load_config
from areal_actors.core import ActorSystem
from areal_actors.core.remote import Peer, connect
from areal_actors.messages import Accounts, Capacity, DescribeEndpoint, Exports, Generation, Intake, Sessions
from areal_actors.models import resolve_model
from areal_actors.proxy import ProxyServer
from areal_actors.rendering import Renderer, load_renderer
from areal_actors.run.job import create_policy
from areal_actors.telemetry import logging_to_stream

if TYPE_CHECKING:
    from areal_actors.training.trainer import PolicyTrainer

__all__ = ["main"]


def main() -> None:
    """Be what the first line of standard input says, until there is no more of it."""
    order = json.loads(sys.stdin.readline())
    with logging_to_stream():
        anyio.run(_ROLES[order["role"]], order)


async def _serve_proxy(order: Mapping[str, Any]) -> None:
    config = load_config(Path(order["config"]))
    renderer = await to_thread.run_sync(_load_renderer, config)
    async with (
        connect(order["address"], secret=bytes.fromhex(order["secret"]), node=order["name"]) as peer,
        ActorSystem.open() as system,
    ):
        serving = await system.spawn(_create_proxy(config, order, peer, renderer), name="proxy")
        endpoint = await serving.ask(DescribeEndpoint())
        await _stay(peer, {"url": endpoint.url})


async def _serve_rank(order: Mapping[str, Any]) -> None:
    from areal_actors.actors.gang import RankActor  # torch takes seconds, and a proxy does without

    policy = await to_thread.run_sync(_load_policy, order)
    async with ActorSystem.open() as system:
        actor = RankActor(policy)
        rank = await system.spawn(actor, name="rank")
        secret = bytes.fromhex(order["secret"])
        async with connect(order["address"], secret=secret, node=order["name"], expose={"rank": rank}) as peer:
            await _stay(peer, {"name": order["name"]}, failed=actor.failed)


def _load_policy(order: Mapping[str, Any]) -> PolicyTrainer:
    config = load_config(Path(order["config"]))
    policy = create_policy(config, resolve_model(config.model))
    if order["is_resumed"]:
        policy.restore(Path(order["checkpoints"]))
    return policy


def _load_renderer(config: RunConfig) -> Renderer:
    return load_renderer(resolve_model(config.tokenizer or config.model).path, config=config.renderer)


def _create_proxy(config: RunConfig, order: Mapping[str, Any], peer: Peer, renderer: Renderer) -> ProxyServer:
    return ProxyServer(
        sessions=peer.ref(Sessions, "sessions"),
        exports=peer.ref(Exports, "exports"),
        capacity=peer.ref(Capacity, "capacity"),
        generation=peer.ref(Generation, "generation"),
        intake=peer.ref(Intake, "intake") if "intake" in peer.exposed else None,
        accounts=peer.ref(Accounts, "accounts") if "accounts" in peer.exposed else None,
        config=evolve(config.proxy, port=order["port"], admin_key=order["admin_key"]),
        decode=renderer.decode,
    )


async def _stay(peer: Peer, ready: Mapping[str, Any], *, failed: anyio.Event | None = None) -> None:
    """Say that we serve; until nobody is connected, whoever started us is gone, we are asked to leave, or we failed."""
    print(json.dumps(ready), flush=True)  # noqa: T201 - the line that is waited for
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_until_orphaned, tasks.cancel_scope)
        tasks.start_soon(_until_signalled, tasks.cancel_scope)
        if failed is not None:
            tasks.start_soon(_until_failed, failed, tasks.cancel_scope)
        await peer.wait_closed()
        tasks.cancel_scope.cancel()


async def _until_orphaned(scope: anyio.CancelScope) -> None:
    """A read on a thread cannot be cancelled; it is left behind when the process ends for another reason."""
    await to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)
    scope.cancel()


async def _until_failed(failed: anyio.Event, scope: anyio.CancelScope) -> None:
    await failed.wait()
    scope.cancel()


async def _until_signalled(scope: anyio.CancelScope) -> None:
    """Asked to leave, a proxy drains: what it answers may be finished, and what comes new is told to come again."""
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for _ in signals:
            scope.cancel()


_ROLES = {"proxy": _serve_proxy, "rank": _serve_rank}


if __name__ == "__main__":
    main()
