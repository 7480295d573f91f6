"""The attention mask of packed rows, as a dense matrix."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from areal_actors.training.packing import Segment


def visible(segments: Sequence[Segment]) -> npt.NDArray[np.bool_]:
    """Return the attention mask, bool [L, L], of segments that cover L positions: whether query i attends to key j."""
    length = max(segment.stop for segment in segments)
    result = np.zeros((length, length), dtype=bool)
    for segment in segments:
        own = slice(segment.start, segment.stop)
        result[own, segment.ancestors] = True
        result[own, own] = np.tri(segment.stop - segment.start, dtype=bool)
    return result
