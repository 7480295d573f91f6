"""A trainer's side in a process of its own: ``keeping_apart.py MODEL DIRECTORY VERSION`` keeps a model as a version."""

from __future__ import annotations

import sys
from pathlib import Path

import anyio

from areal_actors.actors.weights import WeightKeeper
from areal_actors.core import ActorSystem
from areal_actors.core.remote import listen
from areal_actors.models import load_policy
from areal_actors.training.shelf import Shelf, ShelfPublisher

SECRET = b"a secret of two processes of a test"


class Policy:
    """A model at a version."""

    def __init__(self, model: Path, version: int) -> None:
        self.model, self.version = load_policy(model).float(), version
        self.state_dict = self.model.state_dict


async def main(model: Path, directory: Path, version: int) -> None:
    shelf = Shelf(root=directory / "kept", bucket_bytes=4 * 1024)
    ShelfPublisher(shelf=shelf).publish(Policy(model, version))
    address = f"unix:{directory}/own/socket"
    async with ActorSystem.open() as system:
        weights = await system.spawn(WeightKeeper(shelf), name="weights")
        async with listen(address, secret=SECRET, expose={"weights": weights}):
            print(address, flush=True)  # noqa: T201 - for whoever has started it
            await anyio.sleep_forever()


if __name__ == "__main__":
    anyio.run(main, Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
