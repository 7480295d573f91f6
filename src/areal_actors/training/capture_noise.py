"""Expected differences between a correct engine's log-probabilities and the trainer's, and causes of larger ones.

Engine and trainer run different kernels over the same weights, so their logits differ by rounding. Rounding is
relative: its size is a share of the spread of the logits, and that spread follows from the entropy. With V ids and the
recomputed log-probabilities t of the sampled tokens, and means over the tokens of a step::

    spread = sqrt(2 (log V + mean t)) / mean(1 - exp t)
    bound of one token = share * spread * (1 - exp t)

For Gaussian logits of standard deviation s the entropy is log V - s^2 / 2 while many ids matter, and where few do,
1 - sum p^2 is sqrt(2 log V) / s (the random energy model of Derrida): the formula gives s in both cases. A token whose
probability p is near 1 hardly moves with its logit, hence the last factor. Nothing else about a model is needed.

The root mean square of difference / (1 - p), as a share of ``spread``, measured on 384 to 1,024 tokens each with the
embedded engine (a step is many such rows)::

    mean entropy, nats        6.6     5.9     5.7     4.2     3.4     2.1     1.1     0.5     0.2     0.07
    bfloat16, `tiny`                  .0128   .0129                   .0085           .0058   .0068   .0069
    bfloat16, SmolLM2-135M    .0238                   .0176   .0168           .0128
    float32, `tiny`                   1.6e-6  0.8e-6                  0.5e-6          0.4e-6  0.3e-6  0.3e-6

While the differences themselves grow from 0.003 to 0.6 nats, their share of the spread stays within a factor of 4, and
``share`` allows 0.06 in bfloat16 and 6e-4 in float32. A lost, doubled or foreign token moves the values that follow
by about the spread itself, 16 times the bound in bfloat16, even if the weights are nearly uniform and the difference is
a few hundredths of a nat. If few ids matter, 1 - p is a poor estimate of the spread, so the bound is capped.

A row is bad if the root mean square of difference / bound exceeds 1 + 2 / sqrt(n): a row of one token is allowed 3
bounds. A difference that all tokens share is detected over many tokens before it is detected in one row. Over the rows
that are not bad, the mean of difference / bound must be within 0.25, and the slope of the differences over t (another
temperature) within 2 % in bfloat16 and 0.02 % in float32, with 6 standard errors added to each. A correct engine's mean
is -0.04 to 0.01: the expected difference of two distributions that differ by rounding is only half their squared
difference.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from attrs import evolve, field, frozen

__all__ = ["Comparison", "NoiseModel"]

Doubles = npt.NDArray[np.float64]

_MAX_MEAN = 0.25
_NUM_STANDARD_ERRORS = 6.0
_MIN_TOKENS = 64
"""Minimum number of tokens for a mean and a slope; with fewer, single rows are more informative."""
_TRACKED, _UNTRACKED = 0.9, 0.3
"""Correlations with the recomputed values: above the first, values follow them; below the second, they do not."""
_LINE, _CONSTANT = 0.5, 0.8
"""Shares of the squared differences that a line over t must explain for a temperature or a constant to be named."""
_FAR = 2.0
"""Deviation in bounds from which a row is said to break; before it, deviations must be a small share of those after."""
_SMALL = 0.15
_FEW = 3
"""Number of tokens below which correlations are meaningless."""
_SPREAD_OF_FEW = 0.3
"""Squared spread added for an estimate from one token; an n-th of it is added for an estimate from n tokens."""


@frozen(kw_only=True)
class _Rounding:
    """Bounds of one number format: shares of the spread, absolute ones in nats, and of the slope."""

    share: float
    max_bound: float
    floor: float
    slope: float


_FLOAT32 = _Rounding(share=6e-4, max_bound=0.01, floor=1e-5, slope=2e-4)
_BFLOAT16 = _Rounding(share=0.06, max_bound=1.0, floor=1e-3, slope=0.02)


def _as_doubles(values: npt.ArrayLike) -> Doubles:
    return np.asarray(values, dtype=np.float64)


@frozen(kw_only=True)
class Comparison:
    """The comparable tokens of a row, in their order: log-probabilities [n], n >= 1."""

    reported: Doubles = field(converter=_as_doubles, eq=False)
    recomputed: Doubles = field(converter=_as_doubles, eq=False)

    @property
    def differences(self) -> Doubles:
        """Reported minus recomputed, in nats."""
        return self.reported - self.recomputed

    @property
    def mean_gap(self) -> float:
        """Mean absolute difference in nats."""
        return float(np.abs(self.differences).mean())


@frozen(kw_only=True)
class NoiseModel:
    """The differences that rounding explains between an engine and a trainer of a model with ``vocab_size`` ids."""

    vocab_size: int
    engine_dtype: str
    trainer_dtype: str

    @property
    def is_float32(self) -> bool:
        """Whether both sides compute in float32."""
        return {"float32"} == {self.engine_dtype, self.trainer_dtype}

    @property
    def _rounding(self) -> _Rounding:
        return _FLOAT32 if self.is_float32 else _BFLOAT16

    def bounds(self, rows: Sequence[Comparison]) -> list[Doubles]:
        """Return the bound of each token in nats, float64 [n] for each row. ``rows`` are those of one step."""
        spread, rounding = self._spread(rows), self._rounding
        scale = min(rounding.share * spread, rounding.max_bound)
        return [scale * _doubts(row.recomputed) + rounding.floor for row in rows]

    def excesses(self, rows: Sequence[Comparison]) -> list[float]:
        """Return each row's difference as a share of what is allowed: more than 1 is not rounding."""
        return [
            float(np.sqrt(np.square(row.differences / bounds).mean()) / (1 + 2 / np.sqrt(len(bounds))))
            for row, bounds in zip(rows, self.bounds(rows), strict=True)
        ]

    def systematic_gap(self, rows: Sequence[Comparison]) -> str | None:
        """Describe a difference that all tokens of a step share, ``None`` if there is none."""
        if sum(len(row.reported) for row in rows) < _MIN_TOKENS:
            return None
        fit = _Fit.of(rows, self.bounds(rows))
        if abs(fit.slope) > self._rounding.slope + _NUM_STANDARD_ERRORS * fit.slope_error:
            return (
                f"The engine's log-probabilities change by {1 + fit.slope:.4g} times what the trainer's do "
                f"(standard error {fit.slope_error:.2g})"
            )
        if abs(fit.mean) > _MAX_MEAN + _NUM_STANDARD_ERRORS * fit.mean_error:
            return f"The engine's log-probabilities are {fit.offset:+.3g} from the trainer's on average"
        return None

    def likely_cause(self, rows: Sequence[Comparison]) -> str:
        """Name the usual cause of such differences. ``rows`` are the bad ones."""
        bounds = self.bounds(rows)
        reported, recomputed = (np.concatenate([getattr(row, n) for row in rows]) for n in ("reported", "recomputed"))
        follows, fit = _correlation(reported, recomputed), _Fit.of(rows, bounds)
        is_tracked = follows > _TRACKED
        is_line = is_tracked and abs(fit.slope) > self._rounding.slope and fit.explained > _LINE
        coarser, max_excess = evolve(self, engine_dtype="bfloat16"), 1 if self.is_float32 else 2
        causes = (
            (
                _shifted_correlation(rows) > max(_TRACKED, follows + 0.05),
                "ids and log-probabilities are shifted: each value belongs to a neighbouring token",
            ),
            (
                is_line,
                f"another temperature: the values are about those of temperature {1 / (1 + fit.slope):.2g}, and plain "
                "log-probabilities are those of temperature 1"
                if is_line
                else "",
            ),
            (
                is_tracked and fit.explained > _CONSTANT,
                f"a constant of {fit.offset:+.3g}: the softmax is not over the ids of the model",
            ),
            (
                _breaks(rows, bounds),
                "a token was lost, doubled, replaced or tokenised anew: rows agree up to it and differ from there",
            ),
            (
                follows < _UNTRACKED,
                "made-up values, or those of other tokens: they do not follow what the trainer computes",
            ),
            (
                is_tracked and max(coarser.excesses(rows)) < max_excess,
                "coarser arithmetic than the data types say (bfloat16, quantised weights), or slightly other weights",
            ),
        )
        default = "other weights or another version, another prompt (chat template), or other tokens in the answer"
        return next((cause for is_likely, cause in causes if is_likely), default)

    def _spread(self, rows: Sequence[Comparison]) -> float:
        """Return the standard deviation of the logits over the vocabulary, in nats."""
        recomputed = np.concatenate([row.recomputed for row in rows])
        deficit = np.log(self.vocab_size) + recomputed.mean()
        # Forced tokens are not samples: their mean may be below that of a uniform choice, and they add to the spread.
        squared = max(2 * deficit, float(recomputed.var()) + min(deficit, 0.0) ** 2)
        squared += _SPREAD_OF_FEW / len(recomputed)
        return float(np.sqrt(squared) / max(float(_doubts(recomputed).mean()), 1e-3))


