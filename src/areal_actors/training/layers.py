"""How decoder layers run: what they keep for the backward pass, in which number format, and compiled or not.

A backward pass needs what the forward pass computed. Kept as it is, that is 225 kB per token and layer at the shape of
a 7B model, or 26 GB for a pass of 4096 tokens. ``layer_memory`` makes each decoder layer keep its input alone (7 kB)
and compute the rest again in the backward pass, which repeats the forward pass of the layers, a third more work. What
is computed is the same in both cases, bit for bit.

Weights are float32 where the optimiser changes them, since an update is often smaller than the last digit of a bfloat16
weight. A layer casts them when it runs, and the copies are freed after it. The alternatives: autocast casts as often
and keeps residuals in float32, at twice the bytes kept and moved; a second copy of all weights in bfloat16 costs 2
bytes for each and saves the casts, about 5 % of the time of a pass of 4096 tokens on an H100 (6 bytes moved for each).

A layer of a transformers model runs some seventy kernels forward, most of them elementwise: norms in float32, rotary
embeddings, the gate of the feed-forward part. On a GPU they cost as much memory traffic and launch time as the matrix
products, so ``torch.compile`` makes fewer and larger kernels of them, with the same results up to rounding. Attention
by plan is left out of the compiled graphs: FlexAttention is compiled by itself, and the plans are Python objects. All
layers of a class share the compiled code, and lengths are dynamic: a run compiles each class of layers once with and
once without gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface, PreTrainedModel

from areal_actors.errors import ModelError
from areal_actors.lib.telemetry import get_logger
from areal_actors.training.config import Activations
from areal_actors.training.tree_attention import BLOCK_ATTENTION, SEGMENT_ATTENTION

_log = get_logger(__name__)

_MEMORY_BUDGET = 0.8
"""The share of what a compiled layer would keep that it may keep; it computes the cheapest of the rest again.

Elementwise results are the cheapest, above all the product of the gate, which torch keeps by default because a matrix
product reads it in the backward pass. 57 kB per token instead of 75 at the shape of Qwen2 1.5B; below .7, a matrix
product would be computed again.
"""
_compiles: dict[tuple[type, str], bool] = {}
"""Whether a class of layers has run with gradients as the backend compiled it, or was found not to compile."""


def decoder_of(model: Any) -> Any:
    """Return the part of a causal language model below its output head.

    Raises ``ModelError`` if there is none. ``get_decoder`` of transformers guesses by names, and returns the whole
    model for Llama 4, and a part of the head for ModernBERT.
    """
    for part in (model.get_decoder(), model.base_model, getattr(model, "model", None)):
        if isinstance(part, PreTrainedModel) and part is not model and part.get_output_embeddings() is None:
            return part
    raise ModelError(f"{type(model).__name__} has no decoder below its output head; training it is not supported.")


def decoder_layers(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the decoder layers below ``module``: the outermost modules that transformers says must not be split."""
    names = {name for part in module.modules() for name in getattr(part, "_no_split_modules", None) or ()}
    inside: set[torch.nn.Module] = set()
    for part in list(module.modules()):
        # Of all bases, since ``fully_shard`` puts a class in front of the layer's own. Mamba names the mixers of its
        # layers, too: a recomputed layer must not recompute a part of itself.
        if part not in inside and names & {base.__name__ for base in type(part).__mro__}:
            inside.update(part.modules())
            yield part


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
    memory for what they recompute.

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
            if is_compiled:
                compute = partial(_with_gradient, compute)
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


def _with_gradient(compute: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
    # The first layer behind frozen embeddings would be compiled by itself, because its input needs no gradient.
    if torch.is_grad_enabled() and not hidden.requires_grad:
        hidden = hidden.detach().requires_grad_()
    return compute(hidden, *args, **kwargs)


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


def compiled_forward(layer: torch.nn.Module, *, backend: str = "inductor") -> Callable[..., Any]:
    """Return the compiled ``forward`` of ``layer``; the plain one if its class was found not to compile.

    ``backend`` is that of ``torch.compile``. A failure to compile is logged, once for each class. Errors of the
    computation are raised as they are.
    """
    return partial(_forward, _class_of(layer), backend, layer)


def has_compiled(module: torch.nn.Module, *, backend: str = "inductor") -> bool:
    """Return whether the decoder layers below ``module`` have run compiled, so that they keep what compiled ones do.

    That is known after a pass with gradients: a class that does not compile runs as it is, and keeps twice as much.
    """
    return all(_compiles.get((_class_of(layer), backend), False) for layer in decoder_layers(module))


def _class_of(layer: torch.nn.Module) -> Any:
    """Return the class that has the ``forward`` of ``layer``."""
    return next(base for base in type(layer).__mro__ if "forward" in vars(base))


def _forward(kind: Any, backend: str, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    if not _compiles.get((kind, backend), True):
        return kind.forward(layer, *args, **kwargs)
    # Imported here, because it takes a second that runs without compilation need not wait.
    from torch._dynamo.exc import TorchDynamoException

    try:
        found = _compile(kind, backend)(layer, *args, **kwargs)
    except TorchDynamoException as error:
        _compiles[kind, backend] = False
        lines = str(error).strip().splitlines()
        reason = lines[1] if lines[0].endswith("raised:") and len(lines) > 1 else lines[0]
        _log.warning("layers_not_compiled", layers=kind.__name__, reason=reason)  # they run as they are
        return kind.forward(layer, *args, **kwargs)
    if torch.is_grad_enabled():
        _compiles[kind, backend] = True
    return found


# One step of a 1.5B model on an H100 (8k tokens) had 7,600 launches and 364 ms of kernels, 150 ms of them elementwise.
@cache
def _compile(kind: Any, backend: str) -> Callable[..., Any]:
    _exclude_planned_attention()
    compiler: Any = torch._dynamo.lookup_backend(backend)  # noqa: SLF001 - torch documents it under this name
    return torch.compile(kind.forward, dynamic=True, backend=partial(_compile_in_budget, compiler))


def _compile_in_budget(compiler: Callable[..., Any], graph: Any, inputs: Any) -> Any:
    # Not around the calls of the layer: attention, which is compiled inside of them, would compute itself twice.
    with functorch_config.patch(activation_memory_budget=_MEMORY_BUDGET):
        return compiler(graph, inputs)


@cache
def _exclude_planned_attention() -> None:
    for name in (SEGMENT_ATTENTION, BLOCK_ATTENTION):
        disable: Callable[[Any], Any] = torch.compiler.disable
        AttentionInterface.register(name, disable(ALL_ATTENTION_FUNCTIONS[name]))
