"""Checkpoints: directories of safetensors and one JSON document, written completely or not at all. No pickle.

::

    <root>/step-00000012/
        model.safetensors        float32 weights; of a run with an adapter, its directory (``lora``) instead
        optimizer.safetensors    Adam's moments
        rng.safetensors          states of torch's generators
        checkpoint.json          step, sizes of the files above, and the caller's counters

In a gang each rank writes its rows of weights and moments, and none has the whole::

        model/shard-00001-of-00002.safetensors
        optimizer/shard-00001-of-00002.safetensors

The header of a shard says where its rows begin, as torch's ``HuggingFaceStorageWriter`` writes it, so that
``torch.distributed.checkpoint`` reads such a directory, too. That writer is not used: it is not in torch 2.6, and it
plans each checkpoint by exchanging pickled objects. Torch's other formats are pickle.

The latest checkpoint is found by listing the directory, so no pointer can be out of date. A directory whose document is
missing, unreadable, or names sizes that the files do not have is incomplete and ignored. ``trainer.py`` and its caller
define the meaning of the counters; exports for other programs are in ``weights.py``.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import evolve, field, frozen
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from areal_actors.errors import CheckpointError, ModelError
from areal_actors.lib.atomic_write import partial_path, sync_path
from areal_actors.training.directories import REPLACED, atomic_directory, sweep, write_tensors
from areal_actors.training.gang import Gang
from areal_actors.training.sharding import Rows, first_row, local_part, with_local_part

__all__ = [
    "Checkpoint",
    "Contents",
    "StoredTensors",
    "agreed",
    "find_checkpoints",
    "find_latest",
    "generator_states",
    "save_checkpoint",
    "save_shards",
    "set_generator_states",
]

_DOCUMENT = "checkpoint.json"
_FORMAT = 1
_OFFSETS, _OFFSET = "DCP_SHARDING_INFO", "saved_offsets"
"""Keys of torch's under which the header of a shard says at which index of the whole tensor each part begins."""
_NAME = re.compile(r"step-(\d{8,})(" + re.escape(REPLACED) + r")?")


@frozen(kw_only=True)
class Checkpoint:
    """A complete checkpoint on disk. ``counters`` are those that its writer passed."""

    path: Path
    step: int
    counters: Mapping[str, Any] = field(factory=dict)

    def has(self, part: str) -> bool:
        """Return whether the checkpoint has tensors of ``part``."""
        return bool(self._files(part))

    def tensors(self, part: str, *, like: Callable[[str], Tensor | None] | None = None) -> StoredTensors:
        """Return the tensors of ``part`` ("model", "optimizer", "rng"), to be read one at a time.

        If ``like`` returns a sharded tensor of its shape for a name, that tensor is sharded in the same way.

        Raises ``CheckpointError`` if they cannot be read.
        """
        files = self._files(part)
        if not files:
            raise CheckpointError(f"{self.path} cannot be read: it has no {part}.")
        return StoredTensors(files, like or (lambda _: None))

    def load(self, part: str) -> dict[str, Tensor]:
        """Return the whole tensors of ``part``, on the CPU. Raises ``CheckpointError`` if they cannot be read."""
        return dict(self.tensors(part))

    def _files(self, part: str) -> list[Path]:
        whole = self.path / f"{part}.safetensors"
        return [whole] if whole.is_file() else sorted((self.path / part).glob("shard-*.safetensors"))


@frozen
class _Piece:
    """Consecutive rows of a tensor, from ``first`` on, in an open file."""

    file: Any
    first: int
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.first + self.shape[0]


