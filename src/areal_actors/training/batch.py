"""The rows of one update and their trained tokens, flattened: the view of a batch that objectives get.

Token t of a row is predicted at position t - 1, so its log-probability under any weights is read there: ``sources``
holds t - 1, ``positions`` t. Padding exists only inside a forward pass (``packing.py``); everything here is flat, in
the order of rows and of tokens within a row, so that layouts agree by construction.

The loss is the weighted sum over all trained tokens of an update, with weights that are fixed before the forward pass
(``token_weights``). Because they are computed from the whole update, splitting it into micro-batches, padding, and the
order of rows change nothing. With N trained tokens, n_r of them in row r (of R rows), n_e in episode e (of E), n_g in
group g (of K)::

    token_mean      1 / N                   DAPO, arXiv:2503.14476
    sequence_mean   1 / (R · n_r)           GRPO, arXiv:2402.03300
    episode_mean    1 / (E · n_e)           elsewhere called trajectory mean: an episode counts once
    group_mean      1 / (K · n_g)           each problem counts once
    fixed_length    1 / (R · fixed_length)  Dr. GRPO, arXiv:2503.20783: no length in the denominator
    episode_sum     1 / (E · fixed_length)  the same for episodes of several rows

The means average over what trains a token. In ``fixed_length`` and ``episode_sum``, R and E also count what trains
none: masked rows, failed members (in E, since they have no rows), and groups that were left out for their equal values.
Otherwise the weight of a token would depend on how many other answers were cut.

Only ``episode_sum`` keeps the direction of the policy gradient if the policy decides how long its answers are or how
many turns it takes: every other denominator depends on that, so it is correlated with the sum that it divides. (The
denominator of ``fixed_length`` counts rows, which are turns in the export style ``individual``.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from attrs import cmp_using, define, field, frozen

from areal_actors.domain import Floats, Group, Trajectory, as_floats, mask_row, mask_truncated
from areal_actors.errors import ExportError
from areal_actors.training.advantages import GroupAdvantages
from areal_actors.training.config import Aggregation, TrainerConfig
from areal_actors.training.distributions import Distributions, is_comparable, is_recomputed, tokens_of

_array = cmp_using(eq=np.array_equal, class_name="array")

_PLAIN_SLACK = 0.01
"""Largest difference due to rounding between an engine's two log-probabilities, which come from the same logits."""
_FORCED_NATS = 0.5
"""A token with log-probability 0 as sampled and below minus this under the plain softmax was forced."""


