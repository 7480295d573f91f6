"""Memory of the trainer: what weights, moments and activations take, predicted from a configuration alone.

Nothing is loaded: a model may be on torch's ``meta`` device, which has shapes and no numbers. ``doctor`` reports the
prediction, and the trainer decides by the same counts what passes keep for the backward pass: on a GPU ``auto`` keeps
the activations of as many layers as the memory that is free before a pass has room for, and recomputes the others. The
benchmark ``planning`` compares predictions with measured peaks.
"""

from __future__ import annotations

import ctypes
import math
import os
from bisect import bisect_right
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from attrs import fields, frozen
from torch.distributed.tensor import DTensor

from areal_actors.errors import ConfigError, ModelError
from areal_actors.lib.precision import choose_dtype
from areal_actors.models import model_shape
from areal_actors.training.config import Activations, GangBackend, OptimizerConfig, TrainerConfig
from areal_actors.training.forward import head_chunk_bytes
from areal_actors.training.layers import decoder_layers
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
        case Activations.RECOMPUTE:
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


def temporary_bytes(
    model: Any,
    *,
    dtype: torch.dtype,
    kept: Activations,
    num_tokens: int,
    device_type: str,
    trains_head: bool,
    is_sharded: bool = False,
    is_compiled: bool = False,
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


# ------------------------------------------------------------------------------------------------------ activations


def held_bytes(*, num_trained: int, num_frozen: int, dtype: torch.dtype, optimizer: OptimizerConfig) -> dict[str, int]:
    """Return the bytes of weights, gradients and moments: what training holds between two steps and during one.

    Trained weights and their gradients are float32, frozen weights in ``dtype``.
    """
    return {
        "weights": 4 * num_trained + dtype.itemsize * num_frozen,
        "gradients": 4 * num_trained,
        "moments": round(num_trained * state_bytes(optimizer)),
    }


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
    kept, recomputed = (
        num_tokens
        * activation_bytes(model.config, dtype=dtype, activations=chosen, is_compiled=is_compiled)
        // len(layers)
        for chosen in (Activations.KEEP, Activations.RECOMPUTE)
    )
    weights = [[weight for weight in layer.parameters() if weight.dtype is not dtype] for layer in layers]
    # Autograd keeps the copies that a layer computed with; gathered weights are freed by the gang.
    copies = 0 if is_sharded else max(dtype.itemsize * sum(weight.numel() for weight in layer) for layer in weights)
    # The last layers are kept: they are freed before the first ones recompute, so their temporaries do not add up. A
    # 1.5B model with passes of 32k tokens used 26 of 79 GiB before, and a quarter of the step for recomputation.
    temporaries = temporary_bytes(
        model,
        dtype=dtype,
        kept=Activations.KEEP,
        num_tokens=num_tokens,
        device_type=model.device.type,
        trains_head=model.get_output_embeddings().weight.requires_grad,
        is_compiled=is_compiled,
    )
    free = _SHARE_OF_ACTIVATIONS * device_bytes(model.device)
    if model.device.type == "cuda":
        unreserved, _ = torch.cuda.mem_get_info(model.device)
        # The allocator also holds blocks that nothing uses.
        free = unreserved + torch.cuda.memory_reserved(model.device) - torch.cuda.memory_allocated(model.device)
    # The gradients of a layer take the place of its activations, unless they are larger.
    of_layers = sum(_missing_bytes(layer) for layer in layers)
    others = _missing_bytes(model) - of_layers
    reserve = temporaries + others + (of_layers if of_layers > kept * len(layers) else 0)
    return num_kept_layers(
        num_layers=len(layers),
        kept_bytes=kept + copies,
        recomputed_bytes=recomputed,
        free_bytes=int(_SHARE_OF_FREE_MEMORY * free) - reserve,
    )


def _missing_bytes(module: torch.nn.Module) -> int:
    """Return the bytes, on this rank, of the gradients that a backward pass will create below ``module``."""
    missing = [weight for weight in module.parameters() if weight.requires_grad and weight.grad is None]
    return sum((weight.to_local() if isinstance(weight, DTensor) else weight).nbytes for weight in missing)


def require_room(model: Any, config: TrainerConfig, *, dtype: torch.dtype, max_length: int | None) -> None:
    """Raise ``ConfigError`` if a row of ``max_length`` tokens surely needs more memory in training than its device has.

    ``model`` has its adapter, if it trains one, and may be on the meta device, as on ranks that get weights later.
    """
    if max_length is None:
        return
    device = model.device
    if device.type == "meta":
        is_gpu = torch.cuda.is_available() and config.gang.backend is not GangBackend.GLOO
        device = torch.device("cuda" if is_gpu else "cpu")
    sizes = {True: 0, False: 0}
    for weight in model.parameters():
        sizes[weight.requires_grad] += weight.numel()
    parts = held_bytes(num_trained=sizes[True], num_frozen=sizes[False], dtype=dtype, optimizer=config.optimizer)
    held = sum(parts.values()) // config.gang.num_processes
    kept = Activations.RECOMPUTE if config.activations is Activations.AUTO else config.activations

    def count(num_tokens: int) -> int:
        chunk = min(num_tokens, config.chunk_tokens or num_tokens)
        temporaries = temporary_bytes(
            model, dtype=dtype, kept=kept, num_tokens=chunk, device_type=device.type, trains_head=config.lora is None
        )
        return held + chunk * activation_bytes(model.config, dtype=dtype, activations=kept) + temporaries

    longest = min(max_length, model_shape(model.config).max_positions or max_length)
    needed, available = count(longest), device_bytes(device)
    if needed <= (1 + _MAX_ERROR) * available:
        return
    # Needs grow with the length, so the longest row that fits is found by bisection.
    fitting = bisect_right(range(longest), available, key=count) - 1
    advice = "'areal-actors doctor' says which settings need less."
    if fitting > 0:
        advice = f"Rows of {fitting:,} tokens fit: lower engine.max_length, or set trainer.chunk_tokens."
    raise ConfigError(
        f"engine.max_length: training on a row of {longest:,} tokens needs {needed / 1e9:,.1f} GB, of which weights, "
        f"gradients and moments take {held / 1e9:,.1f} GB, and {device} has {available / 1e9:,.1f} GB. {advice}"
    )


# ---------------------------------------------------------------------------------------------------------- release


def release_free_memory() -> None:
    """Return free memory from the allocator to the system. Does nothing if the C library is not glibc.

    glibc keeps freed blocks below 32 MiB for reuse; after a step of a language model these add up to gigabytes, which
    the engine and the rest of the machine could use.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


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
    """How activations are kept; ``auto`` is resolved."""
    num_tokens: int
    """Tokens of the largest pass whose activations are kept at a time."""
    num_kept_layers: int = 0
    """Layers that ``auto`` lets keep activations although the others recompute, in memory that is free otherwise."""
    kept_layer_bytes: int = 0
    """The bytes that those layers keep. They are not needed, and not part of the total."""

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
    max_length: int,
    teacher: Any | None = None,
    other_bytes: int = 0,
) -> TrainerPlan:
    """Predict the peak of one of the ``config.gang.num_processes`` ranks that train ``model``.

    ``model`` and ``teacher`` may be on the ``meta`` device. ``memory_bytes`` is the memory of a device, of which others
    take ``other_bytes``; it decides what ``activations: auto`` means. ``max_length`` is the longest row in tokens.
    """
    dtype: torch.dtype = getattr(torch, choose_dtype(str(config.dtype), device_type))
    num_ranks = config.gang.num_processes
    num_weights = sum(weight.numel() for weight in model.parameters())
    num_trained = num_weights
    if config.lora is not None:
        # Each of the stacked experts [experts, in, out] has factors of the whole rank.
        shapes = find_adapted(model, config.lora).values()
        num_trained = config.lora.rank * sum(math.prod(shape[:-2]) * sum(shape[-2:]) for shape in shapes)
    num_frozen = 0 if config.lora is None else num_weights
    held = held_bytes(num_trained=num_trained, num_frozen=num_frozen, dtype=dtype, optimizer=config.optimizer)
    needs_reference = config.objective.kl.coefficient > 0 and config.lora is None
    held["reference"] = num_weights * dtype.itemsize if needs_reference else 0
    held["teacher"] = 0 if teacher is None else dtype.itemsize * sum(weight.numel() for weight in teacher.parameters())
    held = {name: total // num_ranks for name, total in held.items()}
    longest = max(config.max_packed_tokens, max_length)
    num_tokens = min(longest, config.chunk_tokens or longest)
    kept = resolve_activations(
        config.activations,
        model.config,
        dtype=dtype,
        num_tokens=num_tokens,
        state_bytes=sum(held.values()),
        memory_bytes=memory_bytes,
    )
    is_compiled = config.compiles_layers(device_type)
    kept_bytes, recomputed_bytes = (
        num_tokens * activation_bytes(model.config, dtype=dtype, activations=chosen, is_compiled=is_compiled)
        for chosen in (Activations.KEEP, Activations.RECOMPUTE)
    )
    num_layers, num_kept = max(1, len(list(decoder_layers(model)))), 0
    if config.activations is Activations.AUTO and kept is Activations.RECOMPUTE and device_type == "cuda":
        temporaries = temporary_bytes(
            model,
            dtype=dtype,
            kept=Activations.KEEP,
            num_tokens=num_tokens,
            device_type=device_type,
            trains_head=config.lora is None,
            is_compiled=is_compiled,
        )
        free = _SHARE_OF_FREE_MEMORY * (memory_bytes - other_bytes - sum(held.values()))
        num_kept = num_kept_layers(
            num_layers=num_layers,
            kept_bytes=kept_bytes // num_layers,
            recomputed_bytes=recomputed_bytes // num_layers,
            free_bytes=int(free) - temporaries,
        )
    return TrainerPlan(
        **held,
        activations=num_tokens * activation_bytes(model.config, dtype=dtype, activations=kept, is_compiled=is_compiled),
        num_kept_layers=num_kept,
        kept_layer_bytes=num_kept * (kept_bytes - recomputed_bytes) // num_layers,
        temporaries=temporary_bytes(
            model,
            dtype=dtype,
            kept=kept,
            num_tokens=num_tokens,
            device_type=device_type,
            trains_head=config.lora is None,
            is_sharded=num_ranks > 1,
            is_compiled=is_compiled,
        ),
        kept=kept,
        num_tokens=num_tokens,
    )
