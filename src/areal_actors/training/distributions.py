"""Sampling distributions of trained tokens, which the trainer recomputes token by token.

Engines divide the logits by the temperature, then keep the ``top_k`` most probable tokens, of these the smallest set
whose probabilities add up to ``top_p``, and of these the tokens with at least ``min_p`` times the largest probability;
the rest is renormalised. The trainer does the same with its own logits, so that on-policy ratios are 1 for any sampling
settings, and the gradient is that of the distribution that was sampled from.

If the engine's log-probabilities do not reflect truncation (SGLang), the trainer does not apply it either. If
penalties, a bias or a grammar also changed the logits, only the temperature is applied, because the other changes are
not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from attrs import evolve, field, frozen
from torch import Tensor

from areal_actors.domain import Group, SamplingDistribution, Trajectory
from areal_actors.errors import ExportError

_NUM_CANDIDATES = 1024
"""Number of most probable tokens examined before the whole vocabulary is sorted, as in the torch engine."""

_Table = npt.NDArray[np.float64]


@frozen(kw_only=True)
class Distributions:
    """The transformations from the logits of n tokens to the distributions that the tokens were sampled from.

    ``settings`` float64 [n, 4] holds temperature, top-p, top-k and min-p of each token; ``top_p`` 1, ``top_k`` 0 and
    ``min_p`` 0 are off.
    """

    settings: _Table = field(eq=False)

    @classmethod
    def create(cls, row: Trajectory, positions: Sequence[int] | npt.NDArray[Any], *, temperature: float) -> Self:
        """Return the distributions of the tokens of ``row`` at ``positions``.

        ``temperature`` applies to turns that do not record theirs. Raises ``ExportError`` for a turn without a
        description, or with settings that nothing can be sampled with.
        """
        default = (temperature, 1.0, 0.0, 0.0)
        table = np.array([*(_settings(info.sampling, default) for info in row.turn_infos), default])
        turns = row.turns[positions] if row.turn_infos else np.full(len(positions), -1)
        if len(turns) and turns.max() >= len(row.turn_infos) > 0:
            raise ExportError(
                f"A row of session {row.session} describes {len(row.turn_infos)} turns, not turn {turns.max()}."
            )
        found = table[turns]  # -1 is the last entry, the default
        is_possible = np.isfinite(found).all(1) & (found[:, 0] > 0) & (found[:, 1] > 0) & (found[:, 2:] >= 0).all(1)
        if not is_possible.all():
            raise ExportError(
                f"A row of session {row.session} was sampled with temperature, top_p, top_k and min_p "
                f"{found[~is_possible][0].tolist()}, which nothing can be sampled with."
            )
        return cls(settings=found)

    @classmethod
    def join(cls, parts: Sequence[Distributions]) -> Self:
        """Return the concatenation of ``parts``."""
        return cls(settings=np.concatenate([np.zeros((0, 4)), *(part.settings for part in parts)]))

    @property
    def temperatures(self) -> _Table:
        """The temperature of each token, float64 [n]."""
        return self.settings[:, 0]

    @property
    def has_temperatures(self) -> bool:
        """Whether any temperature differs from 1."""
        return bool((self.temperatures != 1.0).any())

    @property
    def is_truncated(self) -> npt.NDArray[np.bool_]:
        """Whether truncation applies to each token, bool [n]."""
        _, top_p, top_k, min_p = self.settings.T
        truncated: npt.NDArray[np.bool_] = (top_p < 1) | (top_k > 0) | (min_p > 0)
        return truncated


def _settings(
    sampling: SamplingDistribution | None, default: tuple[float, float, float, float]
) -> tuple[float, float, float, float]:
    """Return the settings that are recomputed for a turn.

    Greedy tokens get the log-probability of the plain softmax, as engines report it.
    """
    if sampling is None:
        return default
    if sampling.is_greedy:
        return (1.0, 1.0, 0.0, 0.0)
    if not sampling.has_truncated_logprobs:
        return (sampling.temperature, 1.0, 0.0, 0.0)
    return (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p)


def truncation_bounds(logits: Tensor, top_p: Tensor, top_k: Tensor, min_p: Tensor) -> Tensor:
    """Return the smallest of the ``logits`` [n, V] that truncation keeps, [n]; the settings are [n] each.

    Tokens with logits equal to the bound are all kept.
    """
    size = logits.shape[-1]
    normaliser = logits.logsumexp(-1)
    num = min(size, max(_NUM_CANDIDATES, int(top_k.max())))
    # Nearly always enough, and far cheaper than sorting the whole vocabulary.
    values = logits.topk(num, dim=-1).values
    kept = _num_kept(values, normaliser, top_p, top_k, min_p)
    bounds = values.gather(-1, kept[:, None] - 1).squeeze(-1)
    is_flat = kept == num
    # A sort takes 20 times as long as a logsumexp.
    if num < size and bool(is_flat.any()):
        values = logits[is_flat].sort(dim=-1, descending=True).values
        kept = _num_kept(values, normaliser[is_flat], top_p[is_flat], top_k[is_flat], min_p[is_flat])
        bounds[is_flat] = values.gather(-1, kept[:, None] - 1).squeeze(-1)
    return bounds


def _num_kept(values: Tensor, normaliser: Tensor, top_p: Tensor, top_k: Tensor, min_p: Tensor) -> Tensor:
    """Return how many of the descending ``values`` [n, m] are kept, int64 [n], at least one."""
    # float64, because a sum of many small probabilities decides what top_p keeps.
    probabilities = (values - normaliser[:, None]).double().exp()
    ends = probabilities.cumsum(-1)
    num = values.shape[-1]
    by_top_k = torch.where(top_k > 0, top_k.long(), num).clamp(max=num)
    # Engines apply top_p to the probabilities that top_k left, renormalised; comparing with a share of their mass is
    # the same.
    mass = torch.where(top_k > 0, ends.gather(-1, by_top_k[:, None] - 1).squeeze(-1), 1.0)
    before = ends - probabilities
    by_top_p = torch.where(top_p < 1, (before < (top_p * mass)[:, None]).sum(-1), num)
    by_min_p = (probabilities >= (min_p * probabilities[:, 0])[:, None]).sum(-1)
    return torch.minimum(torch.minimum(by_top_k, by_top_p), by_min_p).clamp(min=1)


# ------------------------------------------------------------------------------------------------ tokens by turn


def tokens_of(row: Trajectory, is_chosen: Callable[[SamplingDistribution | None], bool]) -> npt.NDArray[np.bool_]:
    """Mark the tokens, bool [T], of turns whose distribution ``is_chosen``; it gets ``None`` for unknown ones."""
    turns = np.where(row.turns < len(row.turn_infos), row.turns, -1)
    return np.array([*(is_chosen(info.sampling) for info in row.turn_infos), is_chosen(None)])[turns]


def is_recomputed(sampling: SamplingDistribution | None) -> bool:
    """Return whether the trainer computes exactly the distribution that the engine's log-probabilities belong to."""
    return sampling is not None and not sampling.is_adjusted


