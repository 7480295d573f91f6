"""Bytes of the tensors that a process holds: counted on the CPU, where torch's allocator counts nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """While it is entered, notes the storages of all results; ``now`` and ``peak`` are of those that exist."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, StorageWeakRef] = {}
        self._num_before_count = 0
        self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                if value.device.type == "meta":
                    continue
                storage = (value._local_tensor if isinstance(value, DTensor) else value).untyped_storage()
                self._storages[storage._cdata] = StorageWeakRef(storage)
        self.peak = max(self.peak, self.now())
        return result

    def now(self) -> int:
        """Bytes of what was made since ``enter`` and is still there; a freed weight has a storage of 0 bytes."""
        live = {}
        total = 0
        for key, weak in self._storages.items():
            storage = None if weak.expired() else torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
            if storage is not None:
                live[key] = weak
                total += storage.nbytes()
        self._storages = live
        return total


def bytes_of(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of what this process holds of some tensors."""
    local: Callable[[torch.Tensor], torch.Tensor] = lambda t: t._local_tensor if isinstance(t, DTensor) else t  # noqa: E731
    return sum(local(tensor).nbytes for tensor in tensors)
