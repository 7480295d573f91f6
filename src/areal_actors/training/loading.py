"""Weights that stay in their files until they are needed: no rank of a gang holds the whole model.

The model of a rank is created on torch's ``meta`` device, with shapes and without numbers. ``attach_source`` notes
where its weights are: in the files of a model, or in a checkpoint. Until the ranks are together, the first one reads
what it needs and drops it again: each weight once for the first publication (``UnreadWeights``), and one layer after
the other for a forward pass (``streamed``). When the model is sharded, each rank reads its own rows (``read_shards``).

Ranks may be on machines with different files, so they compare digests of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from attrs import define, field, frozen
from torch import Tensor
from torch.distributed.tensor import DTensor

from areal_actors.lib.checkpoint_tensors import LazyTensors
from areal_actors.training.layers import decoder_layers
from areal_actors.training.lora import WEIGHT_SOURCE, plain_name
from areal_actors.training.sharding import first_row, gather, local_part
from areal_actors.training.weights import tied_names


class WeightSource(Protocol):
    """Tensors in files, by their names in the state dict of a model without an adapter."""

    def shape(self, name: str) -> torch.Size:
        """Return the shape of a tensor."""
        ...

    def rows(self, name: str, first: int, stop: int) -> Tensor:
        """Return the rows of a tensor from ``first`` to before ``stop``, on the CPU."""
        ...

    def digest(self) -> str:
        """Return a hash by which ranks find out whether they read the same files."""
        ...


def attach_source(model: Any, source: WeightSource | None) -> None:
    """Note that the weights of ``model``, which is on the meta device, are in ``source``; ``None`` after reading."""
    setattr(model, WEIGHT_SOURCE, source)


def source_of(model: Any) -> WeightSource | None:
    """Return where the weights of ``model`` are to be read; ``None`` if it has them, or gets them from another rank."""
    source: WeightSource | None = getattr(model, WEIGHT_SOURCE, None)
    return source


@frozen(eq=False)
class UnreadWeights(LazyTensors):
    """The weights of ``model`` by name, tied ones once; all but the factors of an adapter are read from ``source``.

    Buffers of a model on the meta device have numbers, but not those of the files.
    """

    model: Any
    source: WeightSource
    tensors: Mapping[str, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        own = self.tensors[name]
        if not is_stored(name):
            return own
        whole = self.source.rows(plain_name(name), 0, own.shape[0] if own.ndim else 1)
        return whole.to(own.dtype)

    def like(self, name: str) -> Tensor:
        """Return the tensor of the model, which may have no numbers."""
        return self.tensors[name]

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def unread_weights(model: Any) -> UnreadWeights:
    """Return the weights of ``model``, which has a source."""
    source, names = source_of(model), tied_names(model)
    assert source is not None, "its weights are in files"
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items() if names[name] == name}
    return UnreadWeights(model, source, tensors)


def is_stored(name: str) -> bool:
    """Return whether the weight of this name is in the files of a model, rather than a factor of an adapter."""
    return ".lora_" not in name


@torch.no_grad()
def read_shards(model: Any, source: WeightSource) -> None:
    """Read this rank's rows of the weights of ``model``, which is sharded; an adapter stays as it is.

    One tensor at a time is in memory, and only while it is converted. Raises the errors of ``source``.
    """
    names = tied_names(model)
    for name, tensor in model.state_dict().items():
        if names[name] == name and is_stored(name):
            part, first = local_part(tensor), first_row(tensor)
            num_rows = len(part) if part.ndim else 1
            part.copy_(source.rows(plain_name(name), first, first + num_rows))


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


# ------------------------------------------------------------------------------------------------ before the gang


@contextmanager
def streamed(model: Any) -> Iterator[None]:
    """Let ``model`` compute without gradients during the block, if its weights are in files.

    Each decoder layer has its weights while it runs, and everything else (embeddings, head, norms) during the block.
    """
    if source_of(model) is None:
        yield
        return
    weights, first = unread_weights(model), tied_names(model)
    names = {weight: first[name] for name, weight in model.named_parameters(remove_duplicate=False)}
    layers = list(decoder_layers(model))
    inner = {part for layer in layers for part in layer.modules()}
    with ExitStack() as stack:
        stack.enter_context(_filled([part for part in model.modules() if part not in inner], weights, names))
        for layer in layers:
            filled = stack.enter_context(ExitStack())

            def fill(layer: torch.nn.Module, _: object, filled: ExitStack = filled) -> None:
                filled.enter_context(_filled(list(layer.modules()), weights, names))

            def empty(*_: object, filled: ExitStack = filled) -> None:
                filled.close()

            stack.callback(layer.register_forward_pre_hook(fill).remove)
            stack.callback(layer.register_forward_hook(empty).remove)
        yield


@contextmanager
def _filled(
    modules: Sequence[torch.nn.Module], weights: Mapping[str, Tensor], names: Mapping[Tensor, str]
) -> Iterator[None]:
    """Give the parameters of ``modules`` that are on the meta device their numbers during the block."""
    held = [(part._parameters, name) for part in modules for name in part._parameters]  # noqa: SLF001 - without the checks of registration
    empty = [(parameters, name, parameters[name]) for parameters, name in held]
    read: dict[str, torch.nn.Parameter] = {}
    for parameters, name, weight in empty:
        if weight is not None and weight.is_meta:
            own = names[weight]
            if own not in read:
                read[own] = torch.nn.Parameter(weights[own], requires_grad=False)
            parameters[name] = read[own]
    try:
        yield
    finally:
        for parameters, name, weight in empty:
            parameters[name] = weight


@contextmanager
def first_layers(model: Any) -> Iterator[None]:
    """Leave ``model`` only its first layers during the block: as many as have one of each kind, and two at least.

    Layers are of one kind if they have the same weights and the same type of attention.
    """
    layers = list(decoder_layers(model))
    text = model.config.get_text_config()
    types = list(getattr(text, "layer_types", None) or [None] * len(layers))
    first: dict[Any, int] = {}
    for index, (layer, kind) in enumerate(zip(layers, types, strict=False)):
        shapes = tuple((name, weight.shape) for name, weight in layer.named_parameters())
        first.setdefault((kind, shapes), index)
    number = max(2, 1 + max(first.values(), default=0))
    lists = [part for part in model.modules() if isinstance(part, torch.nn.ModuleList) and list(part) == layers]
    if not lists or number >= len(layers):
        yield
        return
    modules = lists[0]._modules  # noqa: SLF001 - the list itself is what the model iterates over
    whole = dict(modules)
    settings = {"num_hidden_layers": number} | ({"layer_types": types[:number]} if any(types) else {})
    before = {name: getattr(text, name) for name in settings}
    try:
        for name in list(whole)[number:]:
            del modules[name]
        for name, value in settings.items():
            setattr(text, name, value)
        yield
    finally:
        modules.clear()
        modules.update(whole)
        for name, value in before.items():
            setattr(text, name, value)
