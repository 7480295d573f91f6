"""Memory of the trainer: what weights, moments and activations take, predicted from a configuration alone.

Nothing is loaded: a model may be on torch's ``meta`` device, which has shapes and no numbers. ``doctor`` reports the
prediction (``plan_trainer``), and the trainer decides by it what passes keep for the backward pass, and whether the
longest row fits. On a GPU each pass decides again, by the memory that is free then.
"""

from __future__ import annotations

import ctypes
import math
import os
from bisect import bisect_right
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from attrs import evolve, fields, frozen

from areal_actors.errors import ConfigError, ModelError
from areal_actors.lib.precision import choose_dtype
from areal_actors.models import model_shape
from areal_actors.training.config import Activations, GangBackend, TrainerConfig
from areal_actors.training.forward import head_chunk_bytes
from areal_actors.training.layers import decoder_layers, has_compiled
from areal_actors.training.lora import find_adapted
from areal_actors.training.optimizer import state_bytes

_SHARE_OF_ACTIVATIONS = 1 / 3
"""Share of the memory that weights, gradients and moments leave, up to which activations are kept.

The rest is for the engine's weights and cache in the same process, for logits, and for fragmentation.
"""
_SHARE_OF_FREE_MEMORY = 0.9
"""Share of a GPU's free memory that a pass may use: blocks of the allocator do not fit into each other without gaps."""
_COMPILED_ROWS = 32
"""Bytes of the normalisers of norms and attention that a compiled layer keeps for each token."""
_MAX_ERROR = 0.15
"""Relative error of predictions: what exceeds a device by less may fit."""
_NUM_CHUNK_COPIES = 3
"""Logits of a chunk of the output head, their exponentials, and their gradient."""
_HEAD_NORMS = frozenset({"qwen3", "qwen3_moe", "gemma3", "gemma3_text", "olmo2"})
"""Model types that normalise queries and keys, whose inputs and outputs are kept, too."""


# ---------------------------------------------------------------------------------------------------------- counts


def activation_bytes(config: Any, *, dtype: torch.dtype, activations: Activations, is_compiled: bool = False) -> int:
    """Return how many bytes of activations one token keeps on the device, over all layers, until the backward pass.

    ``config`` is a transformers configuration, ``dtype`` the format of the forward pass. The coefficients were fitted
    to the tensors that autograd saved for Llama and Qwen layers of seven shapes, with a remainder of 2 bytes; experts
    are counted as dense layers of the width that a token uses. Compiled layers compute elementwise results again, and
    keep about .55 of the rest; those with experts, whose graphs differ, are counted as if they were not compiled.
    """
    shape = model_shape(config)
    num_layers, hidden = shape.num_layers, shape.hidden
    match activations:
        case Activations.OFFLOAD:
            return 0
        case Activations.RECOMPUTE | Activations.AUTO:
            return int(num_layers * dtype.itemsize * hidden)
    heads, wide, num_experts = shape.num_heads, shape.width, shape.num_experts_per_token
    head = shape.head_dim
    attention = head * (heads + shape.num_kv_heads)
    has_head_norms = config.get_text_config().model_type in _HEAD_NORMS
    size = dtype.itemsize
    if is_compiled and num_experts is None:
        # Three states of the layer's width; queries, keys, values and the output of attention; gate and up projection.
        kept = size * (3 * hidden + 2 * attention + head * heads + 2 * wide) + 4 * heads + _COMPILED_ROWS
        if has_head_norms:
            kept += size * head * heads
        return int(num_layers * kept)
    kept = (16 if size == 2 else 24) * hidden + 4 * size * wide + 2 * size * attention + 4 * heads  # noqa: PLR2004
    if has_head_norms:
        kept += (8 if size == 4 else 6) * attention  # noqa: PLR2004
    return int(num_layers * kept)


