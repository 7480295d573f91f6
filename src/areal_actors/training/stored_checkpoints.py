"""Checkpoints as they are found and read; ``checkpoints`` writes them and describes their files.

The latest checkpoint is found by listing the directory, so no pointer can be out of date. A directory whose document is
missing, unreadable, or names sizes that the files do not have is incomplete and ignored.

A service that is started again reads its weights here, before it imports what trains them: this module needs torch,
but neither ``torch.distributed`` nor transformers, which take seconds to import.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from attrs import field, frozen
from safetensors import SafetensorError, safe_open
from torch import Tensor

from areal_actors.domain import AssignedProblem, DataPosition, DrawnProblem, PoolsState, SourcePosition
from areal_actors.errors import CheckpointError
from areal_actors.training.directories import REPLACED

__all__ = [
    "DOCUMENT",
    "FORMAT",
    "OFFSET",
    "OFFSETS",
    "Checkpoint",
    "StoredTensors",
    "find_checkpoints",
    "find_latest",
    "parse_position",
]

DOCUMENT = "checkpoint.json"
FORMAT = 1
OFFSETS, OFFSET = "DCP_SHARDING_INFO", "saved_offsets"
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
        return StoredTensors(files, like)

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

    def __init__(self, files: Sequence[Path], like: Callable[[str], Tensor | None] | None) -> None:
        self._like = like
        self._pieces: dict[str, list[_Piece]] = {}
        for path in files:
            with _reading(path):
                file: Any = safe_open(path, framework="pt")
                offsets = json.loads((file.metadata() or {}).get(OFFSETS, "{}"))
                for name in file.keys():  # noqa: SIM118 - it is not a mapping
                    first = offsets.get(name, {}).get(OFFSET) or [0]
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
        pieces = self._pieces[name]
        if self._like is not None and (like := self._like(name)) is not None:
            from torch.distributed.tensor import DTensor

            from areal_actors.training.sharding import first_row, local_part, with_local_part

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
            document = json.loads((path / DOCUMENT).read_text(encoding="utf-8"))
            sizes = {name: (path / name).stat().st_size for name in document["sizes"]}
            if document["format"] == FORMAT and sizes == document["sizes"]:
                checkpoint = Checkpoint(path=path, step=document["step"], counters=document["counters"])
                found.setdefault(checkpoint.step, checkpoint)  # sorted: a replaced one comes after its successor
        except (OSError, ValueError, KeyError, TypeError):
            continue  # it is incomplete
    return tuple(found[step] for step in sorted(found))


def find_latest(root: Path) -> Checkpoint | None:
    """Return the complete checkpoint of the highest step, or ``None``."""
    return next(reversed(find_checkpoints(root)), None)


def parse_position(counters: Mapping[str, Any] | None) -> DataPosition:
    """Return the position in the data from a checkpoint's ``counters``, or the start without them."""
    position = (counters or {}).get("position", {})
    # Checkpoints of earlier releases have no sources.
    found = position.get("sources", {}).items()
    return DataPosition(
        **_parse_consumed(position),
        sources={
            name: SourcePosition(
                **_parse_consumed(source), weight=float(source["weight"]), num_counted=int(source["num_counted"])
            )
            for name, source in found
        },
    )


def _parse_consumed(position: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that positions of a run and of a source have in common."""
    pools = position.get("pools")
    return {
        "next": int(position.get("next", 0)),
        "pending": tuple(position.get("pending", ())),
        "pools": None
        if pools is None
        else PoolsState(
            problems=tuple(DrawnProblem(**problem) for problem in pools["problems"]),
            assigned=tuple(AssignedProblem(**assigned) for assigned in pools["assigned"]),
        ),
    }
