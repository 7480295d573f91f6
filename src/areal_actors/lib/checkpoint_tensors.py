"""Convert the weights of a model between their form in memory and that of checkpoints. No other module knows both.

transformers arranges the weights of some models differently in memory and in files: the experts of a Mixtral are one
tensor in memory and three tensors per expert on disk. Training, embedded engines and inference servers all convert
weights with these functions, so that every way of publishing gives the same names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from areal_actors.errors import ModelError
from areal_actors.lib.telemetry import quiet_transformers

_IN_LAYER = re.compile(r"(?:[^.]+\.)*?\d+\.")
"""The name of a weight up to the number of its layer."""


def weight_files(directory: Path) -> dict[str, Sequence[str]]:
    """Return the names of the safetensors files with the weights of ``directory``, and the tensors that each must have.

    As in transformers a single ``model.safetensors`` comes before an index, and the files of an index before others
    that lie next to them, such as the consolidated weights of Mistral. Without either, all files belong to the weights.
    Raises ``OSError``, ``ValueError`` or ``KeyError`` if the index cannot be read.
    """
    index = directory / "model.safetensors.index.json"
    if (directory / "model.safetensors").is_file():
        return {"model.safetensors": ()}
    if not index.is_file():
        return {path.name: () for path in sorted(directory.glob("*.safetensors"))}
    files: dict[str, list[str]] = {}
    for tensor, file in sorted(json.loads(index.read_text(encoding="utf-8"))["weight_map"].items()):
        files.setdefault(file, []).append(tensor)
    return dict(sorted(files.items()))


class LazyTensors(Mapping[str, Tensor]):
    """Tensors by name that are computed each time that they are read."""

    def like(self, name: str) -> Tensor:
        """Return a tensor with the shape and the kind of the one called ``name``, without computing that."""
        return self[name]


def to_checkpoint_tensors(
    model: Any | None, state: Mapping[str, Tensor], *, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Return the weights on the CPU, each once, contiguous, by their names in checkpoints.

    Tied weights keep their first name; programs that load them tie them again.

    Args:
        model: A transformers model of the architecture, on any device; its own weights are not read. With ``None``,
            names are unchanged.
        state: The weights by their names in the model's state dict.
        dtype: The dtype to which floating-point tensors are cast; ``None`` leaves them unchanged.

    Raises:
        ModelError: A value of ``state`` is not a tensor.
    """
    buckets = checkpoint_buckets(model, state, dtype=dtype)
    return {name: tensor for bucket in buckets for name, tensor in bucket.items()}


def checkpoint_buckets(
    model: Any | None, state: Mapping[str, Tensor], *, dtype: torch.dtype | None = None
) -> Iterator[dict[str, Tensor]]:
    """Yield what ``to_checkpoint_tensors`` returns in parts: the weights of one layer, or one weight outside of layers.

    Each tensor of ``state`` is read once, in the order of ``state``, and only when its part is asked for.
    """

    def read(name: str) -> Tensor:
        tensor = state[name].detach()
        # Cast on the device, one tensor at a time, so that fewer bytes leave it.
        cast = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
        return cast.cpu()

    for names in _bucket_names(model, state):
        # No name for the tensors: a generator that waits would hold them while it makes the next ones.
        yield _reverted(model, {name: read(name) for name in names})


