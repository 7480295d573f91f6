"""The inputs of an objective for the tokens of one forward pass, and sums over the tokens of a row.

Everything is flat: one entry per trained token. A row is never split over passes, so sequence-level sums are complete.
"""

from __future__ import annotations

import torch
from attrs import Factory, field, frozen
from torch import Tensor

__all__ = ["Terms", "sequence_mean", "sequence_sum"]


@frozen(kw_only=True)
class Terms:
    """Tensors [n] over the trained tokens of one pass.

    ``advantages``, ``weights`` (share in the loss), ``behaviour`` (log-probabilities when sampled), ``proximal`` (those
    that ratios are taken to; see ``Centre``), ``reference`` (those of the frozen model, if there is one) and
    ``teacher`` (those of the teacher's plain softmax, if there is one) are float32; ``rows`` int64 numbers each token's
    row from 0 to ``num_rows`` - 1. None of them carries a gradient.

    ``plain`` float32 holds the sampler's log-probabilities under the distribution that the trainer computes, and
    ``is_plain`` bool says whether ``behaviour`` belongs to that distribution, which it does not for tokens that a
    grammar forced.
    """

    advantages: Tensor = field(eq=False)
    weights: Tensor = field(eq=False)
    behaviour: Tensor = field(eq=False)
    proximal: Tensor = field(eq=False)
    reference: Tensor | None = field(default=None, eq=False)
    teacher: Tensor | None = field(default=None, eq=False)
    rows: Tensor = field(eq=False)
    num_rows: int
    plain: Tensor = field(default=Factory(lambda self: self.behaviour, takes_self=True), eq=False)
    is_plain: Tensor = field(
        default=Factory(lambda self: torch.ones_like(self.behaviour, dtype=torch.bool), takes_self=True), eq=False
    )


def sequence_sum(values: Tensor, terms: Terms) -> Tensor:
    """Return the sum of ``values`` [n] over each token's row, at each token: [n]."""
    totals = values.new_zeros(terms.num_rows).index_add(0, terms.rows, values)
    return totals.index_select(0, terms.rows)


def sequence_mean(values: Tensor, terms: Terms) -> Tensor:
    """Return the mean of ``values`` [n] over each token's row, at each token: [n]."""
    return sequence_sum(values, terms) / sequence_sum(values.new_ones(len(values)), terms)
