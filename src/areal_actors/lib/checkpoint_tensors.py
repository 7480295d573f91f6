"""Convert the weights of a model between their form in memory and that of checkpoints. No other module knows both.

transformers arranges the weights of some models differently in memory and in files: the experts of a Mixtral are one
tensor in memory and three tensors per expert on disk. Training, embedded engines and inference servers all convert
weights with these functions, so that every way of publishing gives the same names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from areal_actors.errors import ModelError
from areal_actors.lib.telemetry import quiet_transformers

__all__ = ["LazyTensors", "open_skeleton", "read_checkpoint", "to_checkpoint_tensors"]


class LazyTensors(Mapping[str, Tensor]):
    """Tensors by name that are computed each time that they are read."""

    def like(self, name: str) -> Tensor:
        """Return a tensor with the shape and the kind of the one called ``name``, without computing that."""
        return self[name]


def to_checkpoint_tensors(
    model: Any | None, state: Mapping[str, Tensor], *, dtype: torch.dtype | None = None, is_copied: bool = False
) -> dict[str, Tensor]:
    """Return the weights on the CPU, each once, contiguous, by their names in checkpoints.

    Tied weights keep their first name; programs that load them tie them again.

    Args:
        model: A transformers model of the architecture, on any device; its own weights are not read. With ``None``,
            names are unchanged.
        state: The weights by their names in the model's state dict.
        dtype: The dtype to which floating-point tensors are cast; ``None`` leaves them unchanged.
        is_copied: Whether tensors that are already on the CPU in ``dtype`` are copied; otherwise they are shared.

    Raises:
        ModelError: A value of ``state`` is not a tensor.
    """
    distinct: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            raise ModelError(f"{name} of the snapshot is a {type(tensor).__name__} and no tensor.")
        # Empty tensors all have the address 0.
        distinct.setdefault(tensor.data_ptr() or id(tensor), (name, tensor))
    on_cpu: dict[str, Tensor] = {}
    for name, original in distinct.values():
        tensor = original.detach()
        # Cast on the device, one tensor at a time, so that fewer bytes leave it.
        cast = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
        on_cpu[name] = cast.clone() if is_copied and cast is tensor and cast.is_cpu else cast.cpu()
    renamed: Mapping[str, Tensor] = on_cpu
    if model is not None:
        from transformers.core_model_loading import revert_weight_conversion

        renamed = revert_weight_conversion(model, on_cpu)
    return {name: tensor.contiguous() for name, tensor in renamed.items()}


def read_checkpoint(directory: Path) -> dict[str, Tensor]:
    """Return the weights in ``directory`` by their names in the model's state dict, on the CPU, in their dtype.

    A model whose checkpoints are arranged differently is loaded by transformers, which temporarily takes the memory of
    a second copy.

    Raises:
        ModelError: There are no such files, one cannot be read, or weights are missing.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    files = sorted(directory.glob("*.safetensors"))
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
