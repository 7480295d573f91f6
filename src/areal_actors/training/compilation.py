"""Compilation of decoder layers by ``torch.compile``: fewer and larger kernels, and the same results up to rounding.

A layer of a transformers model runs some seventy kernels forward, most of them elementwise: norms in float32, rotary
embeddings, the gate of the feed-forward part. On a GPU they cost as much memory traffic and launch time as the matrix
products. Attention by plan is left out of the compiled graphs: FlexAttention is compiled by itself, and the plans are
Python objects.

All layers of a class share the compiled code, and lengths are dynamic: a run compiles each class of layers once with
and once without gradients.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from areal_actors.training.tree_attention import BLOCK_ATTENTION, SEGMENT_ATTENTION

__all__ = ["compiled_forward"]

logger = logging.getLogger(__name__)

_failed: set[tuple[type, str]] = set()


def compiled_forward(layer: torch.nn.Module, *, backend: str = "inductor") -> Callable[..., Any]:
    """Return the compiled ``forward`` of ``layer``; the plain one if its class was found not to compile.

    ``backend`` is that of ``torch.compile``. A failure to compile is logged, once for each class. Errors of the
    computation are raised as they are.
    """
    kind: Any = next(base for base in type(layer).__mro__ if "forward" in vars(base))
    return partial(_forward, kind, backend, layer)


def _forward(kind: Any, backend: str, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    if (kind, backend) in _failed:
        return kind.forward(layer, *args, **kwargs)
    # Imported here, because it takes a second that runs without compilation need not wait.
    from torch._dynamo.exc import TorchDynamoException

    try:
        return _compile(kind, backend)(layer, *args, **kwargs)
    except TorchDynamoException as error:
        _failed.add((kind, backend))
        reason = str(error).strip().splitlines()[0]
        logger.warning("layers of class %s cannot be compiled and run as they are: %s", kind.__name__, reason)
    return kind.forward(layer, *args, **kwargs)


@cache
def _compile(kind: Any, backend: str) -> Callable[..., Any]:
    _exclude_planned_attention()
    return torch.compile(kind.forward, dynamic=True, backend=backend)


@cache
def _exclude_planned_attention() -> None:
    for name in (SEGMENT_ATTENTION, BLOCK_ATTENTION):
        disable: Callable[[Any], Any] = torch.compiler.disable
        AttentionInterface.register(name, disable(ALL_ATTENTION_FUNCTIONS[name]))
