"""What an objective is told about the tokens of one forward pass, and sums over the tokens of a row.

Everything is flat: one entry per trained token. A row is never split over passes, so sequence-level terms are complete.
"""

from __future__ import annotations

from attrs import field, frozen
from torch import Tensor

__all__ = ["Terms", "sequence_mean", "sequence_sum"]


@frozen(kw_only=True)
class Terms:
    """Tensors [n] over the trained tokens of one pass.

    ``advantages``, ``weights`` (share in the loss), ``behaviour`` (log-probabilities when sampled), ``proximal``
    (log-probabilities before the update) and ``reference`` (those of the frozen model, where there is one) are float32;
    ``rows`` int64 numbers each token's row from 0 to ``num_rows`` - 1. None of them carries a gradient.
    """

    advantages: Tensor = field(eq=False)
    weights: Tensor = field(eq=False)
    behaviour: Tensor = field(eq=False)
    proximal: Tensor = field(eq=False)
    reference: Tensor | None = field(default=None, eq=False)
    rows: Tensor = field(eq=False)
    num_rows: int


def sequence_sum(values: Tensor, terms: Terms) -> Tensor:
    """The sum of ``values`` [n] over each token's row, at each token: [n]."""
    totals = values.new_zeros(terms.num_rows).index_add(0, terms.rows, values)
    return totals.index_select(0, terms.rows)


def sequence_mean(values: Tensor, terms: Terms) -> Tensor:
    """The mean of ``values`` [n] over each token's row, at each token: [n]."""
    return sequence_sum(values, terms) / sequence_sum(values.new_ones(len(values)), terms)
