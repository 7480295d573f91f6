"""Arrays of tokens are read-only, and conversion to them leaves those of the caller as they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from areal_actors.domain import as_ints
from areal_actors.domain.sampling import as_floats


class _Holder:
    """Returns its own array, as containers of other libraries do."""

    def __init__(self, held: np.ndarray[Any, Any]) -> None:
        self.held = held

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:  # noqa: FBT001 - numpy's
        return self.held if dtype in (None, self.held.dtype) else self.held.astype(dtype)


@pytest.mark.parametrize("wrap", [lambda array: array, lambda array: array[:], list, tuple, _Holder, memoryview])
@pytest.mark.parametrize(
    ("convert", "kind"), [(as_ints, np.int32), (as_ints, np.int64), (as_floats, np.float32), (as_floats, np.float64)]
)
def test_converted_array_is_read_only_and_the_callers_is_not(wrap: Any, convert: Any, kind: Any) -> None:
    """Whatever holds the numbers; converting again costs no copy."""
    held = np.arange(5, dtype=kind)
    found = convert(wrap(held))

    assert [0, 1, 2, 3, 4] == found.tolist()
    assert not found.flags.writeable
    assert held.flags.writeable
    assert convert(found) is found
