"""Copies of numpy arrays on devices."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Return ``array`` as a tensor on ``device``; on the CPU it shares the array's memory.

    A GPU copies it when it gets there, while the caller goes on. From memory that is not pinned, the caller would wait
    until the device has done all that it was asked for before.
    """
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
