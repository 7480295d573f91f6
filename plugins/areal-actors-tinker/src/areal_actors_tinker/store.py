"""Checkpoints on disk: found by Tinker's paths, listed, published, given a time to live, and deleted.

::

    <root>/<run>/run.json                            base model, rank, owner, metadata
    <root>/<run>/weights/<name>/                     an adapter that peft loads, with the optimiser's moments
    <root>/<run>/sampler_weights/<name>/             an adapter alone
    <root>/<run>/external_weights/<name>/            whole weights, merged, as transformers loads them
    <root>/<run>/<kind>/<name>.json                  when it was saved, until when it is kept, who may read it

A run is called as its model, with dots for colons. ``tinker://<model>/<kind>/<name>`` names a checkpoint.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from attrs import evolve, field, frozen

from areal_actors.errors import InvalidRequest, NotFound
from areal_actors.lib.atomic_write import atomic_write

KINDS: Mapping[str, str] = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
"""The kinds of checkpoints, by the part of a path that names them."""

EPHEMERAL = "ephemeral-"
"""How names of checkpoints begin that belong to a sampling session, and go with it."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,199}")
_SCHEME = "tinker://"
_MIN_TTL, _MAX_TTL = 60, 10 * 366 * 24 * 3600


@frozen(kw_only=True)
class Run:
    """A training run: one model, from its creation on."""

    model_id: str
    base_model: str
    rank: int
    owner: str
    created: float
    metadata: Mapping[str, Any] = field(factory=dict)


@frozen(kw_only=True)
class StoredCheckpoint:
    """A checkpoint: where it is, since when, until when, and whether other users may read it."""

    model_id: str
    kind: str
    name: str
    directory: Path
    owner: str
    saved: float
    is_public: bool = False
    expires: float | None = None
    metadata: Mapping[str, Any] = field(factory=dict)

    @property
    def path(self) -> str:
        """The path by which clients name it."""
        return f"{_SCHEME}{self.model_id}/{self.kind}/{self.name}"

    def document(self) -> dict[str, object]:
        """Return the description that clients get."""
        size = sum(file.stat().st_size for file in self.directory.rglob("*") if file.is_file())
        return {
            "checkpoint_id": f"{self.kind}/{self.name}",
            "checkpoint_type": KINDS[self.kind],
            "time": _iso(self.saved),
            "tinker_path": self.path,
            "size_bytes": size,
            "public": self.is_public,
            "user_metadata": dict(self.metadata) or None,
            "expires_at": None if self.expires is None else _iso(self.expires),
        }


