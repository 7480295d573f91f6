"""Weights on their way to servers: a directory of safetensors for each version, whole or not there at all.

What was not written here is not removed here. Our own directories go as soon as no server may need them any more: the
one of the present version stays, because a server that comes back asks for it.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

from attrs import define, field, frozen

from areal_actors.domain import Snapshot
from areal_actors.errors import ModelError
from areal_actors.locks import take
from areal_actors.messages import TensorBucket

__all__ = ["Publisher", "Weights", "read_shapes"]

_FILE = "model.safetensors"
_PREFIX, _LOCKED = "weights-", ".lock"
_COPIED = ("config.json", "generation_config.json")
_DTYPES = ("float32", "bfloat16", "float16")
_MAX_NAMED = 5


@frozen(kw_only=True)
class Weights:
    """A version that servers can load from ``path``; without one, whoever keeps it sends or writes its ``buckets``."""

    version: int
    path: Path | None = None
    buckets: tuple[TensorBucket, ...] = ()

    @property
    def label(self) -> str:
        """What servers call it."""
        return str(self.version)


@define
class Publisher:
    """Writes snapshots below ``directory``, in the dtype of the servers. All methods block on the disk.

    ``model`` is the directory that the servers began with; its shapes are those that weights must have.
    """

    directory: Path
    model: Path
    dtype: str = ""
    _own: Path = field(init=False)
    _lock: int | None = field(default=None, init=False)
    _numbers: count[int] = field(factory=count, init=False)

    def __attrs_post_init__(self) -> None:
        self._own = self.directory / f"{_PREFIX}{socket.gethostname()}-{os.getpid()}-{uuid4().hex[:8]}"

    def write(self, snapshot: Snapshot) -> Weights:
        """Make ``snapshot`` readable for servers.

        Raises ``ModelError`` if it does not fit the model, or cannot be written.
        """
        if snapshot.path is not None and snapshot.state is None:
            path = snapshot.path.absolute()
            _check_shapes(snapshot.version, read_shapes(path), read_shapes(self.model))
            return Weights(version=snapshot.version, path=path)
        if snapshot.state is None:
            raise ModelError(f"Snapshot of version {snapshot.version} has neither state nor path; give it one of them.")
        return self._write(snapshot.version, snapshot.state)

    def admit(self, version: int, buckets: tuple[TensorBucket, ...]) -> Weights:
        """A version that is kept elsewhere. Raises ``ModelError`` if it does not fit the model."""
        pairs = [pair for bucket in buckets for pair in zip(bucket.names, bucket.shapes, strict=True)]
        _check_shapes(version, dict(pairs), read_shapes(self.model))
        return Weights(version=version, buckets=buckets)

    def _write(self, version: int, state: Mapping[str, Any]) -> Weights:
        tensors = self._convert(state)
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        _check_shapes(version, shapes, read_shapes(self.model))
        target = self._own / f"{version}-{next(self._numbers)}"
        partial = target.with_suffix(".partial")
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        try:
            if self._lock is None:
                self.directory.mkdir(parents=True, exist_ok=True)
                with suppress(OSError):  # without locks, nobody removes what a killed process left
                    self._lock = take(_lock_of(self._own))
            partial.mkdir(parents=True)
            save_file(tensors, partial / _FILE, metadata={"format": "pt"})
            for name in _COPIED:
                if (self.model / name).is_file():
                    shutil.copyfile(self.model / name, partial / name)
            partial.rename(target)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise ModelError(
                f"Version {version} cannot be written to {target}: {error}. Free space, or set publish_directory."
            ) from error
        return Weights(version=version, path=target)

    def _convert(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the tensors that servers load, in their dtype."""
        import torch

        from areal_actors.checkpoint_tensors import open_skeleton, to_checkpoint_tensors

        dtype = getattr(torch, self.dtype) if self.dtype in _DTYPES else None
        return to_checkpoint_tensors(open_skeleton(self.model), state, dtype=dtype)

    def keep_only(self, weights: Weights) -> None:
        """Remove what was written here, but for ``weights``."""
        if self._own.is_dir():
            for path in self._own.iterdir():
                if path != weights.path:
                    shutil.rmtree(path, ignore_errors=True)

    def remove_leftovers(self) -> None:
        """Remove what processes left that were killed, on whatever machine: the lock of each went with it."""
        for lock in self.directory.glob(f"{_PREFIX}*{_LOCKED}"):
            descriptor = None
            with suppress(OSError):  # nobody can tell here who lives
                descriptor = take(lock)
            if descriptor is None:
                continue
            shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
            lock.unlink(missing_ok=True)
            os.close(descriptor)

    def close(self) -> None:
        """Remove all that was written here."""
        shutil.rmtree(self._own, ignore_errors=True)
        _lock_of(self._own).unlink(missing_ok=True)
        descriptor, self._lock = self._lock, None
        if descriptor is not None:
            os.close(descriptor)


def _lock_of(own: Path) -> Path:
    return own.with_name(own.name + _LOCKED)


def _check_shapes(version: int, found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Servers keep in silence what a snapshot does not have; so what is missing is said here."""
    problems = [
        f"{name} is missing" if name not in found else f"{name} is {found[name]}, not {shape}"
        for name, shape in wanted.items()
        if found.get(name) != shape
    ]
    if problems:
        more = f"; and {len(problems) - _MAX_NAMED} more" if len(problems) > _MAX_NAMED else ""
        raise ModelError(
            f"Snapshot of version {version} does not fit the model of the servers: "
            f"{'; '.join(problems[:_MAX_NAMED])}{more}. Publish the weights of the same architecture; the old weights "
            "stay."
        )


def read_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes in the safetensors of a directory, from their headers alone.

    Raises ``ModelError`` if there are none, or they are no such files.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{directory} has no *.safetensors files; save the model there with save_pretrained.")
    for file in files:
        try:
            with file.open("rb") as stream:
                (length,) = struct.unpack("<Q", stream.read(8))
                header = json.loads(stream.read(length))
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            shapes |= {name: tuple(entry["shape"]) for name, entry in entries.items()}
        except (OSError, ValueError, KeyError, struct.error, MemoryError) as error:
            raise ModelError(f"{file} cannot be read: {error}. Save it again; the old weights stay.") from error
    return shapes
