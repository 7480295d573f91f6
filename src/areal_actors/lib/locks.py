"""File locks that one process holds at a time. The system releases them when that process ends, however it ends."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from attrs import define

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
"""Error numbers of file systems that do not support locks."""
_MAX_REMOVED = 16
_NUM_LOOKS, _LOOK_SECONDS = 4, 0.02
_TAKEN = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)


class LockHeld(Exception):
    """Another process holds the file. ``holder`` describes that process."""

    def __init__(self, holder: str) -> None:
        super().__init__(f"held by {holder}")
        self.holder = holder


@define(eq=False)
class HeldLock:
    """A lock that ``hold`` holds. ``is_new`` tells whether no process had held the file before."""

    descriptor: int
    is_new: bool
    is_removed: bool = False
    """Set it to have the file removed at the end of the block, if it is new."""


def take(path: Path) -> int | None:
    """Lock ``path`` until the returned descriptor is closed. Returns ``None`` if another process holds it.

    The file is created if it does not exist. Only its holder may remove it, as its last act: a process that opened it
    before then finds that it has locked a file without a name, and begins again.

    Raises:
        OSError: the file cannot be opened, or cannot be locked (``NO_LOCKS``).
    """
    # Does not exist on Windows, where this module must be importable.
    import fcntl

    for num_removed in count():
        # O_CLOEXEC: a child that inherited the descriptor would hold the lock after this process has ended.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Some file systems give a file another number each time. It is not removed so often.
            if _is_at(path, descriptor) or num_removed == _MAX_REMOVED:
                return descriptor
        except OSError as error:
            os.close(descriptor)
            if error.errno in _TAKEN:
                return None
            raise
        os.close(descriptor)
    raise AssertionError("it returns before")


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


@contextmanager
def hold(path: Path) -> Iterator[HeldLock]:
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
        holder = ""
        with suppress(FileNotFoundError):  # its holder has removed it since
            holder = path.read_text(errors="replace")[:200].strip()
        raise LockHeld(holder or "another process")
    # A holder writes into it.
    held = HeldLock(descriptor, is_new=os.fstat(descriptor).st_size == 0, is_removed=True)
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        held.is_removed = False  # otherwise the disk is full
        yield held
    finally:
        # While it is locked, and not if the user has removed it and another process has made another one.
        if held.is_removed and held.is_new and _is_at(path, descriptor):
            path.unlink()
        os.close(descriptor)


def is_held(path: Path) -> bool:
    """Return whether another process holds the file. Raises ``OSError`` as in ``take``."""
    if not path.exists():
        return False
    descriptor = take(path)
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is None
