"""The engines that serve in workers, and who deals work out to them at present."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from areal_actors.actors.replicas import GenerationRouter, RouterConfig
from areal_actors.core import ActorSystem, Ref
from areal_actors.errors import ActorStopped
from areal_actors.messages import AddReplica, Generation, Replicas

__all__ = ["ServingReplicas"]


class ServingReplicas:
    """The engines that serve in workers, and the router of the present attempt, which deals work out to them.

    Each attempt has a router of its own, since versions may go back between two of them, and never within one.
    """

    def __init__(self) -> None:
        self._refs: dict[str, Ref[Generation]] = {}
        self._router: Ref[Replicas] | None = None

    @asynccontextmanager
    async def having(self, name: str, ref: Ref[Generation]) -> AsyncIterator[None]:
        """One serves while the block lasts."""
        self._refs[name] = ref
        await self._tell(AddReplica(name=name, ref=ref))
        try:
            yield
        finally:
            del self._refs[name]

    @asynccontextmanager
    async def routed(
        self, system: ActorSystem, config: RouterConfig, *, version: int
    ) -> AsyncIterator[Ref[Generation]]:
        """What stands for all of them, in ``system``. No engine serves with weights older than ``version``."""
        router = await system.spawn(GenerationRouter(config, version=version), name="generation")
        self._router = router
        try:
            for name, ref in tuple(self._refs.items()):
                await self._tell(AddReplica(name=name, ref=ref))
            yield router
        finally:
            self._router = None

    async def _tell(self, message: AddReplica) -> None:
        if self._router is not None:
            with suppress(ActorStopped):  # the attempt is over; the next one asks for all that serve
                await self._router.ask(message)