@frozen(kw_only=True)
class TrainingRow:
    """One trajectory with its advantages (float32 [T]); ``episode`` and ``group`` are indices within the batch.

    ``proximal``, ``reference`` and ``teacher`` are log-probabilities float32 [T] under the policy that ratios are taken
    to, under the frozen reference and under the teacher, if they were computed. ``temperature`` applies to turns that
    do not record the one they were sampled at. ``num_members`` is the number of episodes in its group, failed ones
    included; ``None`` counts those that have rows. Creating a row raises ``ExportError`` if its arrays do not fit
    together; ``CaptureGate`` checks what an engine reports.
    """

    trajectory: Trajectory
    advantages: Floats = field(converter=as_floats, eq=_array)
    episode: int = 0
    group: int = 0
    num_members: int | None = None
    proximal: Floats | None = field(default=None, eq=False)
    reference: Floats | None = field(default=None, eq=False)
    teacher: Floats | None = field(default=None, eq=False)
    temperature: float = 1.0

    def __attrs_post_init__(self) -> None:
        """Check the invariants that indexing relies on."""
        row = self.trajectory
        lengths = {len(row.input_ids), len(row.loss_mask), len(row.logprobs), len(row.versions), len(self.advantages)}
        if len(lengths) != 1:
            raise ExportError(f"The arrays of a row of session {row.session} differ in length: {sorted(lengths)}.")
        if row.num_tokens and row.loss_mask[0]:
            raise ExportError(f"Session {row.session} trains the first token of a row, which nothing predicts.")
        # Read once, to refuse impossible settings before anything is computed.
        _ = self.distributions

    @cached_property
    def positions(self) -> Indices:
        """Positions t of the trained tokens, int64 [n]."""
        return np.flatnonzero(self.trajectory.loss_mask).astype(np.int64)

    @cached_property
    def distributions(self) -> Distributions:
        """The distributions that the n trained tokens were sampled from."""
        return Distributions.create(self.trajectory, self.positions, temperature=self.temperature)

    @property
    def centre(self) -> Floats:
        """Log-probabilities float32 [T] that a clip around the behaviour policy is centred on.

        They belong to the distribution that the trainer computes. If the tokens were sampled from another one
        (penalties, a bias or a grammar also changed the logits, or the row does not say), and the trainer computes the
        plain softmax, these are the engine's plain log-probabilities. The ratio to the sampled ones would differ from 1
        before any update, and would be clipped although the weights had not changed.
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

        If the row does not record it, it is inferred: engines compute both log-probabilities from the same logits, so a
        value that differs from the plain softmax shows that the logits were changed, and a forced token has the
        log-probability 0.
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
        """Return pairs of log-probabilities, the engine's and the trainer's, that must agree: float32 [n] each.

        ``raw_logprobs`` and ``logprobs`` [n] are what the trainer computed for the trained tokens under the plain
        softmax and under the distributions that they were sampled from. The plain ones are compared if the engine
        reported its own, the others if only the temperature changed the logits. NaN if nothing can be compared.
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
        """Whether all advantages of trained tokens are 0."""
        return not self.advantages[self.positions].any()


def create_rows(
    groups: Sequence[Group], advantages: Sequence[GroupAdvantages], config: TrainerConfig
) -> list[TrainingRow]:
    """Return the rows of all successful episodes of ``groups``, with their advantages.

    Rows that train nothing are among them, because denominators count them: answers that were cut, if they are masked,
    and the rows of groups without variance, if these are dropped.
    """
    rows: list[TrainingRow] = []
    num_episodes = 0
    for index, (group, found) in enumerate(zip(groups, advantages, strict=True)):
        is_dropped = found.has_zero_variance and config.advantages.drop_zero_variance
        values = iter(found.rows)
        for episode in group.episodes:
            if episode.failure is not None:
                continue
            for whole in episode.trajectories:
                trajectory = mask_truncated(whole) if config.objective.masks_truncated else whole
                if is_dropped:
                    trajectory = mask_row(trajectory)
                row = TrainingRow(
                    trajectory=trajectory,
                    advantages=next(values),
                    episode=num_episodes,
                    group=index,
                    num_members=len(group.episodes),
                    temperature=config.temperature,
                )
                rows.append(row)
            num_episodes += 1
    return rows


def split_by_row(rows: Sequence[TrainingRow], indices: Sequence[int], values: Floats) -> Iterator[tuple[int, Floats]]:
    """Yield each of ``indices`` with its part of ``values`` [..., n], those of the trained tokens of these rows."""
    bounds = np.cumsum([len(rows[index].positions) for index in indices])[:-1]
    yield from zip(indices, np.split(values, bounds, axis=-1), strict=True)


def split_updates(rows: Sequence[TrainingRow], config: TrainerConfig, *, version: int) -> Iterator[list[TrainingRow]]:
    """Yield the rows of each update of a step that trains ``version``: its groups, split evenly in each epoch."""
    members: dict[int, list[TrainingRow]] = {}
    for row in rows:
        members.setdefault(row.group, []).append(row)
    groups = list(members.values())
    count = max(1, min(config.num_minibatches, len(groups)))
    for epoch in range(config.num_epochs):
        order = np.arange(len(groups))
        if count > 1:
            # From seed, version and epoch only: no generator state is involved, so a resumed run draws the same order.
            order = np.random.default_rng((config.seed, version, epoch)).permutation(len(groups))
        for part in np.array_split(order, count):
            yield [row for index in part for row in groups[index]]


