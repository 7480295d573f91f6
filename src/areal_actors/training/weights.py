"""Loading of weights from a checkpoint, and export as a directory that transformers and inference servers load.

An export is written one layer at a time, and its weights may be read from the shards of a checkpoint meanwhile: the
model of a gang is larger than the memory of a machine.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from areal_actors.errors import CheckpointError
from areal_actors.lib.checkpoint_tensors import checkpoint_buckets, checkpoint_layout, pack_names
from areal_actors.training.directories import atomic_directory, write_buckets
from areal_actors.training.stored_checkpoints import Checkpoint, StoredTensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MAX_FILE_BYTES = 5 * 10**9
"""Size of the files that a larger model is divided into."""

_TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "*.tiktoken",
    "spiece.model",
)


def export_model(
    model: PreTrainedModel,
    directory: Path,
    *,
    state: Mapping[str, Tensor] | None = None,
    tokenizer_directory: Path | None = None,
    dtype: torch.dtype = torch.float32,
    documents: Mapping[str, Mapping[str, Any]] | None = None,
    max_file_bytes: int = _MAX_FILE_BYTES,
) -> None:
    """Write ``model`` (a transformers causal LM) in ``dtype`` with config, generation config and tokenizer files.

    ``state`` replaces its weights, such as by those with an adapter merged into them, or by those that are read from
    files: each is read once, and one layer at a time is converted. A model of more than ``max_file_bytes`` is divided
    into several files and an index.
    Tokenizer files are copied unchanged from ``tokenizer_directory``; ``documents`` are written next to them as JSON,
    by their names. An existing ``directory`` is replaced when the new one is complete. Raises ``CheckpointError`` if it
    cannot be written.
    """
    source: Mapping[str, Tensor] = model.state_dict() if state is None else state
    layout = checkpoint_layout(model, source, dtype=dtype)
    num_bytes = sum(tensor.nbytes for tensor in layout.values())
    # ``save_pretrained`` would need all weights at once.
    with atomic_directory(directory, num_bytes=num_bytes) as partial:
        tensors = _one_by_one(checkpoint_buckets(model, source, dtype=dtype))
        groups = list(pack_names(layout, max_file_bytes))
        files: dict[str, str] = {}
        for number, names in enumerate(groups, start=1):
            file = f"model-{number:05d}-of-{len(groups):05d}.safetensors" if len(groups) > 1 else "model.safetensors"
            part = {name: layout[name] for name in names}
            write_buckets(partial / file, part, islice(tensors, len(names)), metadata={"format": "pt"})
            files |= dict.fromkeys(names, file)
        if len(groups) > 1:
            index = {"metadata": {"total_size": num_bytes}, "weight_map": files}
            _write_json(partial / "model.safetensors.index.json", index)
        write_config(partial, model, dtype)
        if model.can_generate():
            model.generation_config.save_pretrained(partial)
        for path in [] if tokenizer_directory is None else tokenizer_directory.iterdir():
            if path.is_file() and any(fnmatch(path.name, pattern) for pattern in _TOKENIZER_FILES):
                shutil.copyfile(path, partial / path.name)
        for name, content in (documents or {}).items():
            _write_json(partial / name, content)


def write_config(directory: Path, model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Write the ``config.json`` of ``model`` to ``directory``, for weights in ``dtype``."""
    model.config.save_pretrained(directory)
    path = directory / "config.json"
    document = json.loads(path.read_text(encoding="utf-8")) | {
        "dtype": str(dtype).removeprefix("torch."),
        # FSDP changes the name of a class.
        "architectures": [type(model).__name__.removeprefix("FSDP")],
    }
    _write_json(path, document)


def _one_by_one(buckets: Iterator[dict[str, Tensor]]) -> Iterator[Mapping[str, Tensor]]:
    """Yield the tensors of ``buckets`` in their order. A bucket is freed before the next one is made."""
    for bucket in buckets:
        for name in list(bucket):
            yield {name: bucket.pop(name)}


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def distinct_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return each tensor of the model once: tied weights appear under one name."""
    names = tied_names(model)
    return {name: tensor for name, tensor in model.state_dict().items() if names[name] == name}


def tied_names(model: PreTrainedModel) -> dict[str, str]:
    """Return for each tensor of the model its name in ``distinct_tensors``."""
    tensors = model.state_dict(keep_vars=True)
    # Reversed, so that the first name of tied tensors wins.
    first = {_identity(tensor): name for name, tensor in reversed(tensors.items())}
    return {name: first[_identity(tensor)] for name, tensor in tensors.items()}


def digest(text: str) -> int:
    """Return a number below 2**48, a hash of ``text``."""
    # 48 bits: ``Gang.require_equal`` compares digests as float64, which is exact only below 2**53.
    return int.from_bytes(sha256(text.encode()).digest()[:6], "big")


@torch.no_grad()
def load_weights(model: PreTrainedModel, checkpoint: Checkpoint) -> None:
    """Load the weights of a checkpoint into ``model``. Raises ``CheckpointError`` if they belong to another model."""
    saved = stored_weights(model, checkpoint)
    for name, tensor in distinct_tensors(model).items():
        # One at a time, because tensors may be large.
        tensor.copy_(saved[name])


def stored_weights(model: PreTrainedModel, checkpoint: Checkpoint) -> StoredTensors:
    """Return the weights of a checkpoint, sharded as ``model``, to be read one at a time.

    Raises ``CheckpointError`` if they belong to another model.
    """
    own = distinct_tensors(model)
    saved = checkpoint.tensors("model", like=own.get)
    misfits = [name for name in own.keys() | saved.keys() if name not in own or name not in saved]
    misfits += [name for name in own.keys() & saved.keys() if own[name].shape != saved.shape(name)]
    if misfits:
        raise CheckpointError(f"{checkpoint.path} is of another model: {', '.join(sorted(misfits)[:5])} do not fit.")
    return saved


def _identity(tensor: Tensor) -> int:
    """Return a key that is equal for tensors with the same storage; sharded and empty tensors have no data address."""
    return id(tensor) if isinstance(tensor, DTensor) or tensor.is_meta else tensor.data_ptr()
