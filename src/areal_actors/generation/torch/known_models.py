"""Models that an engine of this machine has tried before: they are opened from their files alone.

Before the lean path is used for a model, it is compared with the model itself (``forward.create_forward``), for which
transformers has to be imported and the model built: 4 s of CPU time for a model of a few megabytes. The outcome depends
on the configuration, the names, shapes and formats of the weights, the code and the device, so it is kept in the cache
directory under a digest of these: the shape of each model for which the lean path was right. An engine that finds it
reads the weights and serves.

One thing depends on the numbers: transformers ties a head to the embeddings, unless the files hold both and they
differ. A model whose files hold a head that its configuration may tie is therefore never known.
"""

from __future__ import annotations

import json
import platform
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from attrs import asdict
from safetensors import SafetensorError, safe_open

from areal_actors.generation.torch.forward import LlamaForward, LlamaShape
from areal_actors.lib.atomic_write import atomic_write
from areal_actors.lib.checkpoint_tensors import weight_files
from areal_actors.models import cache_directory

_SOURCES = ("forward.py", "attention.py", "known_models.py")
"""The files whose code the outcome depends on."""


_NOT_KNOWN = (OSError, ValueError, TypeError, KeyError, AttributeError, SafetensorError)
"""What files that are damaged, or those of another kind of model, raise: transformers then reads or refuses them."""


def find_shape(model: Path, device: str) -> LlamaShape | None:
    """Return the shape of the model in the directory ``model``, if the lean path computes it on ``device``."""
    with suppress(*_NOT_KNOWN):
        if (path := _path(model, device)) is not None:
            found = json.loads(path.read_text(encoding="utf-8"))
            return LlamaShape(**found | {"frequencies": tuple(found["frequencies"])})
    return None


def keep_shape(model: Path, device: str, shape: LlamaShape) -> None:
    """Note that the lean path computes the model in the directory ``model`` on ``device``.

    A cache that cannot be written is left as it is: the next engine tries the model again.
    """
    with suppress(*_NOT_KNOWN):
        if (path := _path(model, device)) is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(path, json.dumps(asdict(shape)))


def open_known(model: Path, shape: LlamaShape, *, dtype: torch.dtype, device: str) -> LlamaForward | None:
    """Return the forward of the model in the directory ``model``, read from its files.

    Returns ``None`` if they are not simply its weights by their names.
    """

    def read(name: str) -> torch.Tensor:
        tensor: torch.Tensor = files[name].get_tensor(name)
        if not tensor.is_floating_point():
            raise ValueError(f"{name} has integers")
        return tensor.to(device=device, dtype=dtype)

    with suppress(*_NOT_KNOWN):
        files = _open_files(model)
        if {*shape.weights()} == {*files}:
            return LlamaForward(shape, read)
    return None


def _open_files(model: Path) -> dict[str, Any]:
    """Return the open file of each tensor, by its name."""
    files: dict[str, Any] = {}
    for name in weight_files(model):
        file: Any = safe_open(model / name, framework="pt")
        files |= dict.fromkeys(file.keys(), file)
    return files


def _path(model: Path, device: str) -> Path | None:
    """Return the file of the model in the cache; ``None`` if it is not kept there."""
    settings = (model / "config.json").read_bytes()
    files = _open_files(model)
    is_untied = json.loads(settings).get("tie_word_embeddings") is False
    # transformers puts an adapter that lies there into the model.
    if ("lm_head.weight" in files and not is_untied) or (model / "adapter_config.json").exists():
        return None
    content = sha256(_fingerprint(device).encode() + settings)
    for name in sorted(files):
        tensor = files[name].get_slice(name)
        content.update(f"{name} {tensor.get_dtype()} {tensor.get_shape()}\n".encode())
    return cache_directory() / "lean" / f"{content.hexdigest()[:32]}.json"


@cache
def _fingerprint(device: str) -> str:
    """Return what the outcome depends on, apart from the model."""
    sources = [sha256((Path(__file__).parent / name).read_bytes()).hexdigest() for name in _SOURCES]
    chip = torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.machine()
    return repr([*sources, torch.__version__, version("transformers"), device, chip])
