"""Models whose weights are spread over the ranks of a gang, by FSDP2, and their tensors whole.

Each rank keeps a part of every weight, gradient and moment, and gathers the weights of a layer while it computes with
them. Gradients are added up over the ranks, never averaged: the weights of tokens are shares of the whole batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from areal_actors.training.gang import Gang

__all__ = ["free_gathered", "gather", "scatter", "shard"]


def shard(scorer: torch.nn.Module, gang: Gang) -> None:
    """Spread the weights below ``scorer`` over the ranks, which hold the same ones and all do this.

    Layers are gathered one at a time, and everything else (embeddings, head, norms) with ``scorer`` itself.
    """
    assert gang.device is not None, "a gang of several has devices"
    mesh = init_device_mesh(gang.device.type, (gang.size,))
    for module in (*_layers(scorer), scorer):
        sharded: Any = fully_shard(module, mesh=mesh)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(enable=True)  # gloo knows no other way not to divide


def free_gathered(scorer: torch.nn.Module) -> None:
    """After a pass without gradient: forget what it gathered, which the next update would leave behind."""
    if isinstance(scorer, FSDPModule):
        scorer.reshard()


def gather(tensor: Tensor) -> Tensor:
    """The whole of a tensor, which all ranks have to ask for; the tensor itself where it is whole."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def scatter(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's part of ``whole``, which all ranks have, laid out ``like`` another tensor of its shape."""
    whole = whole.to(like.device)
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def _layers(scorer: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """What transformers says must not be split: a decoder's layers."""
    names = {name for module in scorer.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    yield from [module for module in scorer.modules() if type(module).__name__ in names]
