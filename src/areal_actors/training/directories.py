"""Directories that are written completely or not at all: written under a temporary name, synced, then renamed.

A crash leaves either the old directory or the new one, never a mixture. A partial directory is recognised by its name
and removed by the next writer.

Tensors are written by ``write_tensors``, which releases the interpreter lock, so that gigabytes do not block serving
the agents: the safetensors library holds the lock until the last byte is written. Files are read by the library
(``safetensors.torch.load_file``), which validates them.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from areal_actors.errors import CheckpointError
from areal_actors.lib import atomic_write as files

_PARTIAL = ".partial"


@contextmanager
def atomic_directory(path: Path, *, num_bytes: int) -> Iterator[Path]:
    """Yield a new directory, and rename it to ``path`` if the block succeeds, replacing an existing ``path``.

    Raises ``CheckpointError``, naming ``path`` and ``num_bytes``, if the disk is full or cannot be written; the
    previous content of ``path`` is kept in that case.
    """
    try:
        with files.atomic_directory(path, num_bytes=num_bytes) as partial:
            yield partial
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} could not be written ({error}); it needs {num_bytes:,} bytes. Free some space or choose another "
            "directory. What was there before is unchanged."
        ) from error


def sweep(root: Path) -> None:
    """Remove the partial directories that crashed writers left in ``root``."""
    for path in root.glob(f".*{_PARTIAL}"):
        shutil.rmtree(path, ignore_errors=True)


_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_tensors(path: Path, tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str] | None = None) -> None:
    """Write ``tensors`` and ``metadata`` to ``path`` as a safetensors file. Raises ``OSError`` if writing fails."""
    write_buckets(path, tensors, (tensors,), metadata=metadata)


def write_buckets(
    path: Path,
    layout: Mapping[str, Tensor],
    buckets: Iterable[Mapping[str, Tensor]],
    *,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write tensors as ``write_tensors`` does; they come in ``buckets``, in the order and shapes of ``layout``."""
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    offset = 0
    for name, tensor in layout.items():
        span = [offset, offset + tensor.nbytes]
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
        offset += tensor.nbytes
    encoded = json.dumps(header).encode()
    # Align the data, so that readers can map it.
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        expected = iter(layout)
        for bucket in buckets:
            for name, tensor in bucket.items():
                assert name == next(expected)
                assert (tensor.shape, tensor.dtype) == (layout[name].shape, layout[name].dtype)
                # One tensor at a time on the host: all of them at once would take the memory of the model again.
                file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
                del tensor
            # Freed before the next one is made.
            del bucket
