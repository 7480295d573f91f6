"""Sample ids and compute log-probabilities from logits, a batch at a time.

The order per row is: the grammar's mask, penalties and bias on the logits, temperature, top-k, top-p, min-p, then the
inverse of the cumulative distribution at the row's own uniform number. Rows with neutral settings, which are nearly all
in training, are neither sorted nor copied. Reported log-probabilities are those of the distribution that was sampled
from; raw ones ignore settings and grammar.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen

from areal_actors.domain import Ints, Sampling, TopLogprob

__all__ = ["Draw", "RowSampling", "sample"]

_BLOCK = 256
_NUM_CANDIDATES = 1024
"""Truncated rows consider this many most probable tokens before they sort the whole vocabulary."""


@frozen(eq=False)
class RowSampling:
    """How to sample one row: settings, its uniform number in [0, 1), and the tokens to which penalties apply.

    ``allowed`` (bool [V]) are the tokens that may be sampled; ``None`` allows all.
    """

    sampling: Sampling
    uniform: float
    prompt: Ints
    output: Ints
    allowed: npt.NDArray[np.bool_] | None = None

    @property
    def is_neutral(self) -> bool:
        """Return whether the row is sampled from the plain softmax."""
        return self.allowed is None and _is_neutral(self.sampling)


@frozen(eq=False)
class Draw:
    """The sampled tokens, one per row.

    ``is_finite`` is false where nothing could be sampled: logits were not finite, or no token was allowed.
    """

    token_ids: list[int]
    logprobs: list[float]
    raw_logprobs: list[float]
    top: list[tuple[TopLogprob, ...]]
    is_finite: list[bool]


def sample(logits: torch.Tensor, rows: Sequence[RowSampling]) -> Draw:
    """Sample one token per row of ``logits`` (float32 [B, V], not modified)."""
    log_norm = torch.logsumexp(logits, dim=-1, keepdim=True)
    is_finite = torch.isfinite(log_norm[:, 0])
    raw = logits - log_norm
    if not is_finite.all():
        # Keep NaN out of the rest of the computation; ``is_finite`` reports these rows.
        raw = torch.where(is_finite[:, None], raw, 0.0)
    logprobs = _shape(raw, logits, rows)
    uniforms = torch.tensor([row.uniform for row in rows], dtype=torch.float64, device=logits.device)
    is_greedy = torch.tensor([row.sampling.temperature == 0 for row in rows], device=logits.device)
    drawn = _invert(torch.exp(logprobs), uniforms)
    if any(row.sampling.temperature == 0 for row in rows):
        drawn = torch.where(is_greedy, logprobs.argmax(dim=-1), drawn)
    picked = drawn[:, None]
    # Rounding may make log-probabilities slightly positive.
    taken = logprobs.gather(1, picked)[:, 0].clamp(max=0.0)
    return Draw(
        token_ids=drawn.tolist(),
        logprobs=taken.tolist(),
        raw_logprobs=raw.gather(1, picked)[:, 0].clamp(max=0.0).tolist(),
        top=[_top(logprobs[i], row.sampling.top_logprobs) for i, row in enumerate(rows)],
        is_finite=(is_finite & torch.isfinite(taken)).tolist(),
    )


def _shape(raw: torch.Tensor, logits: torch.Tensor, rows: Sequence[RowSampling]) -> torch.Tensor:
    """Return the log-probabilities [B, V] of the distributions to sample from.

    This is ``raw`` itself if all rows are neutral.
    """
    shaped = [i for i, row in enumerate(rows) if not row.is_neutral]
    if not shaped:
        return raw
    out = raw.clone()
    for i in shaped:
        sampling = rows[i].sampling
        adjusted = _adjust(logits[i], rows[i])
        temperature = sampling.temperature or 1.0
        logprobs = torch.log_softmax(adjusted / temperature, dim=-1)
        out[i] = _truncate(logprobs, sampling) if sampling.temperature else logprobs
    return out


def _is_neutral(sampling: Sampling) -> bool:
    return sampling.temperature in (0.0, 1.0) and not _is_truncated(sampling) and not _is_adjusted(sampling)


def _is_truncated(sampling: Sampling) -> bool:
    return bool(sampling.temperature) and (sampling.top_p < 1.0 or sampling.top_k > 0 or sampling.min_p > 0.0)


def _is_adjusted(sampling: Sampling) -> bool:
    penalties = (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty - 1.0)
    return any(penalties) or bool(sampling.logit_bias)


def _adjust(logits: torch.Tensor, row: RowSampling) -> torch.Tensor:
    """Return ``logits`` [V] after the mask, penalties and bias, none of which restores a masked token.

    Repetition penalties apply to prompt and output; frequency and presence penalties to the output.
    """
    sampling = row.sampling
    if row.allowed is not None:
        logits = torch.where(torch.from_numpy(row.allowed).to(logits.device), logits, -torch.inf)
    if not _is_adjusted(sampling):
        return logits
    adjusted = logits.clone()
    output = torch.as_tensor(row.output.copy(), device=logits.device).long()
    if sampling.repetition_penalty != 1.0:
        prompt = torch.as_tensor(row.prompt.copy(), device=logits.device).long()
        seen = torch.cat((prompt, output))
        values = adjusted[seen]
        factor = sampling.repetition_penalty
        adjusted[seen] = torch.where(values > 0, values / factor, values * factor)
    counts = torch.bincount(output, minlength=len(logits)).to(adjusted.dtype)
    adjusted -= sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)
    for token_id, bias in sampling.logit_bias:
        adjusted[token_id] += bias
    return adjusted


def _truncate(logprobs: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return ``logprobs`` [V] after top-k, top-p and min-p, normalised again; removed tokens have -inf."""
    if not _is_truncated(sampling):
        return logprobs
    size = len(logprobs)
    num = min(size, max(_NUM_CANDIDATES, sampling.top_k))
    values, ids = torch.topk(logprobs, num)
    kept = _num_kept(values, sampling)
    # All candidates survived, so more of the vocabulary may: sort it.
    if kept == num < size:
        values, ids = torch.sort(logprobs, descending=True, stable=True)
        kept = _num_kept(values, sampling)
    out = torch.full_like(logprobs, -torch.inf)
    out[ids[:kept]] = values[:kept] - torch.logsumexp(values[:kept], dim=0)
    return out


