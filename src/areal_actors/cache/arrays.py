"""Training rows as padded arrays, and as tensors in the last step.

==================  =========  ========  ============================  =======
name                dtype      shape     off the row's own tokens      padding
==================  =========  ========  ============================  =======
``input_ids``       int32      [B, T]                                  0
``attention_mask``  bool       [B, T]                                  False
``loss_mask``       int32      [B, T]    0 where not trained           0
``logprobs``        float32    [B, T]    0 where not trained           0
``versions``        int32      [B, T]    -1 where not sampled          -1
``returns``         float32    [B, T]    0 where not sampled           0
``rewards``         float32    [B]       return of the last turn
``predecessors``    int32      [B, T]                                  -1
``position_ids``    int32      [B, T]                                  0
``temperatures``    float32    [B, T]    -1 where not sampled          -1
``top_ps``          float32    [B, T]    1 where not cut off           1
``top_ks``          int32      [B, T]    0 where not cut off           0
``min_ps``          float32    [B, T]    0 where not cut off           0
==================  =========  ========  ============================  =======

``predecessors`` and ``position_ids`` are present if a row is a tree: the former are indices into the row (see
``domain.predecessors``) and determine what a token may attend to. ``temperatures`` are present if a row knows its
sampling temperature: -1 in turns of unknown temperature, 0 in greedy ones. The last three are present if sampling was
truncated and the log-probabilities are those after truncation. Rows are padded on the right to the longest of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from areal_actors.domain import Trajectory

if TYPE_CHECKING:
    import torch

__all__ = ["to_arrays", "to_tensors"]

_PADDED: tuple[tuple[str, type[np.generic], int], ...] = (
    ("input_ids", np.int32, 0),
    ("loss_mask", np.int32, 0),
    ("logprobs", np.float32, 0),
    ("versions", np.int32, -1),
    ("returns", np.float32, 0),
)


def to_arrays(trajectories: Sequence[Trajectory]) -> dict[str, npt.NDArray[Any]]:
    """Return the rows as padded arrays, named and typed as in the table above. No rows give arrays with B = T = 0."""
    shape = (len(trajectories), max((row.num_tokens for row in trajectories), default=0))
    lengths = np.array([row.num_tokens for row in trajectories], np.int64)
    arrays: dict[str, npt.NDArray[Any]] = {name: np.full(shape, pad, dtype) for name, dtype, pad in _PADDED}
    for position, row in enumerate(trajectories):
        for name in ("input_ids", "loss_mask", "logprobs", "versions", "returns"):
            arrays[name][position, : row.num_tokens] = getattr(row, name)
    arrays["attention_mask"] = np.arange(shape[1])[None, :] < lengths[:, None]
    if any(row.predecessors is not None for row in trajectories):
        arrays |= _tree_arrays(trajectories, shape)
    arrays |= _sampling_arrays(trajectories, shape)
    arrays["rewards"] = np.array([row.reward for row in trajectories], np.float32)
    return arrays


def _tree_arrays(trajectories: Sequence[Trajectory], shape: tuple[int, int]) -> dict[str, npt.NDArray[Any]]:
    predecessors, positions = np.full(shape, -1, np.int32), np.zeros(shape, np.int32)
    for index, row in enumerate(trajectories):
        own = slice(0, row.num_tokens)
        chain = np.arange(-1, row.num_tokens - 1, dtype=np.int32)
        predecessors[index, own] = chain if row.predecessors is None else row.predecessors
        positions[index, own] = row.position_ids
    return {"predecessors": predecessors, "position_ids": positions}


def _sampling_arrays(trajectories: Sequence[Trajectory], shape: tuple[int, int]) -> dict[str, npt.NDArray[Any]]:
    infos = [info.sampling for row in trajectories for info in row.turn_infos]
    known = [sampling for sampling in infos if sampling is not None]
    if not known:
        return {}
    temperatures = np.full(shape, -1, np.float32)
    top_ps, top_ks, min_ps = np.ones(shape, np.float32), np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    for index, row in enumerate(trajectories):
        for turn, info in enumerate(row.turn_infos):
            places = np.flatnonzero(row.turns == turn)
            sampling = info.sampling
            temperatures[index, places] = -1 if sampling is None else sampling.temperature
            if sampling is not None and sampling.has_truncated_logprobs:
                top_ps[index, places], top_ks[index, places] = sampling.top_p, sampling.top_k
                min_ps[index, places] = sampling.min_p
    if not any(sampling.has_truncated_logprobs for sampling in known):
        return {"temperatures": temperatures}
    return {"temperatures": temperatures, "top_ps": top_ps, "top_ks": top_ks, "min_ps": min_ps}


def to_tensors(trajectories: Sequence[Trajectory]) -> dict[str, torch.Tensor]:
    """Return the arrays of ``to_arrays`` as torch tensors that share their memory."""
    import torch

    return {name: torch.from_numpy(array) for name, array in to_arrays(trajectories).items()}
