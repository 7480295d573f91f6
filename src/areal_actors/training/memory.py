"""Memory of the trainer: counts of bytes by configuration, recomputation of activations, number format of weights.

A backward pass needs what the forward pass computed. Kept as it is, that is 225 kB per token and layer at the shape of
a 7B model, or 26 GB for a pass of 4096 tokens. ``layer_memory`` makes each decoder layer keep its input alone
(7 kB) and compute the rest again in the backward pass, which repeats the forward pass of the layers, a third more
work. What is computed is the same in both cases, bit for bit. On a GPU ``auto`` keeps the activations of as many layers
as the memory that is free before a pass has room for, and recomputes the others.

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
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from areal_actors.training.compilation import compiled_forward
from areal_actors.training.config import Activations
from areal_actors.training.forward import head_chunk_bytes

__all__ = [
    "activation_bytes",
    "cast_weights",
    "count_kept_layers",
    "decoder_layers",
    "device_bytes",
    "layer_memory",
    "num_kept_layers",
    "release_free_memory",
    "resolve_activations",
    "temporary_bytes",
]

_SHARE_OF_ACTIVATIONS = 1 / 3
"""Share of the memory that weights, gradients and moments leave, up to which activations are kept.

The rest is for the engine's weights and cache in the same process, for logits, and for fragmentation.
"""
_SHARE_OF_FREE_MEMORY = 0.9
"""Share of a GPU's free memory that a pass may use: blocks of the allocator do not fit into each other without gaps."""
_COMPILED_SHARE = 0.8
"""Upper bound of what compiled layers keep, as a share of what plain ones do.

They compute elementwise results again: .72 was measured at the proportions of Qwen2 1.5B in bfloat16.
"""
_NUM_CHUNK_COPIES = 3
"""Logits of a chunk of the output head, their exponentials, and their gradient."""
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


def temporary_bytes(
    model: Any, *, dtype: torch.dtype, kept: Activations, num_tokens: int, device_type: str, trains_head: bool
) -> int:
    """Return the bytes that the backward passes of one layer and of the output head need while they run."""
    size = dtype.itemsize
    text = model.config.get_text_config()
    one_layer = activation_bytes(model.config, dtype=dtype, activations=Activations.KEEP) // text.num_hidden_layers
    largest = max(sum(weight.numel() for weight in layer.parameters()) for layer in decoder_layers(model))
    copies = (2 * size if size < 4 else 0) * largest  # noqa: PLR2004 - in float32 the weights themselves compute
    # Gradients of what a layer computed are as large as what it kept of it, for the widest half at a time.
    layer = num_tokens * one_layer // 2 + copies
    if kept is not Activations.KEEP:
        layer += num_tokens * one_layer
    head = model.get_output_embeddings().weight.numel()
    chunk = _NUM_CHUNK_COPIES * head_chunk_bytes(device_type)
    states = 3 * num_tokens * text.hidden_size * 4
    # Gradients of the head and of the embeddings before they are added to the others, and the head in ``dtype``.
    matrices = (8 * head if trains_head else 0) + (size * head if size < 4 else 0)  # noqa: PLR2004
    # Added up, although layer and head compute one after the other: allocators keep what the one has freed.
    return int(layer + chunk + states + matrices)


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


def num_kept_layers(*, num_layers: int, kept_bytes: int, recomputed_bytes: int, free_bytes: int) -> int:
    """Return for how many of ``num_layers`` layers a pass can keep activations, in ``free_bytes`` of memory.

    A layer holds ``kept_bytes`` until the backward pass if it keeps its activations, and ``recomputed_bytes`` if not.
    """
    left = free_bytes - num_layers * recomputed_bytes
    return min(max(left, 0) // max(kept_bytes - recomputed_bytes, 1), num_layers)


def count_kept_layers(
    model: Any, *, dtype: torch.dtype, num_tokens: int, is_sharded: bool, is_compiled: bool = False
) -> int:
    """Return for how many decoder layers of ``model`` the next pass, of ``num_tokens`` tokens, keeps activations.

    The model is on a GPU. What is free includes the blocks that torch's allocator holds unused. The pass also has to
    leave room for the gradients that do not exist yet and for what one layer and the head need while they compute.
    """
    layers = list(decoder_layers(model))
    totals = [
        activation_bytes(model.config, dtype=dtype, activations=chosen)
        for chosen in (Activations.KEEP, Activations.RECOMPUTE)
    ]
    kept, recomputed = (num_tokens * total // len(layers) for total in totals)
    weights = [[weight for weight in layer.parameters() if weight.dtype is not dtype] for layer in layers]
    # Autograd keeps the copies that a layer computed with; gathered weights are freed by the gang.
    copies = 0 if is_sharded else max(dtype.itemsize * sum(weight.numel() for weight in layer) for layer in weights)
    missing = [weight for weight in model.parameters() if weight.requires_grad and weight.grad is None]
    # Layers that recompute run after the kept ones are freed, so their temporaries do not add up with those.
    temporaries = temporary_bytes(
        model,
        dtype=dtype,
        kept=Activations.KEEP,
        num_tokens=num_tokens,
        device_type=model.device.type,
        trains_head=model.get_output_embeddings().weight.requires_grad,
    )
    reserve = temporaries + sum(map(_local_bytes, missing))
    return num_kept_layers(
        num_layers=len(layers),
        kept_bytes=int(kept * (_COMPILED_SHARE if is_compiled else 1)) + copies,
        recomputed_bytes=recomputed,
        free_bytes=int(_SHARE_OF_FREE_MEMORY * _free_bytes(model.device)) - reserve,
    )


def _local_bytes(weight: Tensor) -> int:
    """Return the bytes of this rank's part of a weight."""
    return int((weight.to_local() if isinstance(weight, DTensor) else weight).nbytes)


def _free_bytes(device: torch.device) -> int:
    """Return how many bytes of a GPU this process can still allocate; of a CPU the share that passes may use."""
    if device.type != "cuda":
        return int(_SHARE_OF_ACTIVATIONS * device_bytes(device))
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


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
    num_kept: int = 0,
    dtype: torch.dtype | None = None,
    is_compiled: bool = False,
) -> Iterator[None]:
    """Make the decoder layers below ``module`` keep, recompute or offload their activations during the block.

    The last ``num_kept`` layers keep them in any case. A backward pass frees those first, before the other layers take
    memory for what they recompute; and its gradients need memory by the time that the layers' activations are freed.

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
        for index, layer in enumerate(layers):
            is_kept = index >= len(layers) - num_kept
            forward = compiled_forward(layer) if is_compiled else layer.forward
            compute = partial(_forward_in, dtype, layer, forward)
            layer.forward = partial(_forward_layer, Activations.KEEP if is_kept else activations, compute, dtype)
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