def checkpoint_layout(
    model: Any | None, state: Mapping[str, Tensor], *, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Return tensors without numbers with the names, shapes, formats and order of ``checkpoint_buckets``."""
    buckets = (_reverted(model, _shapes(state, names, dtype)) for names in _bucket_names(model, state))
    return {name: tensor for bucket in buckets for name, tensor in bucket.items()}


def _bucket_names(model: Any | None, state: Mapping[str, Tensor]) -> list[list[str]]:
    """Return the names of the weights, each once, by the parts that are converted together."""
    # Held until the end: what is freed gives its identity to the next one.
    tensors = {name: _alike(state, name) for name in state}
    distinct: dict[int, str] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise ModelError(f"{name} of the snapshot is a {type(tensor).__name__} and no tensor.")
        # Empty tensors, and those without numbers, all have the address 0.
        distinct.setdefault(tensor.data_ptr() or id(tensor), name)
    parts: dict[str, list[str]] = {}
    for name in distinct.values():
        layer = _IN_LAYER.match(name)
        parts.setdefault(layer[0] if layer else name, []).append(name)
    buckets = list(parts.values())
    if model is None or not getattr(model, "_weight_conversions", True):
        return buckets
    # A conversion that combines weights of several parts would give other names.
    names = [name for bucket in buckets for name in bucket]
    apart = {name for bucket in buckets for name in _reverted(model, _shapes(state, bucket, None))}
    return buckets if apart == _reverted(model, _shapes(state, names, None)).keys() else [names]


def _alike(state: Mapping[str, Tensor], name: str) -> Tensor:
    return state.like(name) if isinstance(state, LazyTensors) else state[name]


def _shapes(state: Mapping[str, Tensor], names: Sequence[str], dtype: torch.dtype | None) -> dict[str, Tensor]:
    found = {name: _alike(state, name) for name in names}
    formats = {name: dtype if dtype and tensor.is_floating_point() else tensor.dtype for name, tensor in found.items()}
    return {name: torch.empty(tensor.shape, dtype=formats[name], device="meta") for name, tensor in found.items()}


def _reverted(model: Any | None, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    renamed: Mapping[str, Tensor] = tensors
    if model is not None:
        from transformers.core_model_loading import revert_weight_conversion

        renamed = revert_weight_conversion(model, tensors)
    return {name: tensor.contiguous() for name, tensor in renamed.items()}


def pack_names(tensors: Mapping[str, Tensor], max_bytes: int) -> Iterator[list[str]]:
    """Yield the names of ``tensors`` in their order, in parts of at most ``max_bytes``; a larger tensor is one part."""
    names: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        if names and size + tensor.nbytes > max_bytes:
            yield names
            names, size = [], 0
        names.append(name)
        size += tensor.nbytes
    if names:
        yield names


def read_checkpoint(directory: Path) -> dict[str, Tensor]:
    """Return the weights in ``directory`` by their names in the model's state dict, on the CPU, in their dtype.

    A model whose checkpoints are arranged differently is loaded by transformers, which temporarily takes the memory of
    a second copy.

    Raises:
        ModelError: There are no such files, one cannot be read, or weights are missing.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        files = [directory / name for name in weight_files(directory)]
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"The index of {directory} cannot be read: {error}. Save it again; the old weights stay."
        ) from error
    if not files:
        raise ModelError(f"{directory} has no *.safetensors files; save the model there with save_pretrained.")
    skeleton = open_skeleton(directory)
    if skeleton is not None:
        # Imported late: a directory without a configuration needs no transformers.
        from transformers.conversion_mapping import get_model_conversion_mapping

        if get_model_conversion_mapping(skeleton, add_legacy=False):
            try:
                with quiet_transformers():
                    loaded, report = type(skeleton).from_pretrained(
                        directory, local_files_only=True, dtype="auto", output_loading_info=True
                    )
            except (OSError, ValueError, RuntimeError, SafetensorError) as error:
                raise ModelError(
                    f"{directory} cannot be loaded: {error}. Save it again; the old weights stay."
                ) from error
            # transformers would initialise them at random.
            if missing := sorted(report["missing_keys"]):
                raise ModelError(f"The files in {directory} lack {len(missing)} weights, {missing[0]} among them.")
            converted: dict[str, Tensor] = loaded.state_dict()
            return converted
    state: dict[str, Tensor] = {}
    for file in files:
        try:
            state.update(load_file(file))
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{file} cannot be read: {error}. Save it again; the old weights stay.") from error
    return state


def open_skeleton(directory: Path) -> Any | None:
    """Return the model of ``directory`` without weights (on the device ``meta``), for the arrangement of its tensors.

    Returns ``None`` if the directory has no ``config.json``; its tensors are then used unchanged. Raises ``ModelError``
    if the configuration is not that of a causal language model of transformers.
    """
    path = directory / "config.json"
    if not path.is_file():
        return None
    try:
        return _build_skeleton(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{path} describes no causal language model of transformers: {error}") from error


@lru_cache(maxsize=8)
def _build_skeleton(config: str) -> Any:
    # Cached by content: every published version is another directory with the same configuration.
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    document = json.loads(config)
    with quiet_transformers(), torch.device("meta"):
        return AutoModelForCausalLM.from_config(CONFIG_MAPPING[document["model_type"]].from_dict(document))