@define(kw_only=True, frozen=True, slots=False)
class Batch:
    """The rows of one update.

    Arrays are [N] over trained tokens; ``offsets`` int64 [R + 1] bounds the tokens of each row.
    """

    rows: tuple[TrainingRow, ...]
    weights: Floats = field(eq=False)

    @classmethod
    def create(cls, rows: Sequence[TrainingRow], *, aggregation: Aggregation, fixed_length: int = 1) -> Batch:
        """Return the batch of ``rows`` with each token's weight in the loss.

        Rows without trained tokens are left out, after they were counted.
        """
        members: dict[int, set[int]] = {}
        for row in rows:
            members.setdefault(row.group, set()).add(row.episode)
        known = {row.group: row.num_members for row in rows}
        kept = tuple(row for row in rows if row.trajectory.num_trained_tokens)
        counts = [len(row.positions) for row in kept]
        weights = token_weights(
            aggregation,
            fixed_length=fixed_length,
            rows=np.repeat(np.arange(len(kept)), counts),
            episodes=np.repeat(np.array([row.episode for row in kept], dtype=np.int64), counts),
            groups=np.repeat(np.array([row.group for row in kept], dtype=np.int64), counts),
            num_rows=len(rows),
            num_episodes=sum(known[group] or len(found) for group, found in members.items()),
        )
        return cls(rows=kept, weights=weights)

    @cached_property
    def offsets(self) -> Indices:
        """Index of the first token of each row, int64 [R + 1]; the last entry is N."""
        return np.concatenate([[0], np.cumsum([len(row.positions) for row in self.rows])]).astype(np.int64)

    @cached_property
    def advantages(self) -> Floats:
        """Advantage of each token, float32 [N]."""
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
        """Whether each token was sampled from the distribution that the trainer computes, bool [N]."""
        return np.concatenate([np.zeros(0, dtype=bool), *(row.is_plain for row in self.rows)])

    def tokens_of(self, rows: Sequence[int]) -> Indices:
        """Return indices into the token arrays of the tokens of ``rows``, row by row."""
        spans = [np.arange(self.offsets[row], self.offsets[row + 1]) for row in rows]
        return np.concatenate([np.zeros(0, dtype=np.int64), *spans])

    def optional(self, name: Literal["proximal", "reference", "teacher"]) -> Floats | None:
        """Return the log-probabilities of this name, float32 [N]; ``None`` unless all rows have them."""
        arrays: list[Floats | None] = [getattr(row, name) for row in self.rows]
        present = [array[row.positions] for row, array in zip(self.rows, arrays, strict=True) if array is not None]
        return as_floats(np.concatenate(present)) if present and len(present) == len(self.rows) else None

    def _gather(self, array_of: Callable[[TrainingRow], npt.NDArray[Any]]) -> npt.NDArray[Any]:
        return np.concatenate([array_of(row)[row.positions] for row in self.rows] or [np.zeros(0)])


Indices = npt.NDArray[np.int64]


def token_weights(
    aggregation: Aggregation,
    *,
    rows: Indices,
    episodes: Indices,
    groups: Indices,
    fixed_length: int,
    num_rows: int | None = None,
    num_episodes: int | None = None,
) -> npt.NDArray[np.float32]:
    """Return weights float32 [N] of N trained tokens, given the row, episode and group of each (int64 [N]).

    ``num_rows`` and ``num_episodes`` are those of the update, also without trained tokens, by which ``fixed_length``
    and ``episode_sum`` divide; ``None`` counts those that have some.
    """
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
            weights = np.full(len(rows), 1.0 / ((num_rows or len(np.unique(rows))) * fixed_length))
        case Aggregation.EPISODE_SUM:
            weights = np.full(len(rows), 1.0 / ((num_episodes or len(np.unique(episodes))) * fixed_length))
    return weights.astype(np.float32)


def _mean_of_means(owners: Indices) -> npt.NDArray[np.float64]:
    _, inverse, counts = np.unique(owners, return_inverse=True, return_counts=True)
    return 1.0 / (len(counts) * counts[inverse])
