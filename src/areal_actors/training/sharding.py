"""Sharding of a model over the ranks of a gang by FSDP2, and conversion from and to whole tensors.

Each rank holds a part of every weight, gradient and moment, and gathers the weights of a layer while it computes with
them. Gradients are summed over the ranks, never averaged: the weights of tokens are shares of the whole batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from areal_actors.lib.checkpoint_tensors import LazyTensors
from areal_actors.training.gang import Gang
from areal_actors.training.layers import decoder_layers


def shard(scorer: torch.nn.Module, gang: Gang, *, dtype: torch.dtype) -> None:
    """Shard the weights below ``scorer`` over the ranks, which all call this.

    The weights are those of the first rank. The other ranks have the same modules, whose weights may be on the meta
    device: each receives its part of one weight after the other, and holds at most its parts, one layer and one weight.
    Layers are gathered one at a time, in ``dtype``, and everything else (embeddings, head, norms) with ``scorer``
    itself. Gradients are summed in float32.
    """
    assert gang.device is not None, "a gang of several has devices"
    mesh = init_device_mesh(gang.device.type, (gang.size,))
    # Gathered in ``dtype``, weights are freed after their layer. Copies that autocast made of weights gathered in
    # float32 were not: each rank kept one of the whole model for its backward pass. Inputs are not cast, since a mask
    # would lose the plan that it carries; hidden states have the format of the embeddings.
    # Two ranks with shards of 3 MB kept 3.2 MB of copies each, and keep 0.2 MB now.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    whole = {name: weight.detach() for name, weight in scorer.named_parameters()} if gang.rank == 0 else {}
    for module in (*decoder_layers(scorer), scorer):
        # Weights on the meta device become memory without contents; tied weights stay one.
        allocated: dict[Tensor, torch.nn.Parameter] = {}
        held = [(part._parameters, name) for part in module.modules() for name in part._parameters]  # noqa: SLF001 - without the checks of registration
        for parameters, name in held:
            weight = parameters[name]
            if weight is not None and weight.is_meta:
                if weight not in allocated:
                    empty = torch.empty(weight.shape, dtype=weight.dtype)
                    allocated[weight] = torch.nn.Parameter(empty, requires_grad=weight.requires_grad)
                parameters[name] = allocated[weight]
        sharded: Any = fully_shard(module, mesh=mesh, mp_policy=policy)
        sharded.set_gradient_divide_factor(1.0)
        # gloo has no other way to sum without dividing.
        sharded.set_force_sum_reduction_for_comms(enable=True)
    with torch.no_grad():
        for name, weight in scorer.named_parameters():
            weight.copy_(scatter_from_first(whole.get(name), weight))


def free_gathered(scorer: torch.nn.Module) -> None:
    """Free the weights gathered by a pass without gradient, which would otherwise stay until the next update."""
    if isinstance(scorer, FSDPModule):
        scorer.reshard()


def gather(tensor: Tensor) -> Tensor:
    """Return the whole of a sharded tensor, or the tensor itself if it is not sharded. All ranks have to call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def scatter(whole: Tensor, like: Tensor) -> Tensor:
    """Return this rank's part of ``whole``, laid out like ``like``, a tensor of the same shape.

    All ranks have ``whole``, or each has it sharded already.
    """
    whole = whole.to(like.device)
    if not isinstance(like, DTensor) or isinstance(whole, DTensor):
        return whole
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def scatter_from_first(whole: Tensor | None, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return this rank's part of ``whole``, which the first rank has, laid out like ``like``, a sharded tensor.

    All ranks call this. Its format is ``dtype``, or that of ``like``.
    """
    assert isinstance(like, DTensor)
    if whole is None:
        # Never written: a tensor of this shape is all that the operation needs to know on this rank.
        whole = torch.empty(like.shape, dtype=dtype or like.dtype, device=like.device)
    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=0)


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor, or the tensor itself; it shares memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def first_row(tensor: Tensor) -> int:
    """Return the row of a sharded tensor with which this rank's part begins; 0 for any other tensor."""
    if not isinstance(tensor, DTensor):
        return 0
    assert tensor.placements == (Shard(0),), "weights are sharded by rows"
    protocol: Any = tensor  # of torch.distributed.checkpoint, without types
    (chunk,) = protocol.__create_chunk_list__()
    row: int = chunk.offsets[0]
    return row


@frozen(kw_only=True, eq=False)
class Rows:
    """The rows of a tensor that this rank holds, in ``part``; the first one has the index ``first``.

    ``shape`` is that of the whole tensor. A tensor that is not sharded is whole on each rank.
    """

    part: Tensor
    first: int
    shape: torch.Size
    is_sharded: bool

    @classmethod
    def create(cls, tensor: Tensor, like: Tensor | None = None) -> Rows:
        """Return the rows of ``tensor``, which may be this rank's part of a tensor sharded as ``like``.

        The part stays on its device, which may be another one than that of ``like``.
        """
        like = tensor if like is None or tensor.ndim == 0 else like
        shape = like.shape if isinstance(like, DTensor) else tensor.shape
        return cls(part=local_part(tensor), first=first_row(like), shape=shape, is_sharded=isinstance(like, DTensor))

    @property
    def whole_nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.shape.numel() * self.part.element_size()


def with_local_part(part: Tensor, like: Tensor) -> Tensor:
    """Return the tensor whose part on this rank is ``part``, on the device and sharded as ``like``."""
    part = part.to(like.device)
    if not isinstance(like, DTensor) or isinstance(part, DTensor):
        return part
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


@define(eq=False, kw_only=True)
class GatheredWeights(LazyTensors):
    """Sharded ``tensors`` by name; each is gathered on the CPU when it is read, once and in their order.

    All ranks have to read them. They are cast to ``dtype`` if it is given, before they are gathered: half as many
    bytes are exchanged, and leave the device. ``whole`` tensors are there already.
    """

    tensors: Mapping[str, Tensor]
    dtype: torch.dtype | None
    whole: Mapping[str, Tensor]
    _unread: deque[str] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._unread = deque(self.tensors)

    def __getitem__(self, name: str) -> Tensor:
        if name in self.whole:
            return self.whole[name]
        found = self._gather(name)
        # What is not sharded, such as a buffer, would share memory with the model.
        return found.to("cpu", copy=not isinstance(self.tensors[name], DTensor))

    def skip_rest(self) -> None:
        """Gather what was not read, for the other ranks."""
        while self._unread:
            self._gather(self._unread[0])

    def _gather(self, name: str) -> Tensor:
        assert name == self._unread[0], f"{self._unread[0]} comes before {name} on the other ranks"
        self._unread.popleft()
        part = self.tensors[name].detach()
        return gather(part if self.dtype is None or not part.is_floating_point() else part.to(self.dtype))

    def like(self, name: str) -> Tensor:
        """Return a tensor without numbers."""
        if name in self.whole:
            return self.whole[name]
        tensor = self.tensors[name]
        is_cast = self.dtype is not None and tensor.is_floating_point()
        return torch.empty(tensor.shape, dtype=self.dtype if is_cast else tensor.dtype, device="meta")

    def __contains__(self, name: object) -> bool:
        return name in self.tensors or name in self.whole

    def __iter__(self) -> Iterator[str]:
        yield from self.tensors
        yield from self.whole

    def __len__(self) -> int:
        return len(self.tensors) + len(self.whole)
