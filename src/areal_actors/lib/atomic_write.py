"""Files and directories that are written completely or not at all.

The content is written under a temporary name in the same directory, then renamed: readers never see a part of it, and
a crash leaves the previous content in place. The temporary name is fixed: a leftover of a crashed writer is
overwritten by the next one instead of accumulating. Writers of the same path therefore have to exclude each other.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REPLACED = ".replaced"
"""Suffix of a directory that was moved aside: complete, and valid until its replacement is in place."""

_NOT_SYNCED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EBADF)
"""Errors with which network file systems refuse to sync a directory; the number differs between them."""


def atomic_write(path: Path, text: str, *, mode: int = 0o666, is_durable: bool = False) -> None:
    """Replace the content of ``path`` by ``text`` in UTF-8. Arguments and errors as for ``atomic_path``."""
    with atomic_path(path, mode=mode, is_durable=is_durable) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def atomic_path(path: Path, *, mode: int = 0o666, is_durable: bool = False) -> Iterator[Path]:
    """Yield the path of an empty file that replaces ``path`` if the block succeeds, and is removed if it fails.

    Args:
        path: the file to replace, in an existing directory.
        mode: permissions of the new file, before the umask.
        is_durable: sync the file before the rename and the directory after it. Otherwise a loss of power may leave an
            empty file, but never a crash of the process.

    Raises ``OSError``; ``path`` is unchanged in that case.
    """
    partial = partial_path(path)
    # The mode applies only to a file that is created, so a leftover, which may be readable by others, is not reused.
    partial.unlink(missing_ok=True)
    os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
    try:
        yield partial
        if is_durable:
            sync_path(partial)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    if is_durable:
        # The rename is an entry of the directory, which a loss of power would undo otherwise.
        sync_path(path.parent)


@contextmanager
def atomic_directory(path: Path, *, num_bytes: int = 0) -> Iterator[Path]:
    """Yield a new directory that replaces ``path`` if the block succeeds, and is removed if it fails.

    All that was written is synced first. Raises ``OSError``, also if fewer than ``num_bytes`` are free; the previous
    content of ``path`` is kept in that case.
    """
    partial, replaced = partial_path(path), path.with_name(path.name + REPLACED)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        if (free := shutil.disk_usage(partial).free) < num_bytes:
            raise OSError(f"only {free:,} bytes are free")  # noqa: TRY301 - handled as an error of the disk is
        yield partial
        for written in (*partial.rglob("*"), partial):
            sync_path(written)
        if path.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            # A directory that is not empty cannot be replaced by one rename, so the old one is moved aside first; if
            # the process dies in between, readers use the directory with this suffix.
            path.rename(replaced)
        partial.rename(path)
        sync_path(path.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def partial_path(path: Path) -> Path:
    """Return the temporary name under which the content of ``path`` is written before it is renamed."""
    return path.with_name(f".{path.name}.partial")


def sync_path(path: Path) -> None:
    """Write a file or directory to the disk, if its file system can. Raises ``OSError``."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except PermissionError:
        # Some file systems sync no file that was opened for reading.
        pass
    except OSError as error:
        if error.errno not in _NOT_SYNCED or not path.is_dir():
            raise
    finally:
        os.close(descriptor)
