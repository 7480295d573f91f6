"""The rows of one update and its trained tokens, flattened: what objectives see of a batch.

Token t of a row is predicted at position t - 1, so its log-probability under any weights is read there: ``sources``
holds t - 1, ``positions`` t. Padding exists only inside a forward pass (``packing.py``); everything here is flat, in
the order of rows and of tokens within a row, so that layouts agree by construction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import cmp_using, define, field, frozen

from areal_actors.domain import Floats, Trajectory, as_floats
from areal_actors.errors import CaptureViolation, ExportError
from areal_actors.training.aggregation import Indices, token_weights
from areal_actors.training.config import Aggregation
from areal_actors.training.distributions import Distributions, is_comparable, is_recomputed, tokens_of

__all__ = ["Batch", "TrainingRow"]

_array = cmp_using(eq=np.array_equal, class_name="array")

_LOGPROB_SLACK = 1e-3
"""How far above 0 rounding may lift the log-probability of a certain token."""


_PLAIN_SLACK = 0.01
"""Engines compute both log-probabilities from the same logits, so they are further apart only where they differ."""
_FORCED_NATS = 0.5
"""A token with log-probability 0 as sampled, and less than this without grammar and temperature, was forced."""


@frozen(kw_only=True)
class TrainingRow:
    """One trajectory with its advantages (float32 [T]); ``episode`` and ``group`` are indices within the batch.

    ``proximal`` and ``reference`` are log-probabilities float32 [T] under the policy that ratios are taken to and under
    the frozen reference, where they were computed. ``temperature`` is for turns that do not say what they were sampled
    at. Creating a row raises ``ExportError`` if its arrays do not fit together, and ``CaptureViolation`` if a trained
    token has no version or a log-probability that cannot be one.
    """

    trajectory: Trajectory
    advantages: Floats = field(converter=as_floats, eq=_array)
    episode: int = 0
    group: int = 0
    proximal: Floats | None = field(default=None, eq=False)
    reference: Floats | None = field(default=None, eq=False)
    temperature: float = 1.0

    def __attrs_post_init__(self) -> None:
        """Check what every later index relies on."""
        row = self.trajectory
        lengths = {len(row.input_ids), len(row.loss_mask), len(row.logprobs), len(row.versions), len(self.advantages)}
        if len(lengths) != 1:
            raise ExportError(f"The arrays of a row of session {row.session} differ in length: {sorted(lengths)}.")
        if row.num_tokens and row.loss_mask[0]:
            raise ExportError(f"Session {row.session} trains the first token of a row, which nothing predicts.")
        _check_capture(row)
        _ = self.distributions  # settings that cannot be are refused before anything is computed

    @property
    def positions(self) -> Indices:
        """Positions t of the trained tokens, int64 [n]."""
        return np.flatnonzero(self.trajectory.loss_mask).astype(np.int64)

    @property
    def distributions(self) -> Distributions:
        """What the n trained tokens were sampled from."""
        return Distributions.create(self.trajectory, self.positions, temperature=self.temperature)

    @property
    def centre(self) -> Floats:
        """What a clip around the behaviour policy is around, float32 [T]: the distribution that the trainer computes.

        Where that is not the one that was sampled from (penalties, a bias or a grammar changed the logits, too, or the
        row does not say), and the trainer computes the plain softmax, it is the engine's plain log-probability: the
        ratio to the other one would begin off 1 whatever the weights are, and be clipped for what nothing changed.
        """
        row = self.trajectory
        if row.raw_logprobs is None:
            return row.logprobs
        is_plain = np.zeros(row.num_tokens, dtype=bool)
        is_plain[self.positions] = self.distributions.temperatures == 1.0
        is_plain &= ~tokens_of(row, is_recomputed) & ~np.isnan(row.raw_logprobs)
        return as_floats(np.where(is_plain, row.raw_logprobs, row.logprobs))

    @property
    def is_plain(self) -> npt.NDArray[np.bool_]:
        """Whether the n trained tokens were sampled from the distribution that the trainer computes, bool [n].

        Where the row does not say, it shows: engines compute both log-probabilities from the same logits, so those of
        the plain softmax differ where something else was at work, and a forced token has the log-probability 0.
        """
        row, where = self.trajectory, self.positions
        sampled = row.logprobs[where]
        raw = np.full(len(where), np.nan) if row.raw_logprobs is None else row.raw_logprobs[where]
        is_other = (np.abs(sampled - self.centre[where]) > _PLAIN_SLACK) | ((sampled == 0) & (raw < -_FORCED_NATS))
        is_adjusted = tokens_of(row, lambda sampling: sampling is not None and sampling.is_adjusted)[where]
        is_other |= is_adjusted & (self.distributions.temperatures != 1.0)
        found: npt.NDArray[np.bool_] = tokens_of(row, is_recomputed)[where] | ~is_other
        return found

    def comparable(self, raw_logprobs: Floats, logprobs: Floats) -> tuple[Floats, Floats]:
        """Pairs of log-probabilities, the engine's and the trainer's, that must agree: float32 [n] each.

        ``raw_logprobs`` and ``logprobs`` [n] are what the trainer found for the trained tokens under the plain softmax
        and under the distributions that they were sampled from. The former are compared where the engine knows its own,
        the latter where nothing but the temperature was at work. NaN where nothing can be compared.
        """
        row = self.trajectory
        unknown = np.full(len(raw_logprobs), np.nan, dtype=np.float32)
        if row.raw_logprobs is None:
            return unknown, unknown
        reported = row.raw_logprobs[self.positions]
        is_plain = ~np.isnan(reported)
        sampled = np.where(tokens_of(row, is_comparable)[self.positions], row.logprobs[self.positions], np.nan)
        pair = np.where(is_plain, reported, sampled), np.where(is_plain, raw_logprobs, logprobs)
        return as_floats(pair[0]), as_floats(pair[1])

    @property
    def is_inert(self) -> bool:
        """Whether no trained token has an advantage."""
        return not self.advantages[self.positions].any()


@define(kw_only=True, frozen=True, slots=False)
class Batch:
    """The rows of one update. Arrays are [N] over trained tokens; ``offsets`` int64 [R + 1] bounds those of a row."""

    rows: tuple[TrainingRow, ...]
    weights: Floats = field(eq=False)

    @classmethod
    def create(cls, rows: Sequence[TrainingRow], *, aggregation: Aggregation, fixed_length: int = 1) -> Batch:
        """The batch of ``rows`` with each token's share in the loss. Rows that train nothing are left out."""
        kept = tuple(row for row in rows if row.trajectory.num_trained_tokens)
        counts = [len(row.positions) for row in kept]
        owners = {
            "rows": np.repeat(np.arange(len(kept)), counts),
            "episodes": np.repeat(np.array([row.episode for row in kept], dtype=np.int64), counts),
            "groups": np.repeat(np.array([row.group for row in kept], dtype=np.int64), counts),
        }
        return cls(rows=kept, weights=token_weights(aggregation, fixed_length=fixed_length, **owners))

    @cached_property
    def offsets(self) -> Indices:
        """Where the tokens of each row begin; the last entry is N."""
        return np.concatenate([[0], np.cumsum([len(row.positions) for row in self.rows])]).astype(np.int64)

    @cached_property
    def advantages(self) -> Floats:
        """Float32 [N]."""
        return as_floats(self._gather(lambda row: row.advantages))

    @cached_property
    def behaviour(self) -> Floats:
        """Log-probabilities that the tokens were sampled with, float32 [N]."""
        return as_floats(self._gather(lambda row: row.trajectory.logprobs))

    @cached_property
    def plain(self) -> Floats:
        """The sampler's log-probabilities under the distribution that the trainer computes, float32 [N]."""
        return as_floats(self._gather(lambda row: row.centre))

    @cached_property
    def is_plain(self) -> npt.NDArray[np.bool_]:
        """Whether ``behaviour`` is of that distribution, bool [N]."""
        return np.concatenate([np.zeros(0, dtype=bool), *(row.is_plain for row in self.rows)])

    def tokens_of(self, rows: Sequence[int]) -> Indices:
        """Indices into the token arrays of the tokens of ``rows``, row by row."""
        spans = [np.arange(self.offsets[row], self.offsets[row + 1]) for row in rows]
        return np.concatenate([np.zeros(0, dtype=np.int64), *spans])

    @cached_property
    def proximal(self) -> Floats | None:
        """Log-probabilities under the weights before the update, float32 [N], where all rows have them."""
        return self._optional([row.proximal for row in self.rows])

    @cached_property
    def reference(self) -> Floats | None:
        """Log-probabilities under the reference, float32 [N], where all rows have them."""
        return self._optional([row.reference for row in self.rows])

    def _optional(self, arrays: Sequence[Floats | None]) -> Floats | None:
        present = [array[row.positions] for row, array in zip(self.rows, arrays, strict=True) if array is not None]
        return as_floats(np.concatenate(present)) if present and len(present) == len(self.rows) else None

    def _gather(self, array_of: Callable[[TrainingRow], npt.NDArray[Any]]) -> npt.NDArray[Any]:
        return np.concatenate([array_of(row)[row.positions] for row in self.rows] or [np.zeros(0)])


def _check_capture(row: Trajectory) -> None:
    trained = row.loss_mask == 1
    logprobs = row.logprobs[trained]
    if not np.isfinite(logprobs).all() or (logprobs > _LOGPROB_SLACK).any():
        raise CaptureViolation(f"A trained token of session {row.session} has a log-probability that cannot be one.")
    if (row.versions[trained] < 0).any():
        raise CaptureViolation(f"A trained token of session {row.session} has no version: nothing sampled it.")
