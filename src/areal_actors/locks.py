"""Files that one process holds at a time. The system lets go of them when that process ends, however it does."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["NO_LOCKS", "hold", "is_held", "take"]

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
"""What a file system says that has no locks."""
_TAKEN = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)


def take(path: Path) -> int | None:
    """A descriptor by which this process holds ``path`` until it is closed; ``None`` if another one does.

    The file is made if it is not there, and stays: whoever removes it while it may be held lets two in.

    Raises:
        OSError: it cannot be opened, or not be locked (``NO_LOCKS``).
    """
    import fcntl  # there is none on Windows, where this module shall be importable

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
def hold(path: Path, complain: Callable[[str], Exception]) -> Iterator[None]:
    """Hold ``path`` while the block runs, and say in it who does.

    Raises:
        Exception: what ``complain`` makes of who holds it, if that is another process.
        OSError: as ``take``.
    """
    descriptor = take(path)
    if descriptor is None:
        raise complain(path.read_text(errors="replace")[:200].strip() or "another process")
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def is_held(path: Path) -> bool:
    """Whether another process holds it. Raises ``OSError`` as ``take``."""
    descriptor = take(path)
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is None