class StoredTensors(Mapping[str, Tensor]):
    """Tensors in ``files``, whole or in shards, which are read each time that they are asked for.

    They are whole and on the CPU, unless ``like`` returns a sharded tensor of the same shape: then only this rank's
    rows are read.

    Raises ``CheckpointError`` if they cannot be read.
    """

    def __init__(self, files: Sequence[Path], like: Callable[[str], Tensor | None]) -> None:
        self._like = like
        self._pieces: dict[str, list[_Piece]] = {}
        for path in files:
            with _reading(path):
                file: Any = safe_open(path, framework="pt")
                offsets = json.loads((file.metadata() or {}).get(_OFFSETS, "{}"))
                for name in file.keys():  # noqa: SIM118 - it is not a mapping
                    first = offsets.get(name, {}).get(_OFFSET) or [0]
                    piece = _Piece(file, first[0], tuple(file.get_slice(name).get_shape()))
                    # Shards are in the order of their rows.
                    self._pieces.setdefault(name, []).append(piece)

    def shape(self, name: str) -> torch.Size:
        """Return the shape of the whole tensor."""
        last = self._pieces[name][-1]
        return torch.Size((last.end, *last.shape[1:]) if last.shape else ())

    def digest(self) -> str:
        """Return a hash of the names and shapes: a step has one checkpoint, and its document has the sizes."""
        return sha256(repr([(name, tuple(self.shape(name))) for name in self]).encode()).hexdigest()

    def __getitem__(self, name: str) -> Tensor:
        pieces, like = self._pieces[name], self._like(name)
        if isinstance(like, DTensor) and like.shape == self.shape(name):
            first = first_row(like)
            return with_local_part(self.rows(name, first, first + len(local_part(like))), like)
        if len(pieces) > 1:
            return self.rows(name, 0, pieces[-1].end)
        with _reading(name):
            whole: Tensor = pieces[0].file.get_tensor(name)
            return whole

    def rows(self, name: str, first: int, stop: int) -> Tensor:
        """Return the rows of a tensor from ``first`` to before ``stop``, on the CPU; a scalar is one row."""
        pieces = self._pieces[name]
        if not pieces[0].shape:
            with _reading(name):
                scalar: Tensor = pieces[0].file.get_tensor(name)
                return scalar
        with _reading(name):
            parts = [
                piece.file.get_slice(name)[max(first - piece.first, 0) : min(stop, piece.end) - piece.first]
                for piece in pieces
                if max(first, piece.first) < min(stop, piece.end)
            ]
            # A rank has no rows of a tensor that has fewer than there are ranks.
            return torch.cat(parts or [pieces[0].file.get_slice(name)[0:0]])

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)


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
    """Write a checkpoint of ``step`` and remove all but the last ``num_kept``.

    Each rank of ``gang`` writes its rows of the shards: the first one calls this, and the others call ``save_shards``
    at the same time.

    Raises ``CheckpointError`` if it cannot be written by one of the ranks; older checkpoints are untouched in that
    case.
    """
    gang, parts, shards = gang or Gang.alone(), contents.parts, contents.shards
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
        written = _write_shards(partial, path, shards, gang)
        for name, tensors in parts.items():
            write_tensors(partial / f"{name}.safetensors", tensors)
        for name, content in contents.documents.items():
            (partial / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        sizes = {str(file.relative_to(partial)): file.stat().st_size for file in partial.rglob("*") if file.is_file()}
        absent = [name for name, size in written.items() if sizes.get(name) != size]
        if absent:
            raise CheckpointError(
                f"{path} could not be written: the first rank does not see {absent[0]}, which another one wrote. All "
                "ranks need one file system; set the run directory to a shared one."
            )
        # Written last: a directory without it is incomplete.
        document = {"format": _FORMAT, "step": step, "sizes": sizes, "counters": dict(contents.counters)}
        (partial / _DOCUMENT).write_text(json.dumps(document, indent=2), encoding="utf-8")
    # Only now: until the new one is complete, a run resumes from these.
    for old in find_checkpoints(root)[:-num_kept]:
        shutil.rmtree(old.path, ignore_errors=True)
    return Checkpoint(path=path, step=step, counters=dict(contents.counters))


def save_shards(root: Path, contents: Contents, *, step: int, gang: Gang) -> None:
    """Write the rows of this rank, not the first of ``gang``, which calls ``save_checkpoint`` at the same time.

    Returns when all ranks have written theirs. Raises ``CheckpointError`` if one of them could not.
    """
    path = root / f"step-{step:08d}"
    with agreed(gang, f"{path} could not be written"):
        # The first rank creates the directory for all.
        pass
    try:
        _write_shards(partial_path(path), path, contents.shards, gang)
    except OSError as error:
        raise CheckpointError(f"Rank {gang.rank} could not write its part of {path}: {error}.") from error


def _write_shards(partial: Path, path: Path, shards: Mapping[str, Mapping[str, Rows]], gang: Gang) -> Mapping[str, int]:
    """Write the rows of this rank; return the names of the files of all ranks, and their sizes."""
    names = [
        f"{part}/shard-{rank + 1:05d}-of-{gang.size:05d}.safetensors" for part in shards for rank in range(gang.size)
    ]
    sizes = np.zeros(len(names))
    with agreed(gang, f"{path} could not be written"):
        for number, found in enumerate(shards.values()):
            index = number * gang.size + gang.rank
            # Each rank its own: gathered on the first one, weights and moments of 70 billion parameters take 840 GB.
            # What is not sharded is the same on all ranks.
            own = {name: rows for name, rows in found.items() if gang.rank == 0 or (rows.is_sharded and len(rows.part))}
            offsets = {
                name: {_OFFSET: [rows.first, *[0] * (rows.part.ndim - 1)] if rows.part.ndim else []}
                for name, rows in own.items()
            }
            metadata = {_OFFSETS: json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
            write_tensors(partial / names[index], {name: rows.part for name, rows in own.items()}, metadata=metadata)
            # The first rank may be on another machine, and cannot do this.
            sync_path(partial / names[index])
            sizes[index] = (partial / names[index]).stat().st_size
    return dict(zip(names, map(int, gang.sum(sizes)), strict=True))


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


@contextmanager
def _reading(what: object) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(f"{what} cannot be read: {error}.") from error


def find_checkpoints(root: Path) -> tuple[Checkpoint, ...]:
    """Return all complete checkpoints in ``root``, oldest first; none if it does not exist."""
    names = sorted(root.glob("step-*"), key=lambda path: path.name) if root.is_dir() else []
    found: dict[int, Checkpoint] = {}
    for path in filter(lambda path: _NAME.fullmatch(path.name), names):
        try:
            document = json.loads((path / _DOCUMENT).read_text(encoding="utf-8"))
            sizes = {name: (path / name).stat().st_size for name in document["sizes"]}
            if document["format"] == _FORMAT and sizes == document["sizes"]:
                checkpoint = Checkpoint(path=path, step=document["step"], counters=document["counters"])
                found.setdefault(checkpoint.step, checkpoint)  # sorted: a replaced one comes after its successor
        except (OSError, ValueError, KeyError, TypeError):
            continue  # it is incomplete
    return tuple(found[step] for step in sorted(found))


def find_latest(root: Path) -> Checkpoint | None:
    """Return the complete checkpoint of the highest step, or ``None``."""
    return next(reversed(find_checkpoints(root)), None)


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
