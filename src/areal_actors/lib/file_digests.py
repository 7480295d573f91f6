"""Digests of files, which tell damage that leaves the size of a file as it was.

A loss of power may leave pages of zeros in files that were written but not synced by what lies below them, and disks
and network file systems return other bytes than were written. Blocks of a file are hashed by several threads, because
SHA-256 computes about one gigabyte a second on one core.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from itertools import islice
from pathlib import Path

_BLOCK_BYTES = 1 << 24
_MAX_THREADS = 8


def digest_files(directory: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the digest of each file by its name in ``directory``: SHA-256 over that of each block of 16 MiB.

    Raises ``OSError``.
    """
    blocks = {
        name: [(directory / name, first) for first in range(0, (directory / name).stat().st_size, _BLOCK_BYTES)]
        for name in names
    }
    every = [block for found in blocks.values() for block in found]
    try:
        with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="digest") as threads:
            digests = iter(list(threads.map(_digest_block, every)))
    except RuntimeError:
        # A process that exits finishes its last write, but may start no threads any more.
        digests = iter([_digest_block(block) for block in every])
    return {name: sha256(b"".join(islice(digests, len(found)))).hexdigest() for name, found in blocks.items()}


def find_damage(directory: Path, digests: Mapping[str, str]) -> str | None:
    """Return which file in ``directory`` does not have its digest, and how it differs; ``None`` if all have it."""
    for name, expected in digests.items():
        try:
            found = digest_files(directory, [name])[name]
        except OSError as error:
            return f"{name} cannot be read: {error}"
        if found != expected:
            return f"{name} has other contents than were written (its digest differs)"
    return None


def _digest_block(block: tuple[Path, int]) -> bytes:
    path, first = block
    with path.open("rb", buffering=0) as file:
        file.seek(first)
        found, left = sha256(), _BLOCK_BYTES
        while left and (part := file.read(left)):
            found.update(part)
            left -= len(part)
    return found.digest()
