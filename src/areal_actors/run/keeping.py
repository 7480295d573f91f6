"""Who keeps the weights of a run for servers that receive them, if they are published so: in the trainer's process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from attrs import frozen

from areal_actors.config import RunConfig
from areal_actors.core import ActorSystem, Ref
from areal_actors.dashboard import RunDirectory
from areal_actors.messages import Weights
from areal_actors.training.config import PublishBy

if TYPE_CHECKING:
    from areal_actors.training.shelf import Shelf

__all__ = ["Keeping", "keep_weights", "keeping_weights"]

_MIB = 1 << 20


@frozen(kw_only=True)
class Keeping:
    """Where published weights are put, and who gives them to servers."""

    shelf: Shelf
    keeper: Ref[Weights]

    async def find(self) -> Ref[Weights]:
        """Who gives them; at once."""
        return self.keeper


async def keep_weights(system: ActorSystem, config: RunConfig, directory: RunDirectory) -> Keeping | None:
    """Spawn who keeps them in ``system``; ``None`` if weights go other ways."""
    trainer = config.trainer
    if trainer.publish is not PublishBy.DISTRIBUTED:
        return None
    from areal_actors.actors.weights import WeightKeeper
    from areal_actors.training.shelf import Shelf

    shelf = Shelf(
        root=directory.published, bucket_bytes=trainer.publish_bucket_mib * _MIB, num_kept=trainer.publish_keep
    )
    return Keeping(shelf=shelf, keeper=await system.spawn(WeightKeeper(shelf), name="weights"))


@asynccontextmanager
async def keeping_weights(config: RunConfig, directory: RunDirectory) -> AsyncIterator[Keeping | None]:
    """As ``keep_weights``, for a block, within which engines open and close."""
    async with ActorSystem.open(name="weights") as system:
        yield await keep_weights(system, config, directory)
