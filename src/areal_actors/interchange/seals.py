"""Seals of dumped rows: authentication codes with a key that only the owner of the run can read.

A seal covers every column of a row and the number of rows of its step, so that a changed, added, removed or moved row
is found. It is text with parts in hexadecimal, joined by colons: the code of the whole row, then a short code of each
column in the order of ``DumpedRow``, which names the columns that were changed.
"""

from __future__ import annotations

import secrets
from hashlib import blake2b
from hmac import compare_digest
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from attrs import fields_dict

from areal_actors.lib.atomic_write import atomic_write

if TYPE_CHECKING:
    from areal_actors.interchange.rows import DumpedRow

_KEY_SIZE = 32
_COLUMN_SIZE = 8


def open_seal_key(path: Path) -> bytes:
    """Return the key in the file ``path``, which is created, readable by its owner only, if it is not there.

    Raises ``OSError``, also if the file has no valid key.
    """
    try:
        key = read_seal_key(path)
    except ValueError as error:
        raise OSError(f"{path} has no valid key, so rows cannot be sealed: {error}. Move it away.") from error
    if key is None:
        key = secrets.token_bytes(_KEY_SIZE)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Atomically: a full disk would leave an empty file, whose key everybody knows.
        atomic_write(path, key.hex(), mode=0o600)
    return key


def read_seal_key(path: Path) -> bytes | None:
    """Return the key in the file ``path``; ``None`` if there is none. Raises ``OSError`` and ``ValueError``."""
    if not path.exists():
        return None
    key = bytes.fromhex(path.read_text("ascii"))
    if len(key) != _KEY_SIZE:
        raise ValueError(f"{path} has a key of {len(key)} bytes instead of {_KEY_SIZE}")
    return key


def seal_row(row: DumpedRow, key: bytes, *, num_rows: int) -> str:
    """Return the seal of a row, one of ``num_rows`` of its step."""
    codes = []
    # The bytes of a column are those of no other value of it, and parquet preserves them.
    whole = blake2b(str(num_rows).encode(), key=key, digest_size=32, person=b"areal row")
    for name in _columns():
        value = getattr(row, name)
        if isinstance(value, np.ndarray):
            # Parquet stores nan as null, so its bits are not preserved.
            is_nan = np.isnan(value)
            content = (np.where(is_nan, value.dtype.type(np.nan), value) if is_nan.any() else value).tobytes()
        else:
            texts = value if isinstance(value, tuple) else (repr(value),)
            encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
            content = b"".join([f"{len(encoded)}:".encode(), *(f"{len(text)}:".encode() + text for text in encoded)])
        whole.update(f"{name}:{len(content)}:".encode())
        whole.update(content)
        codes.append(blake2b(content, key=key, digest_size=_COLUMN_SIZE, salt=name[:16].encode()).hexdigest())
    return ":".join([whole.hexdigest(), *codes])


def changed_columns(row: DumpedRow, key: bytes, *, num_rows: int) -> tuple[str, ...] | None:
    """Return the columns that differ from what ``row`` was sealed with, ``None`` if the seal is valid.

    The columns are empty if the row is as it was, but belongs to a step with another number of rows.
    """
    expected = seal_row(row, key, num_rows=num_rows)
    if compare_digest(expected.encode(), row.seal.encode("utf-8", "replace")):
        return None
    there, here = row.seal.split(":")[1:], expected.split(":")[1:]
    if len(there) != len(here):
        return ("seal",)
    return tuple(name for name, old, new in zip(_columns(), there, here, strict=True) if old != new)


def _columns() -> tuple[str, ...]:
    from areal_actors.interchange.rows import DumpedRow

    return tuple(name for name in fields_dict(DumpedRow) if name != "seal")
