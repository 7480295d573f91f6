"""A router with replicas, and an actor that streams from them past it, as another process does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from attrs import define, evolve, field
from tests.stacks.replica_stack import CountingEngine, ReplicaStack, open_replica_stack

from areal_actors.errors import Unreachable
from areal_actors.generation.rerouting import DirectGeneration
from areal_actors.generation.router import RouterConfig
from areal_actors.kernel import Ref
from areal_actors.kernel.remote import Peer
from areal_actors.messages import AddReplica, Generation
from areal_actors.run.inference import spawn_generation
from areal_actors_testing.remote import pretend_remote


@define
class DirectStack:
    """``near`` asks from another process, and ``far`` is the process of the router. ``refs`` are found by address."""

    far: ReplicaStack
    near: ReplicaStack
    refs: dict[str, Ref[Generation]] = field(factory=dict)
    peers: dict[str, Peer] = field(factory=dict)
    """Open connections to replicas, by address."""
    unreachable: set[str] = field(factory=set)
    num_dialled: int = 0

    async def add(
        self, name: str, engine: CountingEngine | None = None, *, address: str | None = None
    ) -> CountingEngine:
        """A replica that other processes reach at an address."""
        engine = engine or CountingEngine()
        ref = await spawn_generation(self.far.system, engine, name=f"{name}-{len(self.refs)}")
        where = address or f"{name}:{len(self.refs)}"
        self.refs[where] = self.far.refs[name] = ref
        self.far.engines[name] = engine
        await self.far.router.ask(AddReplica(name=name, ref=ref, address=where))
        await anyio.wait_all_tasks_blocked()
        return engine

    @asynccontextmanager
    async def dial(self, address: str) -> AsyncIterator[Peer]:
        """Connect to the replica at an address."""
        if address in self.unreachable:
            raise Unreachable(f"no answer at {address}", sent=False)
        self.num_dialled += 1
        async with pretend_remote({"replica": self.refs[address]}) as (peer, _):
            self.peers[address] = peer
            yield peer

    def cut(self, name: str) -> None:
        """Close the connections to the replicas that had this name."""
        for address, peer in self.peers.items():
            if address.partition(":")[0] == name:
                peer.close("the network is down")


@asynccontextmanager
async def open_direct_stack(*names: str, config: RouterConfig | None = None) -> AsyncIterator[DirectStack]:
    """A router with replicas, and an actor that streams from them in a process of its own, as far as it can tell."""
    async with open_replica_stack(config=config) as far, pretend_remote({"generation": far.router}) as (peer, _):
        stack = DirectStack(far, far)
        direct = DirectGeneration(peer.ref(Generation, "generation"), stack.dial, actor="replica")
        stack.near = evolve(far, router=await far.system.spawn(direct, name="direct"))
        for name in names:
            await stack.add(name)
        yield stack
        await stack.near.router.stop()
