"""Loading of weights from a checkpoint, and export as a directory that transformers and inference servers load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from fnmatch import fnmatch
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from areal_actors.errors import CheckpointError
from areal_actors.training.checkpoints import Checkpoint, StoredTensors
from areal_actors.training.directories import atomic_directory

__all__ = ["digest", "distinct_tensors", "export_model", "load_weights", "stored_weights", "tied_names"]

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
    model: Any,
    directory: Path,
    *,
    state: Mapping[str, Tensor] | None = None,
    tokenizer_directory: Path | None = None,
    dtype: torch.dtype = torch.float32,
    documents: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Write ``model`` (a transformers causal LM) in ``dtype`` with config, generation config and tokenizer files.

    ``state`` replaces its weights, such as by those with an adapter merged into them.
    Tokenizer files are copied unchanged from ``tokenizer_directory``; ``documents`` are written next to them as JSON,
    by their names. An existing ``directory`` is replaced when the new one is complete. Raises ``CheckpointError`` if it
    cannot be written.
    """
    # Merged weights are computed when they are read.
    whole = dict(model.state_dict() if state is None else state)
    converted: dict[int, Tensor] = {}
    for tensor in whole.values():
        target = dtype if tensor.is_floating_point() else tensor.dtype
        converted.setdefault(tensor.data_ptr(), tensor.detach().to("cpu", target))
    # Names that shared one tensor still do, so that tied weights are written once.
    state = {name: converted[tensor.data_ptr()] for name, tensor in whole.items()}
    # Tied tensors are written once.
    num_bytes = sum({tensor.data_ptr(): tensor.nbytes for tensor in state.values()}.values())
    with atomic_directory(directory, num_bytes=num_bytes) as partial:
        model.save_pretrained(partial, state_dict=state)
        config = partial / "config.json"
        document = json.loads(config.read_text(encoding="utf-8")) | {"dtype": str(dtype).removeprefix("torch.")}
        config.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        for path in [] if tokenizer_directory is None else tokenizer_directory.iterdir():
            if path.is_file() and any(fnmatch(path.name, pattern) for pattern in _TOKENIZER_FILES):
                shutil.copyfile(path, partial / path.name)
        for name, content in (documents or {}).items():
            (partial / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def distinct_tensors(model: Any) -> dict[str, Tensor]:
    """Return each tensor of the model once: tied weights appear under one name."""
    names = tied_names(model)
    return {name: tensor for name, tensor in model.state_dict().items() if names[name] == name}


def tied_names(model: Any) -> dict[str, str]:
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
def load_weights(model: Any, checkpoint: Checkpoint) -> None:
    """Load the weights of a checkpoint into ``model``. Raises ``CheckpointError`` if they belong to another model."""
    saved = stored_weights(model, checkpoint)
    for name, tensor in distinct_tensors(model).items():
        # One at a time, because tensors may be large.
        tensor.copy_(saved[name])


def stored_weights(model: Any, checkpoint: Checkpoint) -> StoredTensors:
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
