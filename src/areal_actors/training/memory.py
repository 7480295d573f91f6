"""Memory of the trainer: counts of bytes by configuration, recomputation of activations, release of freed blocks.

A backward pass needs what the forward pass computed. Kept as it is, that is 261 kB per token and layer at the shape of
a 7B model, or 30 GB for a pass of 4096 tokens. ``set_activations`` makes each decoder layer keep its input alone
(14 kB) and compute the rest again in the backward pass, which repeats the forward pass of the layers, a third more
work. What is computed is the same in both cases, bit for bit.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from types import MethodType
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from areal_actors.training.config import Activations

__all__ = [
    "activation_bytes",
    "decoder_layers",
    "device_bytes",
    "release_free_memory",
    "resolve_activations",
    "set_activations",
]

_SHARE_OF_ACTIVATIONS = 1 / 3
"""Share of the memory that weights, gradients and moments leave, up to which activations are kept.

The rest is for the engine's weights and cache in the same process, for logits, and for fragmentation.
"""
_HEAD_NORMS = frozenset({"qwen3", "qwen3_moe", "gemma3", "gemma3_text", "olmo2"})
"""Model types that normalise queries and keys, whose inputs and outputs are kept, too."""


# ---------------------------------------------------------------------------------------------------------- counts


def activation_bytes(config: Any, *, dtype: torch.dtype, activations: Activations) -> int:
    """Return how many bytes of activations one token keeps on the device, over all layers, until the backward pass.

    ``config`` is a transformers configuration. ``dtype`` is that of the forward pass: residuals and norms are float32
    in any case. The coefficients were fitted to the tensors that autograd saved for Llama and Qwen layers of seven
    shapes, with a remainder of 2 bytes; experts are counted as dense layers of the width that a token uses.
    """
    text = config.get_text_config()
    num_layers, hidden = text.num_hidden_layers, text.hidden_size
    match activations:
        case Activations.OFFLOAD:
            return 0
        case Activations.RECOMPUTE:
            return int(num_layers * 4 * hidden)
    heads = text.num_attention_heads
    head = getattr(text, "head_dim", None) or hidden // heads
    attention = head * (heads + (getattr(text, "num_key_value_heads", None) or heads))
    wide = _intermediate_size(text)
    size = dtype.itemsize
    kept = (26 if size == 2 else 24) * hidden + 4 * size * wide + 2 * size * attention + 4 * heads  # noqa: PLR2004
    if text.model_type in _HEAD_NORMS:
        kept += (8 if size == 4 else 6) * attention  # noqa: PLR2004
    return int(num_layers * kept)


def _intermediate_size(text: Any) -> int:
    """Return the width of the layer's feed-forward part that one token goes through."""
    num_experts = getattr(text, "num_experts_per_tok", None)
    if not num_experts:
        return int(text.intermediate_size)
    return int(num_experts * (getattr(text, "moe_intermediate_size", None) or text.intermediate_size))


def device_bytes(device: torch.device) -> int:
    """Return the memory of ``device`` in bytes: of the GPU, or of this machine for a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


# ------------------------------------------------------------------------------------------------------ activations


def resolve_activations(
    asked: Activations,
    config: Any,
    *,
    dtype: torch.dtype,
    num_tokens: int,
    state_bytes: int,
    memory_bytes: int,
) -> Activations:
    """Return ``asked``, or what ``auto`` stands for: keep activations where they surely fit, else recompute them.

    They fit if a pass of ``num_tokens`` needs at most a third of what ``state_bytes`` (weights, gradients, moments)
    leave of ``memory_bytes``.
    """
    if asked is not Activations.AUTO:
        return asked
    kept = num_tokens * activation_bytes(config, dtype=dtype, activations=Activations.KEEP)
    fits = kept <= _SHARE_OF_ACTIVATIONS * max(memory_bytes - state_bytes, 0)
    return Activations.KEEP if fits else Activations.RECOMPUTE


def decoder_layers(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the decoder layers below ``module``: the modules that transformers says must not be split."""
    names = {name for part in module.modules() for name in getattr(part, "_no_split_modules", None) or ()}
    # Of all bases, since ``fully_shard`` puts a class in front of the layer's own.
    yield from [part for part in module.modules() if names & {base.__name__ for base in type(part).__mro__}]


def set_activations(module: torch.nn.Module, activations: Activations) -> None:
    """Make the decoder layers below ``module`` keep, recompute or offload their activations from now on.

    Names of modules and weights stay as they are: a wrapper module would put a prefix before each, and transformers'
    own flag acts in training mode only. Recomputation happens inside the hooks of ``fully_shard``, so that a layer
    whose weights were gathered for its backward pass does not gather them again.
    """
    for layer in decoder_layers(module):
        layer.__dict__.pop("forward", None)
        if activations is Activations.KEEP:
            continue
        forward = _forward_offloading if activations is Activations.OFFLOAD else _forward_recomputing
        # A bound method follows its layer into ``copy.deepcopy``, with which the engine takes its copy of the model.
        layer.forward = MethodType(forward, layer)


def _forward_recomputing(layer: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the layer and keep its inputs only."""
    if not torch.is_grad_enabled():
        return type(layer).forward(layer, *args, **kwargs)
    return checkpoint(MethodType(type(layer).forward, layer), *args, use_reentrant=False, **kwargs)


def _forward_offloading(layer: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the layer and keep its inputs only, in the memory of the host."""
    is_cuda = any(isinstance(value, torch.Tensor) and value.is_cuda for value in args)
    with save_on_cpu(pin_memory=is_cuda) if torch.is_grad_enabled() else nullcontext():
        return _forward_recomputing(layer, *args, **kwargs)


# ---------------------------------------------------------------------------------------------------------- release


def release_free_memory() -> None:
    """Return free memory from the allocator to the system. Does nothing if the C library is not glibc.

    glibc keeps freed blocks below 32 MiB for reuse; after a step of a language model these add up to gigabytes, which
    the engine and the rest of the machine could use.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        trim: Callable[[int], int] = ctypes.CDLL("libc.so.6").malloc_trim
    except (OSError, AttributeError):
        return None
    return trim
