"""Checkpoints: directories of safetensors and one JSON document, written completely or not at all. No pickle.

::

    <root>/step-00000012/
        model.safetensors        float32 weights; of a run with an adapter, its directory (``lora``) instead
        optimizer.safetensors    Adam's moments
        rng.safetensors          states of torch's generators
        checkpoint.json          step, sizes and digests of all files, the caller's counters

In a gang each rank writes its rows of weights and moments, and none has the whole::

        model/shard-00001-of-00002.safetensors
        optimizer/shard-00001-of-00002.safetensors

The header of a shard says where its rows begin, as torch's ``HuggingFaceStorageWriter`` writes it, so that
``torch.distributed.checkpoint`` reads such a directory, too. That writer is not used: it is not in torch 2.6, and it
plans each checkpoint by exchanging pickled objects. Torch's other formats are pickle.

``stored_checkpoints`` finds and reads them. ``trainer.py`` and its caller define what the counters mean; exports for
other programs are in ``weights.py``.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import evolve, field, frozen
from safetensors import SafetensorError
from torch import Tensor

from areal_actors.errors import CheckpointError, ModelError
from areal_actors.lib.atomic_write import partial_path, sync_path
from areal_actors.training.directories import atomic_directory, sweep, write_tensors
from areal_actors.training.gang import Gang
from areal_actors.training.sharding import Rows
from areal_actors.training.stored_checkpoints import (
    DOCUMENT,
    FORMAT,
    OFFSET,
    OFFSETS,
    Checkpoint,
    digest_document,
    digest_file,
    find_checkpoints,
)

_NOTE = ".note"
"""Suffix of the file with the size and the digest of a shard, while a checkpoint is written."""


@frozen(kw_only=True)
class Contents:
    """What a checkpoint holds: ``parts`` are whole tensors, ``shards`` of which each rank of a gang has some rows.

    ``counters`` are JSON, and so are the ``documents``, which are written next to the tensors by their names.
    """

    parts: Mapping[str, Mapping[str, Tensor]] = field(factory=dict)
    shards: Mapping[str, Mapping[str, Rows]] = field(factory=dict)
    counters: Mapping[str, Any] = field(factory=dict)
    documents: Mapping[str, Mapping[str, Any]] = field(factory=dict)

    def copied(self) -> Contents:
        """Return the contents with the tensors of this rank copied to the host, where nothing changes them."""
        return evolve(
            self,
            parts={
                part: {name: tensor.detach().to("cpu", copy=True) for name, tensor in found.items()}
                for part, found in self.parts.items()
            },
            shards={
                part: {name: evolve(rows, part=rows.part.detach().to("cpu", copy=True)) for name, rows in found.items()}
                for part, found in self.shards.items()
            },
        )


def save_checkpoint(
    root: Path, contents: Contents, *, step: int, num_kept: int = 2, gang: Gang | None = None
) -> Checkpoint:
    """Write a checkpoint of ``step`` and keep the last ``num_kept``, which include it.

    Later steps are of an attempt that was abandoned because they are damaged: they are removed.

    All ranks of ``gang`` call this at the same time. Each writes its rows of the shards, and the first one everything
    else; the others return a checkpoint of which only path and step are known.

    Raises ``CheckpointError`` if it cannot be written by one of the ranks; older checkpoints are untouched in that
    case.
    """
    gang, parts, shards = gang or Gang.alone(), contents.parts, contents.shards
    if gang.rank > 0:
        return _save_rows(root / f"step-{step:08d}", shards, step=step, gang=gang)
    if gang.is_alone:
        whole = {part: {name: rows.part for name, rows in found.items()} for part, found in shards.items()}
        parts, shards = {**parts, **whole}, {}
    # Before the free space is measured: the leftovers of a crash may take as much as a checkpoint.
    sweep(root)
    path = root / f"step-{step:08d}"
    num_bytes = sum(tensor.nbytes for tensors in parts.values() for tensor in tensors.values())
    num_bytes += sum(rows.whole_nbytes for found in shards.values() for rows in found.values())
    with ExitStack() as stack:
        with agreed(gang, f"{path} could not be written"):
            partial = stack.enter_context(atomic_directory(path, num_bytes=num_bytes))
            for part in shards:
                (partial / part).mkdir()
        _write_shards(partial, path, shards, gang)
        digests = _take_notes(partial, path, len(shards) * gang.size)
        for name, tensors in parts.items():
            write_tensors(partial / f"{name}.safetensors", tensors)
        for name, content in contents.documents.items():
            (partial / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        sizes = {str(file.relative_to(partial)): file.stat().st_size for file in partial.rglob("*") if file.is_file()}
        digests |= {name: digest_file(partial / name) for name in sizes if name not in digests}
        checkpoint = Checkpoint(
            path=path,
            step=step,
            counters=dict(contents.counters),
            digests=digests,
        )
        # Written last: a directory without it is incomplete. All files are synced before the directory gets its name.
        document = {
            "format": FORMAT,
            "step": step,
            "sizes": sizes,
            "digests": digests,
            "counters": checkpoint.counters,
        }
        document["digest"] = digest_document(document)
        (partial / DOCUMENT).write_text(json.dumps(document, indent=2), encoding="utf-8")
        # Before the directory gets its name: a run must not resume from what this one did not go on from.
        for later in find_checkpoints(root):
            if later.step > step:
                shutil.rmtree(later.path, ignore_errors=True)
    # Only now: until the new one is complete, a run resumes from these.
    for old in find_checkpoints(root)[:-num_kept]:
        shutil.rmtree(old.path, ignore_errors=True)
    return checkpoint


def _save_rows(path: Path, shards: Mapping[str, Mapping[str, Rows]], *, step: int, gang: Gang) -> Checkpoint:
    """Write the rows of a rank that is not the first one. Returns when all ranks have written theirs."""
    with agreed(gang, f"{path} could not be written"):
        # The first rank creates the directory for all.
        pass
    try:
        _write_shards(partial_path(path), path, shards, gang)
    except OSError as error:
        raise CheckpointError(f"Rank {gang.rank} could not write its part of {path}: {error}.") from error
    return Checkpoint(path=path, step=step)


def _write_shards(partial: Path, path: Path, shards: Mapping[str, Mapping[str, Rows]], gang: Gang) -> None:
    """Write the rows of this rank, and next to each file a note of its size and digest, which the first rank takes."""
    with agreed(gang, f"{path} could not be written"):
        for part, found in shards.items():
            file = partial / part / f"shard-{gang.rank + 1:05d}-of-{gang.size:05d}.safetensors"
            # Each rank its own: gathered on the first one, weights and moments of 70 billion parameters take 840 GB.
            # What is not sharded is the same on all ranks.
            own = {name: rows for name, rows in found.items() if gang.rank == 0 or (rows.is_sharded and len(rows.part))}
            offsets = {
                name: {OFFSET: [rows.first, *[0] * (rows.part.ndim - 1)] if rows.part.ndim else []}
                for name, rows in own.items()
            }
            metadata = {OFFSETS: json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
            write_tensors(file, {name: rows.part for name, rows in own.items()}, metadata=metadata)
            # The first rank may be on another machine, and cannot do this.
            sync_path(file)
            file.with_suffix(_NOTE).write_text(f"{file.stat().st_size} {digest_file(file)}", encoding="ascii")


def _take_notes(partial: Path, path: Path, num_files: int) -> dict[str, str]:
    """Return the digests of ``num_files`` shards as the ranks that wrote them have noted, and remove the notes."""
    digests = {}
    for note in sorted(partial.rglob(f"*{_NOTE}")):
        file, (size, digest) = note.with_suffix(".safetensors"), note.read_text(encoding="ascii").split()
        if file.is_file() and file.stat().st_size == int(size):
            digests[str(file.relative_to(partial))] = digest
        note.unlink()
    if len(digests) < num_files:
        raise CheckpointError(
            f"{path} could not be written: the first rank sees {len(digests)} of the {num_files} files that the ranks "
            "wrote. All ranks need one file system; set the run directory to a shared one."
        )
    return digests


@contextmanager
def agreed(gang: Gang, problem: str) -> Iterator[None]:
    """Run a block on all ranks; if one cannot read or write files in it, all of them raise an error.

    Raises the rank's error, and on the others a ``CheckpointError`` that begins with ``problem``.
    """
    own: Exception | None = None
    try:
        yield
    except (OSError, SafetensorError, CheckpointError, ModelError) as error:
        own = error
    failed = gang.max(np.eye(gang.size)[gang.rank] * (own is not None))
    if own is not None:
        raise own
    if failed.any():
        raise CheckpointError(
            f"{problem}: rank {int(failed.argmax())} failed, and names the error in its log. All ranks need the run "
            "directory under one path."
        )


def generator_states() -> dict[str, Tensor]:
    """Return the state of each generator, by the name of its device."""
    states = {"cpu": torch.get_rng_state()}
    return states | {f"cuda{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}


def set_generator_states(states: Mapping[str, Tensor]) -> None:
    """Restore states returned by ``generator_states``; those of GPUs only if the number of GPUs is the same."""
    torch.set_rng_state(states["cpu"])
    devices = [states[name] for index in range(len(states)) if (name := f"cuda{index}") in states]
    if len(devices) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(devices)