@frozen(kw_only=True)
class _Fit:
    """Weighted least squares of the differences over t: mean, slope, and the share of them that a line explains."""

    mean: float
    """Mean of difference / bound."""
    mean_error: float
    offset: float
    """Mean difference in nats."""
    slope: float
    slope_error: float
    """Standard error, robust to unequal variances."""
    explained: float

    @classmethod
    def of(cls, rows: Sequence[Comparison], bounds: Sequence[Doubles]) -> _Fit:
        weights = 1 / np.concatenate(list(bounds))
        recomputed = np.concatenate([row.recomputed for row in rows])
        differences = np.concatenate([row.differences for row in rows])
        scaled = differences * weights
        columns = np.stack([weights, weights * recomputed], axis=1)
        inverse = np.linalg.pinv(columns.T @ columns)
        coefficients = inverse @ columns.T @ scaled
        rest = scaled - columns @ coefficients
        errors = columns * rest[:, None]
        covariance = inverse @ (errors.T @ errors) @ inverse
        return cls(
            mean=float(scaled.mean()),
            mean_error=float(scaled.std() / np.sqrt(len(scaled))),
            offset=float(differences.mean()),
            slope=float(coefficients[1]),
            slope_error=float(np.sqrt(max(covariance[1, 1], 0.0))),
            explained=float(1 - np.square(rest).sum() / max(np.square(scaled).sum(), 1e-30)),
        )