def device_bytes(device: torch.device) -> int:
    """Return the memory of ``device`` in bytes: of the GPU, or of this machine for a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_bytes(device: torch.device) -> int:
    """Return how much of the memory of a GPU is free, with the blocks that torch's allocator holds unused."""
    unreserved, _ = torch.cuda.mem_get_info(device)
    return unreserved + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _temporary_bytes(
    model: Any,
    *,
    dtype: torch.dtype,
    kept: Activations,
    num_tokens: int,
    device_type: str,
    trains_head: bool,
    is_sharded: bool,
    is_compiled: bool,
) -> int:
    """Return the bytes that the backward passes of one layer and of the output head need while they run."""
    size = dtype.itemsize
    shape, layers = model_shape(model.config), list(decoder_layers(model))
    head = model.get_output_embeddings()
    if not layers or head is None:
        raise ModelError(
            f"{type(model).__name__} has no decoder layers with an output head; training it is not supported."
        )
    one_layer, plain = (
        activation_bytes(model.config, dtype=dtype, activations=Activations.KEEP, is_compiled=found) // shape.num_layers
        for found in (is_compiled, False)
    )
    largest = max(sum(weight.numel() for weight in layer.parameters()) for layer in layers)
    copies = (2 * size if size < 4 else 0) * largest  # noqa: PLR2004 - in float32 the weights themselves compute
    # Gradients of what a layer computed are as large as what it kept of it, for the widest half at a time; compiled
    # layers compute again what they did not keep.
    layer = num_tokens * (plain // 2 + plain - one_layer) + copies
    if kept is not Activations.KEEP:
        layer += num_tokens * one_layer
    num_head = head.weight.numel()
    # A pass has at most as many rows of logits as tokens: 532 tokens of a vocabulary of 8192 fill a quarter of a chunk.
    chunk = _NUM_CHUNK_COPIES * min(head_chunk_bytes(device_type), 4 * num_tokens * shape.vocab_size)
    states = 3 * num_tokens * shape.hidden * 4
    # Gradients of the head and of the embeddings before they are added to the others, and the head in ``dtype``.
    matrices = (8 * num_head if trains_head else 0) + (size * num_head if size < 4 else 0)  # noqa: PLR2004
    # Added up, although layer and head compute one after the other: allocators keep what the one has freed. Ranks of a
    # gang allocate and free gathered layers meanwhile; what their allocators keep depends on the size of a layer.
    computing = max(layer, chunk) if is_sharded else layer + chunk
    return int(computing + states + matrices)


# ------------------------------------------------------------------------------------------------------------ plan


@frozen(kw_only=True)
class TrainerPlan:
    """Bytes that one rank of a trainer needs at its peak, the backward pass of its largest pass, on its device.

    ``weights`` include frozen ones, ``reference`` is the second model of a KL penalty, and ``teacher`` the model that a
    distillation phase imitates. ``activations`` are what the forward pass keeps, ``temporaries`` the largest layer and
    the output head while they compute.
    """

    weights: int
    gradients: int
    moments: int
    reference: int
    teacher: int
    activations: int
    temporaries: int
    kept: Activations
    """How activations are kept. ``auto`` is that of a GPU, where they are counted as recomputed: each pass decides."""
    num_kept_layers: int
    """Layers that keep their activations by ``auto``, in memory that is free otherwise and no part of the total."""

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return sum(self.parts().values())

    def parts(self) -> Mapping[str, int]:
        """Return the bytes of each part by its name."""
        return {part.name: getattr(self, part.name) for part in fields(type(self))[:7]}


def sketch_model(config: Any) -> Any:
    """Return the model of a transformers configuration on the ``meta`` device: shapes without numbers."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def plan_trainer(
    model: Any,
    config: TrainerConfig,
    *,
    device_type: str,
    memory_bytes: int,
    num_tokens: int,
    teacher: Any | None = None,
    free: int | None = None,
) -> TrainerPlan:
    """Predict the peak of one of the ``config.gang.num_processes`` ranks that train ``model``.

    ``model`` and ``teacher`` may be on the ``meta`` device, and ``model`` may have its adapter already.
    ``memory_bytes`` is the memory of a device; it decides what ``activations: auto`` means. ``num_tokens`` are those of
    the largest pass. ``free`` bytes are left before the next pass to keep layers in; ``None`` predicts them.
    """
    dtype: torch.dtype = getattr(torch, choose_dtype(str(config.dtype), device_type))
    num_ranks, num_weights = config.gang.num_processes, sum(weight.numel() for weight in model.parameters())
    num_trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    num_frozen = num_weights - num_trained
    if config.lora is not None and not num_frozen:
        # Each of the stacked experts [experts, in, out] has factors of the whole rank.
        shapes = find_adapted(model, config.lora).values()
        num_trained = config.lora.rank * sum(math.prod(shape[:-2]) * sum(shape[-2:]) for shape in shapes)
        num_frozen = num_weights
    needs_reference = config.objective.kl.coefficient > 0 and config.lora is None
    num_taught = 0 if teacher is None else sum(weight.numel() for weight in teacher.parameters())
    held = {
        # Trained weights and their gradients are float32, frozen weights in the format of the passes.
        "weights": 4 * num_trained + dtype.itemsize * num_frozen,
        "gradients": 4 * num_trained,
        "moments": round(num_trained * state_bytes(config.optimizer)),
        "reference": num_weights * dtype.itemsize if needs_reference else 0,
        "teacher": num_taught * dtype.itemsize,
    }
    held = {name: total // num_ranks for name, total in held.items()}
    kept = config.activations
    # Until layers have run compiled, they may turn out not to compile: the next pass counts on what they keep then.
    is_compiled = config.compiles_layers(device_type) and (free is None or has_compiled(model))

    def count(chosen: Activations) -> int:
        return num_tokens * activation_bytes(model.config, dtype=dtype, activations=chosen, is_compiled=is_compiled)

    def count_temporaries(chosen: Activations, *, is_sharded: bool) -> int:
        return _temporary_bytes(
            model,
            dtype=dtype,
            kept=chosen,
            num_tokens=num_tokens,
            device_type=device_type,
            trains_head=config.lora is None,
            is_sharded=is_sharded,
            is_compiled=is_compiled,
        )

    rest = memory_bytes - sum(held.values())
    if kept is Activations.AUTO and device_type != "cuda":
        fits = count(Activations.KEEP) <= _SHARE_OF_ACTIVATIONS * max(rest, 0)
        kept = Activations.KEEP if fits else Activations.RECOMPUTE
    # The last layers are kept: they are freed before the first ones recompute, so their temporaries do not add up. A
    # 1.5B model with passes of 32k tokens used 26 of 79 GiB before, and a quarter of the step for recomputation.
    usable = int(_SHARE_OF_FREE_MEMORY * (rest if free is None else free))
    usable -= count(Activations.RECOMPUTE) + count_temporaries(Activations.KEEP, is_sharded=False)
    layers = list(decoder_layers(model))
    more = (count(Activations.KEEP) - count(Activations.RECOMPUTE)) // len(layers)
    if config.lora is None and num_ranks == 1 and dtype is not torch.float32:
        # Autograd keeps the copies that a layer computed with; gathered weights are freed by the gang.
        more += dtype.itemsize * max(sum(weight.numel() for weight in layer.parameters()) for layer in layers)
    return TrainerPlan(
        **held,
        activations=count(kept),
        temporaries=count_temporaries(kept, is_sharded=num_ranks > 1),
        kept=kept,
        num_kept_layers=min(max(usable, 0) // max(more, 1), len(layers)),
    )


def require_room(model: Any, config: TrainerConfig, *, max_length: int | None) -> None:
    """Raise ``ConfigError`` if a row of ``max_length`` tokens surely needs more memory in training than its device has.

    ``model`` may be on the meta device: its weights are read by a gang later.
    """
    if max_length is None:
        return
    device = model.device
    if device.type == "meta":
        is_gpu = torch.cuda.is_available() and config.gang.backend is not GangBackend.GLOO
        device = torch.device("cuda" if is_gpu else "cpu")
    longest = min(max_length, model_shape(model.config).max_positions or max_length)
    available = device_bytes(device)
    if config.activations is Activations.AUTO:  # which recomputes what is too large to keep
        config = evolve(config, activations=Activations.RECOMPUTE)
    plan_row = partial(plan_trainer, model, config, device_type=device.type, memory_bytes=available)
    plan = plan_row(num_tokens=longest)
    if plan.total > (1 + _MAX_ERROR) * available:
        held = plan.weights + plan.gradients + plan.moments
        # Needs grow with the length, so the longest row that fits is found by bisection.
        fitting = bisect_right(range(longest), available, key=lambda length: plan_row(num_tokens=length).total) - 1
        advice = f"Rows of {fitting:,} tokens fit: lower engine.max_length. " if fitting > 0 else ""
        raise ConfigError(
            f"engine.max_length: training on a row of {longest:,} tokens needs {plan.total / 1e9:,.1f} GB, of which "
            f"weights, gradients and moments take {held / 1e9:,.1f} GB, and {device} has {available / 1e9:,.1f} GB. "
            f"{advice}'areal-actors doctor' says which settings need less."
        )


# ---------------------------------------------------------------------------------------------------------- release


def release_free_memory() -> None:
    """Return free memory from the allocator to the system. Does nothing if the C library is not glibc.

    glibc keeps freed blocks below 32 MiB for reuse; after a step of a language model these add up to gigabytes, which
    the engine and the rest of the machine could use.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
