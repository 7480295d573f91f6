"""Directories that appear whole or not at all: written beside their place, synced, renamed.

A crash leaves either the old directory or the new one, never half of one; what was being written is found by its name
and swept away by the next writer.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from areal_actors.errors import CheckpointError

__all__ = ["REPLACED", "atomic_directory", "sweep"]

REPLACED = ".replaced"
"""Suffix of a directory that was moved aside for its successor: whole, and valid until the successor is in place."""

_PARTIAL = ".partial"

_NOT_SYNCED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EBADF)
"""What network file systems say that sync no directories: it is another thing for each of them."""


@contextmanager
def atomic_directory(path: Path, *, num_bytes: int) -> Iterator[Path]:
    """Give a fresh directory to write to, and make it ``path`` if the block succeeds; an existing ``path`` is replaced.

    Raises ``CheckpointError``, naming ``path`` and ``num_bytes``, if the disk has no room or refuses to write; what
    was at ``path`` is still there then.
    """
    partial = path.with_name(f".{path.name}{_PARTIAL}")
    try:
        _prepare(partial, num_bytes)
        yield partial
        _sync(partial)
        _install(partial, path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} could not be written ({error}); it needs {num_bytes:,} bytes. Free some space or choose another "
            "directory. What was there before is unchanged."
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def sweep(root: Path) -> None:
    """Remove what crashed writers left in ``root``."""
    for path in root.glob(f".*{_PARTIAL}"):
        shutil.rmtree(path, ignore_errors=True)


def _prepare(partial: Path, num_bytes: int) -> None:
    partial.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(partial.parent).free
    if free < num_bytes:
        raise OSError(f"only {free:,} bytes are free")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()


def _install(partial: Path, path: Path) -> None:
    replaced = path.with_name(path.name + REPLACED)
    if path.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        path.rename(replaced)
    partial.rename(path)
    _sync_one(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _sync(directory: Path) -> None:
    for path in directory.rglob("*"):
        _sync_one(path)
    _sync_one(directory)


def _sync_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except PermissionError:  # of a file system that syncs nothing that was opened for reading
        pass
    except OSError as error:
        if error.errno not in _NOT_SYNCED or not path.is_dir():
            raise
    finally:
        os.close(descriptor)
