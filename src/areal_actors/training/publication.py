"""How new weights reach whoever generates: by reference within the process, or as a directory that others read.

::

    <root>/version-00000012/
        model.safetensors        the weights, in the engine's dtype, by the names of the model's checkpoints
        config.json              the model's, so that an engine may also be started from here

A directory appears whole or not at all (``directories``); the last few are kept, because an engine may still read the
one before. Who is told of a snapshot is known by the trainer actor.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from attrs import field, frozen
from attrs.validators import ge
from torch import Tensor

from areal_actors.checkpoint_tensors import to_checkpoint_tensors
from areal_actors.domain import Snapshot
from areal_actors.training.config import PublishBy
from areal_actors.training.directories import atomic_directory, sweep
from areal_actors.training.tensor_files import write_tensors

__all__ = [
    "DiskPublisher",
    "MemoryPublisher",
    "Publishable",
    "Publisher",
    "create_publisher",
]

_NAME = re.compile(r"version-(\d{8,})")


class Publishable(Protocol):
    """What can be published: a policy with a version. ``model`` is a transformers causal LM."""

    @property
    def version(self) -> int:
        """Of the weights as they are."""
        ...

    @property
    def model(self) -> Any:
        """Whose configuration is written."""
        ...

    def state_dict(self) -> Mapping[str, Tensor]:
        """The weights by name."""
        ...


class Publisher(Protocol):
    """Makes a snapshot that engines can load."""

    def publish(self, policy: Publishable) -> Snapshot:
        """A snapshot of the weights as they are. Blocks for as long as it takes."""
        ...


class MemoryPublisher:
    """Lends the weights themselves: for an engine in this process, and only until the next step."""

    def publish(self, policy: Publishable) -> Snapshot:
        """The weights, shared."""
        return Snapshot(version=policy.version, state=policy.state_dict())


@frozen(kw_only=True)
class DiskPublisher:
    """Writes each version below ``root`` in ``dtype``, and keeps the last ``num_kept``."""

    root: Path
    dtype: torch.dtype = torch.float32
    num_kept: int = field(default=2, validator=ge(1))

    def publish(self, policy: Publishable) -> Snapshot:
        """Write the weights; versions that are newer, of a run that was resumed before them, are removed.

        Raises ``CheckpointError`` if they cannot be written; the versions before are untouched then.
        """
        tensors = to_checkpoint_tensors(policy.model, policy.state_dict(), dtype=self.dtype)
        path = self.write(policy.version, policy.model, tensors)
        return Snapshot(version=policy.version, path=path)

    def write(self, version: int, model: Any, tensors: Mapping[str, Tensor]) -> Path:
        """As ``publish``, of tensors that have the names and the dtype of checkpoints already; where they are now."""
        sweep(self.root)
        path = self.root.absolute() / f"version-{version:08d}"
        with atomic_directory(path, num_bytes=sum(tensor.nbytes for tensor in tensors.values())) as partial:
            write_tensors(partial / "model.safetensors", tensors)
            _write_config(model, partial, self.dtype)
        self._forget_others(version)
        return path

    def _forget_others(self, version: int) -> None:
        found = {int(match[1]): path for path in self.root.iterdir() if (match := _NAME.fullmatch(path.name))}
        kept = sorted(number for number in found if number <= version)[-self.num_kept :]
        for number in found.keys() - set(kept):
            shutil.rmtree(found[number], ignore_errors=True)


def create_publisher(by: PublishBy, *, root: Path, dtype: str, num_kept: int) -> Publisher:
    """What publishes ``by`` memory, or by disk; ``dtype`` (such as ``bfloat16``) is the engine's.

    What is broadcast lies on a shelf first, and is published by that (``shelf``).
    """
    if by is PublishBy.MEMORY:
        return MemoryPublisher()
    return DiskPublisher(root=root, dtype=getattr(torch, dtype), num_kept=num_kept)


def _write_config(model: Any, directory: Path, dtype: torch.dtype) -> None:
    model.config.save_pretrained(directory)
    path = directory / "config.json"
    document = json.loads(path.read_text(encoding="utf-8")) | {"dtype": str(dtype).removeprefix("torch.")}
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