def _num_kept(values: torch.Tensor, sampling: Sampling) -> int:
    """Return how many of the descending log-probabilities ``values`` survive; at least one."""
    probabilities = values.double().exp()
    kept = len(values) if sampling.top_k == 0 else min(sampling.top_k, len(values))
    if sampling.top_p < 1.0:
        mass = probabilities[:kept].sum() if sampling.top_k else probabilities.new_ones(())
        # A token survives if the mass before it is below top_p, so the token that crosses the bound is kept.
        before = probabilities[:kept].cumsum(0) - probabilities[:kept]
        kept = int((before < sampling.top_p * mass).sum())
    if sampling.min_p > 0.0:
        kept = int((probabilities[:kept] >= sampling.min_p * probabilities[0]).sum())
    return max(kept, 1)


def _invert(probabilities: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return the first id [B] at which the cumulative ``probabilities`` [B, V] exceed ``uniforms`` [B] of their total.

    This takes two steps, over blocks and then within one, so that no cumulative sum over the vocabulary is needed.
    """
    size = probabilities.shape[1]
    if size % _BLOCK:
        probabilities = torch.nn.functional.pad(probabilities, (0, -size % _BLOCK))
    blocks = probabilities.view(len(probabilities), -1, _BLOCK)
    masses = blocks.sum(-1).double()
    ends = masses.cumsum(-1)
    target = uniforms[:, None] * ends[:, -1:]
    block = _first_beyond(ends, target, masses)
    rest = target - (ends - masses).gather(1, block)
    inside = blocks.gather(1, block[..., None].expand(-1, 1, _BLOCK))[:, 0].double()
    return (block * _BLOCK + _first_beyond(inside.cumsum(-1), rest, inside))[:, 0]


def _first_beyond(ends: torch.Tensor, target: torch.Tensor, masses: torch.Tensor) -> torch.Tensor:
    """Return the index [B, 1] of the first of the ascending ``ends`` [B, n] above ``target`` [B, 1].

    It is never an index without mass.
    """
    index = (ends <= target).sum(-1, keepdim=True)
    places = torch.arange(ends.shape[1], device=ends.device)
    # Rounding may put the target above the last end.
    last = torch.where(masses > 0, places, 0).amax(-1, keepdim=True)
    return torch.minimum(index, last)


def _top(logprobs: torch.Tensor, number: int) -> tuple[TopLogprob, ...]:
    if number == 0:
        return ()
    values, ids = torch.topk(logprobs, number)
    pairs = zip(ids.tolist(), values.tolist(), strict=True)
    return tuple(TopLogprob(token_id=i, logprob=value) for i, value in pairs if value > float("-inf"))