class CheckpointStore:
    """The checkpoints below ``root``. Every call reads the disk, so that it survives the server."""

    def __init__(self, root: Path) -> None:
        self.root = root

    # ------------------------------------------------------------------------------------------------------ runs

    def add_run(self, run: Run) -> None:
        """Write the description of a run."""
        directory = self.root / _folder(run.model_id)
        directory.mkdir(parents=True, exist_ok=True)
        document = {
            "model_id": run.model_id,
            "base_model": run.base_model,
            "rank": run.rank,
            "owner": run.owner,
            "created": run.created,
            "metadata": dict(run.metadata),
        }
        atomic_write(directory / "run.json", json.dumps(document, indent=2) + "\n")

    def run(self, model_id: str) -> Run:
        """Return the description of a run. Raises ``NotFound``."""
        path = self.root / _folder(model_id) / "run.json"
        try:
            return Run(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise NotFound(f"There is no training run {model_id!r}.") from error

    def runs(self, owner: str) -> list[Run]:
        """Return the runs of ``owner``, the newest first."""
        found = [self.run(path.parent.name) for path in self.root.glob("*/run.json")]
        return sorted((run for run in found if run.owner == owner), key=lambda run: -run.created)

    # ----------------------------------------------------------------------------------------------- checkpoints

    def place(self, model_id: str, kind: str, name: str) -> Path:
        """Return the directory for a checkpoint. Raises ``InvalidRequest`` for a name that is none."""
        if kind not in KINDS or not _NAME.fullmatch(name):
            raise InvalidRequest(
                f"{name!r} is not the name of a checkpoint: use letters, digits, '.', '_', ':' and '-'.", param="path"
            )
        return self.root / _folder(model_id) / kind / name

    def add(self, checkpoint: StoredCheckpoint) -> None:
        """Record a checkpoint whose files are complete."""
        document = {
            "model_id": checkpoint.model_id,
            "owner": checkpoint.owner,
            "saved": checkpoint.saved,
            "is_public": checkpoint.is_public,
            "expires": checkpoint.expires,
            "metadata": dict(checkpoint.metadata),
        }
        record = checkpoint.directory.with_name(f"{checkpoint.name}.json")
        atomic_write(record, json.dumps(document, indent=2) + "\n")

    def find(self, path: str, *, user: str, now: float) -> StoredCheckpoint:
        """Return the checkpoint at ``tinker://…`` if ``user`` may read it. Raises ``NotFound``."""
        parts = path.removeprefix(_SCHEME).split("/")
        if not path.startswith(_SCHEME) or len(parts) != 3:  # noqa: PLR2004 - model, kind and name
            raise InvalidRequest(
                f"{path!r} is no path of a checkpoint, such as tinker://run/weights/name.", param="path"
            )
        model_id, kind, name = parts
        found = self._read(self.place(model_id, kind, name))
        if found is None or not (found.is_public or found.owner == user):
            raise NotFound(f"There is no checkpoint {path}.")
        if found.expires is not None and found.expires <= now:
            self.delete(found)
            raise NotFound(f"The checkpoint {path} has expired.")
        return found

    def checkpoints(self, *, owner: str, now: float, model_id: str | None = None) -> list[StoredCheckpoint]:
        """Return the named checkpoints of a user, or of one run, the newest first; expired ones are deleted."""
        folder = "*" if model_id is None else _folder(model_id)
        kept = []
        for record in self.root.glob(f"{folder}/*/*.json"):
            found = self._read(record.with_suffix(""))
            if found is None or found.owner != owner or found.name.startswith(EPHEMERAL):
                continue
            if found.expires is not None and found.expires <= now:
                self.delete(found)
            else:
                kept.append(found)
        return sorted(kept, key=lambda one: -one.saved)

    def publish(self, checkpoint: StoredCheckpoint, *, is_public: bool) -> None:
        """Let all users read a checkpoint, or its owner alone."""
        self.add(evolve(checkpoint, is_public=is_public))

    def keep_for(self, checkpoint: StoredCheckpoint, seconds: int | None, *, now: float) -> None:
        """Let a checkpoint expire, or keep it for ever. Raises ``InvalidRequest`` for a time that is none."""
        self.add(evolve(checkpoint, expires=expiry(seconds, now=now)))

    def delete(self, checkpoint: StoredCheckpoint) -> None:
        """Delete a checkpoint; its record goes first, so that one that is half deleted is not found."""
        checkpoint.directory.with_name(f"{checkpoint.name}.json").unlink(missing_ok=True)
        shutil.rmtree(checkpoint.directory, ignore_errors=True)

    def sweep(self) -> None:
        """Remove what a server that was killed has left of sampling sessions."""
        for record in self.root.glob(f"*/sampler_weights/{EPHEMERAL}*.json"):
            record.unlink(missing_ok=True)
            self.discard(record.with_suffix(""))

    def discard(self, directory: Path) -> None:
        """Remove a directory that is no checkpoint."""
        shutil.rmtree(directory, ignore_errors=True)

    def _read(self, directory: Path) -> StoredCheckpoint | None:
        try:
            document = json.loads(directory.with_name(f"{directory.name}.json").read_text(encoding="utf-8"))
            found = StoredCheckpoint(kind=directory.parent.name, name=directory.name, directory=directory, **document)
        except (OSError, ValueError, TypeError):
            return None
        return found if directory.is_dir() else None


def expiry(seconds: int | None, *, now: float) -> float | None:
    """Return when something ends that is kept for ``seconds``. Raises ``InvalidRequest`` for a time that is none."""
    if seconds is None:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, int) or not _MIN_TTL <= seconds <= _MAX_TTL:
        raise InvalidRequest(f"ttl_seconds is {seconds!r}; give {_MIN_TTL} to {_MAX_TTL}.", param="ttl_seconds")
    return now + seconds


def _folder(model_id: str) -> str:
    folder = model_id.replace(":", ".")
    if not _NAME.fullmatch(folder):
        raise NotFound(f"There is no training run {model_id!r}.")
    return folder


def _iso(seconds: float) -> str:
    return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)).isoformat()


def newest(checkpoints: list[StoredCheckpoint], kind: str) -> Iterator[StoredCheckpoint]:
    """Yield the newest checkpoint of ``kind``, if there is one."""
    yield from [one for one in checkpoints if one.kind == kind][:1]
