"""Read-only token arrays. A tuple of Python integers would take nine times the memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import cmp_using

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]

_INT32, _FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)

array_equality = cmp_using(eq=np.array_equal, class_name="array")
"""Value for ``field(eq=...)`` of an array."""


def as_ints(values: Any) -> Ints:
    """Return ``values`` as a read-only int32 array, copied only if necessary."""
    return values if _is_settled(values, _INT32) else _read_only(np.asarray(values, dtype=np.int32))


def as_floats(values: Any) -> Floats:
    """Return ``values`` as a read-only float32 array, copied only if necessary."""
    return values if _is_settled(values, _FLOAT32) else _read_only(np.asarray(values, dtype=np.float32))


def _is_settled(values: Any, dtype: np.dtype[Any]) -> bool:
    """Return whether ``values`` need no conversion: arrays pass from value to value and are converted once."""
    return type(values) is np.ndarray and values.dtype is dtype and values.ndim == 1 and not values.flags.writeable


def _read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if array.ndim == 1 and not array.flags.writeable:
        return array  # a view of a read-only array would keep a chain of views alive in every evolved copy
    view = array.reshape(-1).view()
    view.flags.writeable = False
    return view