def _doubts(logprobs: Doubles) -> Doubles:
    """Return 1 - p: how much a log-probability moves with its logit."""
    return -np.expm1(np.minimum(logprobs, 0.0))


def _breaks(rows: Sequence[Comparison], bounds: Sequence[Doubles]) -> bool:
    """Return whether rows are accurate up to some token and far off from there.

    Accurate means a small part of the later deviations.
    """
    before, after = [], []
    for row, bound in zip(rows, bounds, strict=True):
        deviations = np.abs(row.differences / bound)
        far = np.flatnonzero(deviations > _FAR)
        start = int(far[0]) if len(far) else len(deviations)
        before.append(deviations[:start])
        after.append(deviations[start:])
    honest, spoilt = np.concatenate(before), np.concatenate(after)
    if len(honest) < _FEW or not len(spoilt):
        return False
    return bool(np.sqrt(np.square(honest).mean()) < _SMALL * np.sqrt(np.square(spoilt).mean()))


def _shifted_correlation(rows: Sequence[Comparison]) -> float:
    """Return the larger correlation of reported values with those recomputed for the previous, and the next token."""
    long = [row for row in rows if len(row.reported) >= _FEW]
    if not long:
        return 0.0
    before = _correlation(
        np.concatenate([row.reported[1:] for row in long]), np.concatenate([row.recomputed[:-1] for row in long])
    )
    after = _correlation(
        np.concatenate([row.reported[:-1] for row in long]), np.concatenate([row.recomputed[1:] for row in long])
    )
    return max(before, after)


def _correlation(left: Doubles, right: Doubles) -> float:
    if len(left) < _FEW or not left.std() or not right.std():
        return 0.0
    return float(np.corrcoef(left, right)[0, 1])
