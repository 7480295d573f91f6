"""Write weights for servers: one directory of safetensors per version, which appears only when it is complete.

Only directories that were written here are removed, as soon as no server may need them. That of the current version
remains, because a server that comes back loads it.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

from anyio import to_thread
from attrs import define, field, frozen

from areal_actors.domain import Snapshot
from areal_actors.errors import ModelError
from areal_actors.generation.servers.adapters import Adapters, PublishedAdapter
from areal_actors.lib.scratch import claim_directory, remove_abandoned

_FILE = "model.safetensors"
_PREFIX = "weights-"
_COPIED = ("config.json", "generation_config.json")
_DTYPES = ("float32", "bfloat16", "float16")
_MAX_NAMED = 5


@frozen(kw_only=True)
class Weights:
    """A version that servers load from ``path``; with an ``adapter``, they have the weights there already."""

    version: int
    path: Path
    adapter: PublishedAdapter | None = None

    @property
    def label(self) -> str:
        """Return the label of the version on servers."""
        return str(self.version)


@define
class Publisher:
    """Writes snapshots below ``directory``, in the dtype of the servers. All methods block on the disk.

    ``model`` is the directory with which the servers were started; weights must have its shapes.
    """

    directory: Path
    model: Path
    dtype: str = ""
    _own: Path | None = field(default=None, init=False)
    """The directory of this process in ``directory``, once something was written."""
    _lock: int | None = field(default=None, init=False)
    _numbers: count[int] = field(factory=count, init=False)

    def write(self, snapshot: Snapshot) -> Weights:
        """Write ``snapshot`` for servers, unless it is a directory already.

        Raises ``ModelError`` if it does not fit the model, or cannot be written.
        """
        if snapshot.adapter is not None:
            raise ModelError(
                f"Snapshot of version {snapshot.version} is an adapter, and these servers were opened for whole "
                "weights; set trainer.lora.serving to merged."
            )
        if snapshot.path is not None and snapshot.state is None:
            path = snapshot.path.absolute()
            _check_shapes(snapshot.version, read_shapes(path), read_shapes(self.model))
            return Weights(version=snapshot.version, path=path)
        if snapshot.state is None:
            raise ModelError(f"Snapshot of version {snapshot.version} has neither state nor path; give it one of them.")
        return self._write(snapshot.version, snapshot.state)

    def _write(self, version: int, state: Mapping[str, Any]) -> Weights:
        import torch
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        from areal_actors.lib.checkpoint_tensors import open_skeleton, to_checkpoint_tensors

        dtype = getattr(torch, self.dtype) if self.dtype in _DTYPES else None
        tensors = to_checkpoint_tensors(open_skeleton(self.model), state, dtype=dtype)
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        _check_shapes(version, shapes, read_shapes(self.model))
        partial: Path | None = None
        try:
            if self._own is None:
                self.directory.mkdir(parents=True, exist_ok=True)
                self._own, self._lock = claim_directory(self.directory, _PREFIX)
            target = self._own / f"{version}-{next(self._numbers)}"
            partial = target.with_suffix(".partial")
            partial.mkdir()
            save_file(tensors, partial / _FILE, metadata={"format": "pt"})
            for name in _COPIED:
                if (self.model / name).is_file():
                    shutil.copyfile(self.model / name, partial / name)
            # Servers must never see an incomplete directory.
            partial.rename(target)
        except (OSError, SafetensorError) as error:
            if partial is not None:
                shutil.rmtree(partial, ignore_errors=True)
            raise ModelError(
                f"Version {version} cannot be written to {self.directory}: {error}. Free space, or set "
                "publish_directory."
            ) from error
        return Weights(version=version, path=target)

    def keep_only(self, kept: Path | None) -> None:
        """Remove all versions that were written here, except ``kept``."""
        for path in () if self._own is None else self._own.glob("*-*"):
            if path != kept:
                shutil.rmtree(path, ignore_errors=True)

    def remove_leftovers(self) -> None:
        """Remove what killed processes have left on any machine."""
        remove_abandoned(self.directory, _PREFIX)

    def close(self) -> None:
        """Remove all directories that were written here."""
        if self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)
        descriptor, self._own, self._lock = self._lock, None, None
        if descriptor is not None:
            os.close(descriptor)


@frozen
class ServerAdmission:
    """Checks each snapshot before servers hear of it, and writes tensors to disk once for all servers."""

    publisher: Publisher
    adapters: Adapters | None

    async def admit(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot in a form that servers can load at any time, also when they come back.

        Raises ``ModelError`` if it does not fit the servers.
        """
        if self.adapters is not None:
            if snapshot.adapter is None:
                raise ModelError(
                    f"Snapshot of version {snapshot.version} is not an adapter, and these servers keep their weights; "
                    "set trainer.lora.serving to merged to publish all weights."
                )
            await to_thread.run_sync(self.adapters.admit, snapshot.version, snapshot.adapter)
            return snapshot
        weights = await to_thread.run_sync(self.publisher.write, snapshot)
        return Snapshot(version=weights.version, path=weights.path)

    async def keep_only(self, snapshot: Snapshot) -> None:
        """Remove what was written for other snapshots, which no server loads any more."""
        await to_thread.run_sync(self.publisher.keep_only, snapshot.path)


def _check_shapes(version: int, found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ``ModelError`` if tensors are missing or have other shapes.

    Servers silently keep their old tensor where a snapshot has none, so missing tensors must be detected here.
    """
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
    """Return names and shapes of the tensors in a directory of safetensors, from the file headers only.

    Raises ``ModelError`` if there are no such files, or they cannot be parsed.
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
