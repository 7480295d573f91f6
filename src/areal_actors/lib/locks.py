"""File locks that one process holds at a time. The system releases them when that process ends, however it ends."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["NO_LOCKS", "LockHeld", "hold", "is_held", "take"]

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
"""Error numbers of file systems that do not support locks."""
_NUM_LOOKS, _LOOK_SECONDS = 4, 0.02
_TAKEN = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)


class LockHeld(Exception):
    """Another process holds the file. ``holder`` describes that process."""

    def __init__(self, holder: str) -> None:
        super().__init__(f"held by {holder}")
        self.holder = holder


def take(path: Path) -> int | None:
    """Lock ``path`` until the returned descriptor is closed. Returns ``None`` if another process holds it.

    The file is created if it does not exist, and is never removed: removing it while it may be held would let two
    processes lock it.

    Raises:
        OSError: the file cannot be opened, or cannot be locked (``NO_LOCKS``).
    """
    # Does not exist on Windows, where this module must be importable.
    import fcntl

    # O_CLOEXEC: a child that inherited the descriptor would hold the lock after this process has ended.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno in _TAKEN:
            return None
        raise
    return descriptor


@contextmanager
def hold(path: Path) -> Iterator[None]:
    """Lock ``path`` for the block, and write the holder's process and host into it.

    Raises:
        LockHeld: another process holds the file.
        OSError: as in ``take``.
    """
    descriptor = take(path)
    for _ in range(_NUM_LOOKS):
        if descriptor is not None:
            break
        # ``is_held`` of another process takes the lock for an instant.
        time.sleep(_LOOK_SECONDS)
        descriptor = take(path)
    if descriptor is None:
        raise LockHeld(path.read_text(errors="replace")[:200].strip() or "another process")
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def is_held(path: Path) -> bool:
    """Return whether another process holds the file. Raises ``OSError`` as in ``take``."""
    descriptor = take(path)
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is None
