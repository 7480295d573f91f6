"""The weights that were published last, kept for servers that ask for them: in memory, and as a directory on demand.

What the trainer lends changes with its next step; so each publication is copied, in the engine's dtype and to the
memory of the host. Who asks for it is known by the actor around this (``actors.weights``), how it is broadcast by
``broadcast``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from attrs import define, field, frozen
from torch import Tensor

from areal_actors.checkpoint_tensors import to_checkpoint_tensors
from areal_actors.domain import Snapshot
from areal_actors.errors import EngineError
from areal_actors.messages import TensorBucket
from areal_actors.training.publication import DiskPublisher, Publishable

__all__ = ["KeptWeights", "Shelf", "ShelfPublisher", "pack_buckets"]


@frozen(kw_only=True, eq=False)
class KeptWeights:
    """A version: its tensors on the CPU, in buckets of bounded size, and how it is written."""

    version: int
    write: Callable[[], Path]
    tensors: Mapping[str, Tensor]
    buckets: tuple[TensorBucket, ...]

    def tensors_of(self, number: int) -> list[Tensor]:
        """Those of a bucket, in its order."""
        return [self.tensors[name] for name in self.buckets[number].names]


@define(eq=False, kw_only=True)
class Shelf:
    """Where one version lies at a time. ``put`` is called on the trainer's thread, ``write`` on one other.

    Directories are written below ``root``, and the last ``num_kept`` of them stay.
    """

    root: Path
    bucket_bytes: int
    num_kept: int = 1
    device: torch.device = field(factory=lambda: torch.device("cpu"))
    """Where the trainer has its weights."""
    _kept: KeptWeights | None = field(default=None, init=False)
    _written: tuple[KeptWeights, Path] | None = field(default=None, init=False)

    def put(self, policy: Publishable, dtype: torch.dtype) -> None:
        """Keep the weights as they are, in ``dtype``, and forget those before. Blocks while they are copied."""
        self._kept = self._written = None  # two versions may be more than there is memory for
        disk = DiskPublisher(root=self.root, dtype=dtype, num_kept=self.num_kept)
        tensors = to_checkpoint_tensors(policy.model, policy.state_dict(), dtype=dtype, is_copied=True)
        self.device = next(policy.model.parameters()).device
        self._kept = KeptWeights(
            version=policy.version,
            write=partial(disk.write, policy.version, policy.model, tensors),
            tensors=tensors,
            buckets=tuple(pack_buckets(tensors, self.bucket_bytes)),
        )

    def take(self, version: int) -> KeptWeights:
        """The weights, if they are of ``version``. Raises ``EngineError`` if they are not."""
        kept = self._kept
        if kept is None or kept.version != version:
            present = "none is" if kept is None else f"version {kept.version} is"
            raise EngineError(f"Version {version} of the weights is kept no longer, {present}; load the next one.")
        return kept

    def write(self, version: int) -> Path:
        """The directory of ``version``, which is written unless it is there. Blocks.

        Raises ``EngineError`` if the version is not kept, and ``CheckpointError`` if it cannot be written.
        """
        kept, written = self.take(version), self._written
        if written is None or written[0] is not kept:
            written = self._written = (kept, kept.write())
        return written[1]


@frozen(kw_only=True)
class ShelfPublisher:
    """Publishes by keeping: whoever is told of the version asks for it, and until the next one it is there.

    ``dtype``, such as ``bfloat16``, is the engine's.
    """

    shelf: Shelf
    dtype: str = "float32"

    def publish(self, policy: Publishable) -> Snapshot:
        """Copy the weights."""
        self.shelf.put(policy, getattr(torch, self.dtype))
        return Snapshot(version=policy.version, is_kept=True)


def pack_buckets(tensors: Mapping[str, Tensor], max_bytes: int) -> Iterator[TensorBucket]:
    """The tensors in their order, in buckets of at most ``max_bytes``; a larger one goes alone."""
    names: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        if names and size + tensor.nbytes > max_bytes:
            yield _bucket(names, tensors)
            names, size = [], 0
        names.append(name)
        size += tensor.nbytes
    if names:
        yield _bucket(names, tensors)


def _bucket(names: Sequence[str], tensors: Mapping[str, Tensor]) -> TensorBucket:
    return TensorBucket(
        names=tuple(names),
        dtypes=tuple(str(tensors[name].dtype).removeprefix("torch.") for name in names),
        shapes=tuple(tuple(tensors[name].shape) for name in names),
    )
