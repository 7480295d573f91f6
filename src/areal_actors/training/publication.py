"""Publication of new weights to the engines: by reference within the process, or as a directory that others read.

::

    <root>/version-00000012/
        model.safetensors        the weights, in the engine's dtype, by the names of the model's checkpoints
        config.json              the model's, so that an engine may also be started from here
    <root>/adapter-00000012/     an adapter (``lora``), for servers that load it next to the base model

A directory is written completely or not at all (``directories``); the last few are kept, because an engine may still
read the previous one. The trainer actor decides which engines are notified of a snapshot.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import ClassVar, Protocol

import torch
from attrs import field, frozen
from attrs.validators import ge

from areal_actors.domain import Snapshot
from areal_actors.lib.checkpoint_tensors import checkpoint_buckets, checkpoint_layout
from areal_actors.training.directories import atomic_directory, sweep, write_buckets
from areal_actors.training.lora import write_adapter
from areal_actors.training.policy import TrainedPolicy
from areal_actors.training.weights import write_config

_NAME = re.compile(r"(?:version|adapter)-(\d{8,})")


class Publisher(Protocol):
    """Creates snapshots that engines can load, of all weights or with ``only_adapter`` of the adapter."""

    only_adapter: ClassVar[bool]
    """Whether the base weights are not needed."""

    def publish(self, policy: TrainedPolicy) -> Snapshot:
        """Return a snapshot of the current weights. Blocks until it is complete."""
        ...


class MemoryPublisher:
    """Lends the weights themselves: for an engine in this process, valid only until the next step.

    An adapter is merged in float32 when the engine copies a weight. Engines with merged weights need no second path
    through their layers, and what rounding to the engine's data type changes is what it changes in full training.
    """

    only_adapter: ClassVar[bool] = False

    def publish(self, policy: TrainedPolicy) -> Snapshot:
        """Return a snapshot that shares the weights."""
        return Snapshot(version=policy.version, state=policy.state_dict())


@frozen(kw_only=True)
class DiskPublisher:
    """Writes each version below ``root`` in ``dtype``, and keeps the last ``num_kept``."""

    root: Path
    dtype: torch.dtype = torch.float32
    num_kept: int = field(default=2, validator=ge(1))
    only_adapter: ClassVar[bool] = False

    def publish(self, policy: TrainedPolicy) -> Snapshot:
        """Write the weights and remove newer versions, which a run left that was resumed from an earlier one.

        Raises ``CheckpointError`` if they cannot be written; older versions are untouched in that case.
        """
        sweep(self.root)
        path = self.root.absolute() / f"version-{policy.version:08d}"
        with policy.gathered() as state:
            layout = checkpoint_layout(policy.model, state, dtype=self.dtype)
            # Only one layer is converted at a time.
            buckets = checkpoint_buckets(policy.model, state, dtype=self.dtype)
            with atomic_directory(path, num_bytes=sum(tensor.nbytes for tensor in layout.values())) as partial:
                write_buckets(partial / "model.safetensors", layout, buckets)
                write_config(partial, policy.model, self.dtype)
        _forget_others(self.root, policy.version, self.num_kept)
        return Snapshot(version=policy.version, path=path)


@frozen(kw_only=True)
class AdapterPublisher:
    """Writes the adapter of each version below ``root``, and keeps the last ``num_kept``.

    Servers load it next to the base model in ``base``. At least two are kept: while a server loads one, requests run
    under the previous one.
    """

    root: Path
    base: Path
    num_kept: int = field(default=2, validator=ge(1))
    only_adapter: ClassVar[bool] = True

    def publish(self, policy: TrainedPolicy) -> Snapshot:
        """Write the adapter of ``policy``, and remove newer ones, as ``DiskPublisher.publish`` does.

        Raises ``CheckpointError`` if it cannot be written; older versions are untouched in that case.
        """
        sweep(self.root)
        path = self.root.absolute() / f"adapter-{policy.version:08d}"
        assert policy.adapter is not None, "all weights are trained"
        write_adapter(path, policy.adapter_tensors(), policy.adapter.documents())
        _forget_others(self.root, policy.version, max(2, self.num_kept))
        return Snapshot(version=policy.version, path=self.base, adapter=path)


def _forget_others(root: Path, version: int, num_kept: int) -> None:
    found = {int(match[1]): path for path in root.iterdir() if (match := _NAME.fullmatch(path.name))}
    # Newer versions were left by a run that was resumed from an earlier one.
    kept = sorted(number for number in found if number <= version)[-num_kept:]
    for number in found.keys() - set(kept):
        shutil.rmtree(found[number], ignore_errors=True)
