"""Checkpoints: directories of safetensors and one JSON document, written completely or not at all. No pickle.

::

    <root>/step-00000012/
        model.safetensors        float32 weights; of a run with an adapter, its directory (``lora``) instead
        optimizer.safetensors    Adam's moments
        rng.safetensors          states of torch's generators
        checkpoint.json          step, sizes of the files above, and the caller's counters

The latest checkpoint is found by listing the directory, so no pointer can be out of date. A directory whose document is
missing, unreadable, or names sizes that the files do not have is incomplete and ignored. ``trainer.py`` and its caller
define the meaning of the counters; exports for other programs are in ``weights.py``.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import field, frozen
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from areal_actors.errors import CheckpointError
from areal_actors.training.directories import REPLACED, atomic_directory, sweep
from areal_actors.training.tensor_files import write_tensors

__all__ = ["Checkpoint", "find_checkpoints", "find_latest", "save_checkpoint"]

_DOCUMENT = "checkpoint.json"
_FORMAT = 1
_NAME = re.compile(r"step-(\d{8,})(" + re.escape(REPLACED) + r")?")


@frozen(kw_only=True)
class Checkpoint:
    """A complete checkpoint on disk. ``counters`` are those that its writer passed."""

    path: Path
    step: int
    counters: Mapping[str, Any] = field(factory=dict)

    def has(self, part: str) -> bool:
        """Return whether the checkpoint has tensors of ``part``."""
        return (self.path / f"{part}.safetensors").is_file()

    def load(self, part: str) -> dict[str, Tensor]:
        """Return the tensors of ``part`` ("model", "optimizer", "rng"), on the CPU.

        Raises ``CheckpointError`` if they cannot be read.
        """
        try:
            return load_file(self.path / f"{part}.safetensors")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.path / part}.safetensors cannot be read: {error}.") from error


def save_checkpoint(
    root: Path,
    *,
    step: int,
    parts: Mapping[str, Mapping[str, Tensor]],
    counters: Mapping[str, Any],
    documents: Mapping[str, Mapping[str, Any]] | None = None,
    num_kept: int = 2,
) -> Checkpoint:
    """Write a checkpoint of ``step`` and remove all but the last ``num_kept``.

    ``counters`` must be JSON, and so must ``documents``, which are written next to the tensors by their names. Raises
    ``CheckpointError`` if it cannot be written; older checkpoints are untouched in that case.
    """
    sweep(root)
    path = root / f"step-{step:08d}"
    num_bytes = sum(tensor.nbytes for tensors in parts.values() for tensor in tensors.values())
    with atomic_directory(path, num_bytes=num_bytes) as partial:
        for name, tensors in parts.items():
            write_tensors(partial / f"{name}.safetensors", tensors)
        for name, content in (documents or {}).items():
            (partial / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        sizes = {file.name: file.stat().st_size for file in partial.iterdir()}
        document = {"format": _FORMAT, "step": step, "sizes": sizes, "counters": dict(counters)}
        (partial / _DOCUMENT).write_text(json.dumps(document, indent=2), encoding="utf-8")
    for old in find_checkpoints(root)[:-num_kept]:
        shutil.rmtree(old.path, ignore_errors=True)
    return Checkpoint(path=path, step=step, counters=dict(counters))


def find_checkpoints(root: Path) -> tuple[Checkpoint, ...]:
    """Return all complete checkpoints in ``root``, oldest first; none if it does not exist."""
    names = sorted(root.glob("step-*"), key=lambda path: path.name) if root.is_dir() else []
    found: dict[int, Checkpoint] = {}
    for path in names:
        checkpoint = _read(path)
        if checkpoint is not None:
            found.setdefault(checkpoint.step, checkpoint)  # sorted: a replaced one comes after its successor
    return tuple(found[step] for step in sorted(found))


def find_latest(root: Path) -> Checkpoint | None:
    """Return the complete checkpoint of the highest step, or ``None``."""
    return next(reversed(find_checkpoints(root)), None)


def _read(path: Path) -> Checkpoint | None:
    if not _NAME.fullmatch(path.name):
        return None
    try:
        document = json.loads((path / _DOCUMENT).read_text(encoding="utf-8"))
        sizes = {name: (path / name).stat().st_size for name in document["sizes"]}
        is_complete = document["format"] == _FORMAT and sizes == document["sizes"]
        return Checkpoint(path=path, step=document["step"], counters=document["counters"]) if is_complete else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
