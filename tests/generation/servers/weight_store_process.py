"""A process that keeps a model as a published version: ``weight_store_process.py MODEL DIRECTORY VERSION``."""

from __future__ import annotations

import sys
from pathlib import Path

import anyio
from safetensors.torch import load_file

from areal_actors.kernel import ActorSystem
from areal_actors.kernel.remote import listen
from areal_actors.training.weight_store import StoredWeights, WeightStore, WeightStoreActor, pack_buckets

SECRET = b"a secret of two processes of a test"


def create_store(model: Path, directory: Path, version: int) -> WeightStore:
    """As a publisher would have filled it, which needs a trainer."""
    store = WeightStore(root=directory / "kept", bucket_bytes=4 * 1024)
    tensors = load_file(model / "model.safetensors")
    buckets = tuple(pack_buckets(tensors, store.bucket_bytes))
    store._kept = StoredWeights(version=version, tensors=tensors, buckets=buckets, write=lambda: directory)
    return store


async def main(model: Path, directory: Path, version: int) -> None:
    store = create_store(model, directory, version)
    address = f"unix:{directory}/own/socket"
    async with ActorSystem.open() as system:
        weights = await system.spawn(WeightStoreActor(store), name="weights")
        async with listen(address, secret=SECRET, expose={"weights": weights}):
            print(address, flush=True)  # noqa: T201 - for the process that has started it
            await anyio.sleep_forever()


if __name__ == "__main__":
    anyio.run(main, Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
