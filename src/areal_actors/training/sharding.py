"""Sharding of a model over the ranks of a gang by FSDP2, and conversion from and to whole tensors.

Each rank holds a part of every weight, gradient and moment, and gathers the weights of a layer while it computes with
them. Gradients are summed over the ranks, never averaged: the weights of tokens are shares of the whole batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from areal_actors.training.gang import Gang
from areal_actors.training.memory import decoder_layers

__all__ = ["free_gathered", "gather", "local_part", "scatter", "shard", "with_local_part"]


def shard(scorer: torch.nn.Module, gang: Gang, *, dtype: torch.dtype) -> None:
    """Shard the weights below ``scorer`` over the ranks; all ranks hold the same weights and all call this.

    Layers are gathered one at a time, in ``dtype``, and everything else (embeddings, head, norms) with ``scorer``
    itself. Gradients are summed over the ranks in float32.
    """
    assert gang.device is not None, "a gang of several has devices"
    mesh = init_device_mesh(gang.device.type, (gang.size,))
    # Gathered in ``dtype``, weights are freed after their layer. Copies that autocast made of weights gathered in
    # float32 were not: each rank kept one of the whole model for its backward pass. Inputs are not cast, since a mask
    # would lose the plan that it carries; hidden states have the format of the embeddings.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in (*decoder_layers(scorer), scorer):
        sharded: Any = fully_shard(module, mesh=mesh, mp_policy=policy)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(enable=True)  # gloo has no other way to sum without dividing


def free_gathered(scorer: torch.nn.Module) -> None:
    """Free the weights gathered by a pass without gradient, which would otherwise stay until the next update."""
    if isinstance(scorer, FSDPModule):
        scorer.reshard()


def gather(tensor: Tensor) -> Tensor:
    """Return the whole of a sharded tensor, or the tensor itself if it is not sharded. All ranks have to call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def scatter(whole: Tensor, like: Tensor) -> Tensor:
    """Return this rank's part of ``whole``, laid out like ``like``, a tensor of the same shape.

    All ranks have ``whole``.
    """
    whole = whole.to(like.device)
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor, or the tensor itself; it shares memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def with_local_part(part: Tensor, like: Tensor) -> Tensor:
    """Return the tensor whose part on this rank is ``part``, on the device and sharded as ``like``."""
    part = part.to(like.device)
    if not isinstance(like, DTensor) or isinstance(part, DTensor):
        return part
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
