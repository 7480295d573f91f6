"""Checkpoints as they are found and read; ``checkpoints`` writes them and describes their files.

The latest checkpoint, that of the highest step, is found by listing the directory, so no pointer can be out of date.
A directory whose document is missing, unreadable, or names sizes
that the files do not have is incomplete and ignored, as is one that does not have its own digest. ``find_latest``
compares the digests of all files, too, and goes back to an earlier checkpoint where one has other contents than were
written.

A service that is started again reads its weights here, before it imports what trains them: this module needs torch,
but neither ``torch.distributed`` nor transformers, which take seconds to import.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

import torch
from attrs import field, frozen
from cattrs import structure
from safetensors import SafetensorError, safe_open
from torch import Tensor

from areal_actors.domain import DataPosition
from areal_actors.errors import CheckpointError
from areal_actors.lib.atomic_write import REPLACED
from areal_actors.lib.checkpoint_tensors import LazyTensors
from areal_actors.lib.telemetry import get_logger

DOCUMENT = "checkpoint.json"
FORMAT = 2
OFFSETS, OFFSET = "DCP_SHARDING_INFO", "saved_offsets"
"""Keys of torch's under which the header of a shard says at which index of the whole tensor each part begins."""
_log = get_logger(__name__)

_NAME = re.compile(r"step-(\d{8,})(" + re.escape(REPLACED) + r")?")


@frozen(kw_only=True)
class Checkpoint:
    """A complete checkpoint on disk. ``counters`` are those that its writer passed."""

    path: Path
    step: int
    counters: Mapping[str, Any] = field(factory=dict)
    digests: Mapping[str, str] = field(factory=dict, repr=False)
    """The digest of each file."""

    def find_damage(self) -> str | None:
        """Return which file has other contents than were written, or ``None``. Blocks while all files are read.

        A loss of power may leave pages of zeros in files that were written but not synced by what lies below them, and
        disks and network file systems return other bytes than were written: the size of a file does not tell.
        """
        with ThreadPoolExecutor(thread_name_prefix="digest") as threads:
            found = dict(zip(self.digests, threads.map(self._digest, self.digests), strict=True))
        problems = (
            f"{name} has other contents than were written (its digest differs)"
            if isinstance(digest, str)
            else f"{name} cannot be read: {digest}"
            for name, digest in found.items()
            if digest != self.digests[name]
        )
        return next(problems, None)

    def _digest(self, name: str) -> str | OSError:
        try:
            return digest_file(self.path / name)
        except OSError as error:
            return error

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


class StoredTensors(LazyTensors):
    """Tensors in ``files``, whole or in shards, which are read each time that they are asked for.

    They are whole and on the CPU, unless ``like`` returns a sharded tensor of the same shape: then only this rank's
    rows are read.

    Raises ``CheckpointError`` if they cannot be read.
    """

    def __init__(self, files: Sequence[Path], like: Callable[[str], Tensor | None] | None) -> None:
        self._placed = like
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

    def like(self, name: str) -> Tensor:
        """Return a tensor without numbers, of the shape and the kind of the whole one."""
        some = self.rows(name, 0, 0)
        return torch.empty(self.shape(name), dtype=some.dtype, device="meta")

    def __getitem__(self, name: str) -> Tensor:
        pieces = self._pieces[name]
        if self._placed is not None and (like := self._placed(name)) is not None:
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


def digest_file(path: Path) -> str:
    """Return the SHA-256 of a file. Raises ``OSError``."""
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def digest_document(document: Mapping[str, Any]) -> str:
    """Return the digest of a document without the digest in it, as JSON gives it back: SHA-256 of its sorted text."""
    content = json.loads(json.dumps({key: value for key, value in document.items() if key != "digest"}))
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def find_checkpoints(root: Path) -> tuple[Checkpoint, ...]:
    """Return all complete checkpoints in ``root`` in the order of their steps; none without ``root``."""
    complete, _ = _scan(root)
    return complete


def _scan(root: Path) -> tuple[tuple[Checkpoint, ...], dict[Path, str]]:
    """Return the complete checkpoints in order, and the directories that are not complete, each with the problem."""
    names = sorted(root.glob("step-*"), key=lambda path: path.name) if root.is_dir() else []
    found: dict[int, Checkpoint] = {}
    incomplete: dict[Path, str] = {}
    for path in names:
        if (name := _NAME.fullmatch(path.name)) is None:
            continue
        try:
            document = json.loads((path / DOCUMENT).read_text(encoding="utf-8"))
            if document["format"] != FORMAT:
                incomplete[path] = "another release wrote it; resume it with that release"
                continue
            if document["digest"] != digest_document(document):
                incomplete[path] = f"{DOCUMENT} has other contents than were written (its digest differs)"
                continue
            sizes = {name: (path / name).stat().st_size for name in document["sizes"]}
            if sizes != document["sizes"]:
                incomplete[path] = "its files are not those that its document names"
                continue
            checkpoint = Checkpoint(
                path=path,
                step=int(name[1]),
                counters=dict(document["counters"]),
                digests=dict(document["digests"]),
            )
            if document["step"] != checkpoint.step:
                incomplete[path] = f"its document is of step {document['step']}"
                continue
            found.setdefault(checkpoint.step, checkpoint)  # sorted: a replaced one comes after its successor
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            incomplete[path] = f"it is incomplete ({error})"
    return tuple(sorted(found.values(), key=lambda one: one.step)), incomplete


def find_latest(root: Path) -> Checkpoint | None:
    """Return the checkpoint of the highest step, and if it is damaged the one before; ``None`` if there is none.

    Blocks while its files are read. Raises ``CheckpointError``, naming the files, if all are damaged.
    """
    complete, incomplete = _scan(root)
    damaged: dict[Path, str] = {}
    for checkpoint in reversed(complete):
        if (damage := checkpoint.find_damage()) is None:
            # The removal of an old one may have been interrupted; only what is newer would have been used.
            damaged |= {path: problem for path, problem in incomplete.items() if path.name > checkpoint.path.name}
            for path, problem in damaged.items():
                _log.warning("checkpoint_damaged", path=str(path), problem=problem, used=str(checkpoint.path))
            return checkpoint
        damaged[checkpoint.path] = damage
    if damaged or incomplete:
        problems = "; ".join(f"{path.name}: {problem}" for path, problem in (damaged | incomplete).items())
        raise CheckpointError(
            f"No checkpoint in {root} can be used. {problems}. Restore one from a copy, or remove these directories to "
            "go on without them."
        )
    return None


def find_checkpoint(root: Path, step: int) -> Checkpoint:
    """Return the complete checkpoint of ``step``, which ``find_latest`` has chosen in the controller of the run.

    Raises ``CheckpointError`` if there is none.
    """
    for checkpoint in find_checkpoints(root):
        if checkpoint.step == step:
            return checkpoint
    raise CheckpointError(
        f"The checkpoint of step {step} in {root} is gone; another process writes there, or removed it. Train one run "
        "in a directory."
    )


def parse_position(counters: Mapping[str, Any] | None) -> DataPosition:
    """Return the position in the data from a checkpoint's ``counters``, or the start without them."""
    return structure((counters or {}).get("position", {}), DataPosition)
