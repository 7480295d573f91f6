"""Memory of the trainer: counts of bytes by configuration, recomputation of activations, number format of weights.

A backward pass needs what the forward pass computed. Kept as it is, that is 225 kB per token and layer at the shape of
a 7B model, or 26 GB for a pass of 4096 tokens. ``layer_memory`` makes each decoder layer keep its input alone
(7 kB) and compute the rest again in the backward pass, which repeats the forward pass of the layers, a third more
work. What is computed is the same in both cases, bit for bit.

Weights are float32 where the optimiser changes them, since an update is often smaller than the last digit of a bfloat16
weight. A layer casts them when it runs, and the copies are freed after it. The alternatives: autocast casts as often
and keeps residuals in float32, at twice the bytes kept and moved; a second copy of all weights in bfloat16 costs 2
bytes for each and saves the casts, about 5 % of the time of a pass of 4096 tokens on an H100 (6 bytes moved for each).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from areal_actors.training.compilation import compiled_forward
from areal_actors.training.config import Activations

__all__ = [
    "activation_bytes",
    "cast_weights",
    "decoder_layers",
    "device_bytes",
    "layer_memory",
    "release_free_memory",
    "resolve_activations",
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

    ``config`` is a transformers configuration, ``dtype`` the format of the forward pass. The coefficients were fitted
    to the tensors that autograd saved for Llama and Qwen layers of seven shapes, with a remainder of 2 bytes; experts
    are counted as dense layers of the width that a token uses.
    """
    text = config.get_text_config()
    num_layers, hidden = text.num_hidden_layers, text.hidden_size
    match activations:
        case Activations.OFFLOAD:
            return 0
        case Activations.RECOMPUTE:
            return int(num_layers * dtype.itemsize * hidden)
    heads = text.num_attention_heads
    head = getattr(text, "head_dim", None) or hidden // heads
    attention = head * (heads + (getattr(text, "num_key_value_heads", None) or heads))
    wide = _intermediate_size(text)
    size = dtype.itemsize
    kept = (16 if size == 2 else 24) * hidden + 4 * size * wide + 2 * size * attention + 4 * heads  # noqa: PLR2004
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


@contextmanager
def layer_memory(
    module: torch.nn.Module,
    *,
    activations: Activations,
    dtype: torch.dtype | None = None,
    is_compiled: bool = False,
) -> Iterator[None]:
    """Make the decoder layers below ``module`` keep, recompute or offload their activations during the block.

    With ``dtype`` they compute with copies of their weights in it, which exist while a layer runs, and residuals have
    it, too, as with the ``MixedPrecisionPolicy`` of ``fully_shard``. ``None`` takes the weights as they are. With
    ``is_compiled`` they run compiled.

    Names of modules and weights stay as they are: a wrapper module would put a prefix before each, and transformers'
    own flag acts in training mode only. Recomputation happens inside the hooks of ``fully_shard``, so that a layer
    whose weights were gathered for its backward pass does not gather them again. The block is one forward pass, since
    the engine copies the model between passes, and has another number format.
    """
    layers = list(decoder_layers(module))
    inside = {part for layer in layers for part in layer.modules()}
    others = [] if dtype is None else [part for part in module.modules() if part not in inside and part._parameters]  # noqa: SLF001 - its own ones only
    replaced = [(part, part.__dict__.get("forward")) for part in (*layers, *others)]
    try:
        for layer in layers:
            forward = compiled_forward(layer) if is_compiled else layer.forward
            compute = partial(_forward_in, dtype, layer, forward)
            layer.forward = partial(_forward_layer, activations, compute, dtype)
        for part in others:
            is_embedding = isinstance(part, torch.nn.Embedding)
            part.forward = partial(_embed if is_embedding else _forward_in, dtype, part, part.forward)
        yield
    finally:
        for part, before in replaced:
            if before is None:
                part.__dict__.pop("forward", None)
            else:
                part.forward = before


def _forward_layer(
    activations: Activations, compute: Callable[..., Any], dtype: torch.dtype | None, *args: Any, **kwargs: Any
) -> Any:
    args = tuple(_cast(value, dtype) for value in args)
    if not torch.is_grad_enabled() or activations is Activations.KEEP:
        return compute(*args, **kwargs)
    is_cuda = any(isinstance(value, Tensor) and value.is_cuda for value in args)
    with save_on_cpu(pin_memory=is_cuda) if activations is Activations.OFFLOAD else nullcontext():
        return checkpoint(compute, *args, use_reentrant=False, **kwargs)


def _forward_in(
    dtype: torch.dtype | None, module: torch.nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call ``forward`` of ``module`` with copies of its weights in ``dtype``; gradients reach the originals."""
    if dtype is None:
        return forward(*args, **kwargs)
    # As torch.func.functional_call does, which would call the hooks of the module a second time.
    places = [(part._parameters, name) for part in module.modules() for name in part._parameters]  # noqa: SLF001
    weights = [holder[name] for holder, name in places]
    try:
        for (holder, name), weight in zip(places, weights, strict=True):
            holder[name] = _cast(weight, dtype)
        return forward(*args, **kwargs)
    finally:
        for (holder, name), weight in zip(places, weights, strict=True):
            holder[name] = weight


def cast_weights(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Cast the weights below ``module``, which are not trained; buffers such as frequencies stay as they are."""
    for weight in module.parameters():
        weight.data = weight.data.to(dtype)


def _embed(
    dtype: torch.dtype | None, _: torch.nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    # A few rows of a large matrix: cheaper to cast than the matrix.
    return _cast(forward(*args, **kwargs), dtype)


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    is_cast = dtype is not None and isinstance(value, Tensor) and value.is_floating_point()
    return value.to(dtype) if is_cast else value


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
