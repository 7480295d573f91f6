"""Aggregation of the losses of tokens: a weight for each trained token, fixed before the forward pass.

The loss is the weighted sum over all trained tokens of an update. Because the weights are computed from the whole
update, splitting it into micro-batches, padding, and the order of rows change nothing. With N trained tokens, n_r of
them in row r (of R rows), n_e in episode e (of E), n_g in group g (of K)::

    token_mean      1 / N                   DAPO, arXiv:2503.14476
    sequence_mean   1 / (R · n_r)           GRPO, arXiv:2402.03300
    episode_mean    1 / (E · n_e)           elsewhere called trajectory mean: an episode counts once
    group_mean      1 / (K · n_g)           each problem counts once
    fixed_length    1 / (R · fixed_length)  Dr. GRPO, arXiv:2503.20783: no length in the denominator
    episode_sum     1 / (E · fixed_length)  the same for episodes of several rows

Only ``episode_sum`` keeps the direction of the policy gradient if the policy decides how long its answers are or how
many turns it takes: every other denominator depends on that, so it is correlated with the sum that it divides. (The
denominator of ``fixed_length`` counts rows, which are turns in the export style ``individual``.)
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from areal_actors.training.config import Aggregation

__all__ = ["token_weights"]

Indices = npt.NDArray[np.int64]


def token_weights(
    aggregation: Aggregation, *, rows: Indices, episodes: Indices, groups: Indices, fixed_length: int
) -> npt.NDArray[np.float32]:
    """Return weights float32 [N] of N trained tokens, given the row, episode and group of each (int64 [N])."""
    if len(rows) == 0:
        return np.zeros(0, dtype=np.float32)
    match aggregation:
        case Aggregation.TOKEN_MEAN:
            weights = np.full(len(rows), 1.0 / len(rows))
        case Aggregation.SEQUENCE_MEAN:
            weights = _mean_of_means(rows)
        case Aggregation.EPISODE_MEAN:
            weights = _mean_of_means(episodes)
        case Aggregation.GROUP_MEAN:
            weights = _mean_of_means(groups)
        case Aggregation.FIXED_LENGTH:
            weights = np.full(len(rows), 1.0 / (len(np.unique(rows)) * fixed_length))
        case Aggregation.EPISODE_SUM:
            weights = np.full(len(rows), 1.0 / (len(np.unique(episodes)) * fixed_length))
    return weights.astype(np.float32)


def _mean_of_means(owners: Indices) -> npt.NDArray[np.float64]:
    _, inverse, counts = np.unique(owners, return_inverse=True, return_counts=True)
    return 1.0 / (len(counts) * counts[inverse])
