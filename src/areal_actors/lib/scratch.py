"""Directories that are removed even if their process is killed: the next process that needs one does.

Each has a file that its process locks for as long as it lives. A directory whose lock is free belongs to a process that
has ended. The temporary directory of each process is below ``areal-<user>`` in that of the system.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from secrets import token_hex

from areal_actors.errors import ConfigError
from areal_actors.lib.locks import NO_LOCKS, take

_LOCK = "lock"
_UNLOCKED_SECONDS = 60.0


@cache
def process_directory() -> Path:
    """Return the temporary directory of this process, and remove those of processes that have ended.

    Raises ``ConfigError`` if another user could write to it.
    """
    root = Path(tempfile.gettempdir()) / f"areal-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    status = root.lstat()
    if root.is_symlink() or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigError(f"{root} belongs to another user, or can be used by others; remove it, or set TMPDIR.")
    remove_abandoned(root)
    # The lock is never released: it ends with this process, in whatever way.
    own, _ = claim_directory(root)
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    return own


def claim_directory(root: Path, prefix: str = "") -> tuple[Path, int | None]:
    """Create a directory in ``root`` that ``remove_abandoned`` leaves alone until its lock is released.

    The lock is a descriptor to close, or ``None`` on a file system without locks, where no process removes it.
    """
    # Repeated if another process took the directory for a dead one's, between its creation and its lock.
    while True:
        own = root / f"{prefix}{os.getpid()}-{token_hex(4)}"
        own.mkdir()
        try:
            descriptor = take(own / _LOCK)
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            return own, None
        if descriptor is not None and (own / _LOCK).exists():
            return own, descriptor


def remove_abandoned(root: Path, prefix: str = "") -> None:
    """Remove the directories that processes on any machine have claimed in ``root``, and that have ended since."""
    for directory in root.glob(f"{prefix}*"):
        with suppress(OSError):
            if not (directory / _LOCK).exists():
                # Just created, or nearly removed; an old one was left between the two.
                if time.time() - directory.stat().st_mtime > _UNLOCKED_SECONDS:
                    remove(directory)
                continue
            descriptor = take(directory / _LOCK)
            if descriptor is not None:
                remove(directory)
                os.close(descriptor)


@contextmanager
def scratch_directory() -> Iterator[Path]:
    """Create a temporary directory for a block. Its path is short enough for sockets, whose names have 107 bytes."""
    directory = Path(tempfile.mkdtemp(prefix="", dir=process_directory()))
    try:
        yield directory
    finally:
        remove(directory)


def remove_empty(directories: Sequence[Path]) -> None:
    """Remove ``directories``, the last one first, up to one that has an entry."""
    with suppress(OSError):
        for directory in reversed(directories):
            directory.rmdir()


def remove(directory: Path) -> None:
    """Remove a tree, including directories that their owner may not write."""

    def permit(_: object, path: str, __: object) -> None:
        with suppress(OSError):
            Path(path).parent.chmod(0o700)
            Path(path).chmod(0o700)
        shutil.rmtree(path, ignore_errors=True) if Path(path).is_dir() else Path(path).unlink(missing_ok=True)

    shutil.rmtree(directory, onerror=permit)
