"""Where a journal may lie, and who holds it: network filesystems are recognised, and one process has it at a time."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from areal_actors.errors import ArealError, JournalError

__all__ = ["exclusive", "filesystem_of", "is_network"]

_NETWORK = (
    *("afs", "beegfs", "ceph", "cifs", "coda", "gcsfuse", "gfs2", "glusterfs", "gpfs", "juicefs"),
    *("lustre", "mountpoint-s3", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "panfs"),
    *("pvfs2", "s3fs", "smb3", "smbfs", "sshfs", "wekafs"),
)
_MOUNTS = Path("/proc/mounts")


def is_network(filesystem: str) -> bool:
    """Whether a filesystem of this type may be mounted on several machines at once. ``fuse.sshfs`` counts as sshfs."""
    return filesystem.removeprefix("fuse.") in _NETWORK


def filesystem_of(path: Path, mounts: str | None = None) -> str:
    """The type of the filesystem on which ``path`` lies or would lie, by the table ``mounts`` of the kernel.

    Empty where the system has no such table.
    """
    if mounts is None:
        mounts = _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape") if _MOUNTS.exists() else ""
    found = Path(), ""
    for line in mounts.splitlines():
        _, point, kind, *_ = line.split(" ")
        mounted = Path(_unescaped(point))
        # The last of several mounts on one directory is the one that is seen.
        if path.is_relative_to(mounted) and len(mounted.parts) >= len(found[0].parts):
            found = mounted, kind
    return found[1]


def _unescaped(point: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        point = point.replace(code, character)
    return point


@contextmanager
def exclusive(
    path: Path, *, lock: Path | None = None, complain: Callable[[str], ArealError] | None = None
) -> Iterator[None]:
    """Hold ``path`` while the block runs; the system lets go of it when the process dies.

    What is locked is the file ``lock``, or ``path`` with ``.lock`` appended. It stays: whoever removes it while
    somebody holds it lets two in.

    Raises:
        ArealError: somebody else holds it; what ``complain`` makes of who that is, or a ``JournalError`` that says so.
    """
    import fcntl  # there is none on Windows, where this module shall be importable

    lock = lock or path.with_name(f"{path.name}.lock")
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
            raise (complain or partial(_complain, path))(holder) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _complain(path: Path, holder: str) -> JournalError:
    return JournalError(
        f"{path} is in use by {holder}. Two services cannot share a journal: end the other one, or give this one a "
        "trial name or a journal.path of its own."
    )