def is_comparable(sampling: SamplingDistribution | None) -> bool:
    """Return whether the log-probabilities of engine and trainer also agree numerically.

    If truncation is applied, rounding may move its bound, so they may not.
    """
    return is_recomputed(sampling) and sampling is not None and not sampling.has_truncated_logprobs


def num_greedy_tokens(group: Group) -> int:
    """Count the trained tokens that were taken at temperature 0."""
    rows = (row for episode in group.episodes for row in episode.trajectories)
    return sum(int((_is_greedy(row) & (row.loss_mask == 1)).sum()) for row in rows)


def withhold_greedy(group: Group) -> Group:
    """Mask the tokens that were taken at temperature 0: they stay as context and have no part in the loss.

    Such a token was not sampled: its distribution is a point mass, whose log-probability is 0 for any weights, and so
    is its policy gradient. Training it as a sample of the softmax would reinforce whichever token is most probable.
    """
    if not num_greedy_tokens(group):
        return group
    episodes = []
    for episode in group.episodes:
        rows = []
        for row in episode.trajectories:
            is_kept = ~_is_greedy(row)
            kept = evolve(
                row,
                loss_mask=row.loss_mask * is_kept,
                logprobs=np.where(is_kept, row.logprobs, 0),
                raw_logprobs=None if row.raw_logprobs is None else np.where(is_kept, row.raw_logprobs, 0),
            )
            rows.append(kept)
        episodes.append(evolve(episode, trajectories=tuple(rows)))
    return evolve(group, episodes=tuple(episodes))


def _is_greedy(row: Trajectory) -> npt.NDArray[np.bool_]:
    return tokens_of(row, lambda sampling: sampling is not None and sampling.is_greedy)
