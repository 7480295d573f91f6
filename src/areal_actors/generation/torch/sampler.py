"""Sample ids and compute log-probabilities from logits, a batch at a time.

The order per row is: the grammar's mask, penalties and bias on the logits, temperature, top-k, top-p, min-p, then the
inverse of the cumulative distribution at the row's own uniform number. Rows with neutral settings, which are nearly all
in training, are neither sorted nor copied; the others go through the same steps together. Reported log-probabilities
are those of the distribution that was sampled from; raw ones ignore settings and grammar.

``start_sampling`` only launches the computation: an accelerator goes on with the next step while the results are on
their way, in one copy (``Sample.read``). ``sample_neutral`` never waits for the device, so a CUDA graph can contain it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from attrs import define, field, frozen

from areal_actors.domain import Ints, Sampling, TopLogprob

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
        return self.allowed is None and is_neutral(self.sampling)


@frozen(eq=False)
class Draw:
    """The sampled tokens, one per row.

    ``top`` holds the alternatives of rows that ask for them. ``is_finite`` is false where nothing could be sampled:
    logits were not finite, or no token was allowed.
    """

    token_ids: list[int]
    logprobs: list[float]
    raw_logprobs: list[float]
    top: list[tuple[TopLogprob, ...]]
    is_finite: list[bool]


@define(eq=False)
class Sample:
    """A sampled batch whose results may still be computed.

    ``results`` float64 [4, B] are ids, log-probabilities, raw ones and whether they are finite (1 or 0): every id and
    every float32 is exact in float64, so that one copy brings them all. The first ``num_rows`` columns count. ``tops``
    are candidates of some rows.
    """

    results: torch.Tensor
    num_rows: int
    tops: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(factory=dict)
    _host: torch.Tensor | None = None
    _arrived: Callable[[], None] | None = None

    @property
    def ids(self) -> torch.Tensor:
        """Return the sampled ids int64 [num_rows] on the device."""
        return self.results[0, : self.num_rows].long()

    def start_copy(self, landing: torch.Tensor | None = None) -> Sample:
        """Begin to copy the results to the host, and return the same sample. The results may then be overwritten.

        ``landing`` is memory of their shape that is not used before they are read; pinned, if they are on a GPU.
        """
        if landing is None:
            landing = torch.empty(self.results.shape, dtype=self.results.dtype, pin_memory=self.results.is_cuda)
        self._host = landing.copy_(self.results, non_blocking=True)
        if self.results.is_cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._arrived = event.synchronize
        return self

    def read(self) -> Draw:
        """Wait for the results."""
        if self._arrived is not None:
            self._arrived()
        results = self.results if self._host is None else self._host
        ids, logprobs, raw_logprobs, is_finite = results[:, : self.num_rows].tolist()
        top: list[tuple[TopLogprob, ...]] = [()] * len(ids)
        for row, (values, candidates) in self.tops.items():
            pairs = zip(candidates.tolist(), values.tolist(), strict=True)
            top[row] = tuple(TopLogprob(token_id=i, logprob=value) for i, value in pairs if value > float("-inf"))
        return Draw([int(i) for i in ids], logprobs, raw_logprobs, top, [flag == 1 for flag in is_finite])


def sample(logits: torch.Tensor, rows: Sequence[RowSampling]) -> Draw:
    """Sample one token per row of ``logits`` (float32 [B, V], not modified)."""
    return start_sampling(logits, rows).read()


def start_sampling(logits: torch.Tensor, rows: Sequence[RowSampling]) -> Sample:
    """Launch what ``sample`` computes. ``logits`` may be overwritten afterwards."""
    device = logits.device
    numbers = np.array([[row.uniform for row in rows], [row.sampling.temperature == 0 for row in rows]])
    uniforms, is_greedy = to_device(numbers, device)
    picked, norms = _pick(logits, uniforms, is_greedy > 0)
    shaped = [i for i, row in enumerate(rows) if not row.is_neutral]
    logprobs = None
    if shaped:
        at = to_device(np.array(shaped), device)
        logprobs = _shape(logits[at], [rows[i] for i in shaped])
        shaped_picked, _ = _pick(logprobs, uniforms[at], is_greedy[at] > 0)
        picked[at] = shaped_picked
    raw = logits.gather(1, picked).double() - norms
    taken = raw.clone()
    if logprobs is not None:
        # Set above, where ``logprobs`` was.
        taken[at] = logprobs.gather(1, shaped_picked).double()  # pyright: ignore[reportPossiblyUnboundVariable]
    tops = {}
    for i, row in enumerate(rows):
        if number := row.sampling.top_logprobs:
            whole = logits[i] - norms[i] if logprobs is None or row.is_neutral else logprobs[shaped.index(i)]
            tops[i] = torch.topk(whole.float(), number)
    return Sample(
        _pack(picked, taken, raw, norms), len(rows), {i: (top.values, top.indices) for i, top in tops.items()}
    )


def sample_neutral(logits: torch.Tensor, uniforms: torch.Tensor, is_greedy: torch.Tensor) -> torch.Tensor:
    """Return ``Sample.results`` of rows with neutral settings, without waiting for the device.

    The arguments are float32 [B, V], float64 [B] and bool [B].
    """
    picked, norms = _pick(logits, uniforms, is_greedy)
    raw = logits.gather(1, picked).double() - norms
    return _pack(picked, raw, raw, norms)


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy an array to the device. A GPU copies it after what it computes now, and the caller does not wait."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def is_neutral(sampling: Sampling) -> bool:
    """Return whether the settings sample from the plain softmax, or take its most probable token."""
    return sampling.temperature in (0.0, 1.0) and not (
        _is_truncated(sampling) or has_penalties(sampling) or sampling.logit_bias
    )


def has_penalties(sampling: Sampling) -> bool:
    """Return whether tokens that occurred before have other logits."""
    return any((sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty - 1.0))


def _is_truncated(sampling: Sampling) -> bool:
    return bool(sampling.temperature) and (sampling.top_p < 1.0 or sampling.top_k > 0 or sampling.min_p > 0.0)


def _pack(picked: torch.Tensor, taken: torch.Tensor, raw: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
    is_finite = torch.isfinite(norms) & torch.isfinite(taken)
    # Float32 is what consumers store. Rounding may make log-probabilities slightly positive.
    taken, raw = (x.float().double().clamp(max=0.0) for x in (taken, raw))
    return torch.cat((picked.double(), taken, raw, is_finite.double()), dim=1).t().contiguous()


def _pick(logits: torch.Tensor, uniforms: torch.Tensor, is_greedy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids int64 [B, 1] and the logarithm float64 [B, 1] of the sum of exp(``logits``) of each row.

    The id is the first at which the cumulative probabilities exceed the row's uniform number, or the most probable one
    of rows that are greedy. This takes two steps, over blocks and then within one, so that no cumulative sum over the
    vocabulary is needed.
    """
    peaks, best = logits.max(dim=-1, keepdim=True)
    weights = (logits - peaks).exp_()
    size = weights.shape[1]
    if size % _BLOCK:
        weights = torch.nn.functional.pad(weights, (0, -size % _BLOCK))
    blocks = weights.view(len(weights), -1, _BLOCK)
    masses = blocks.sum(-1).double()
    ends = masses.cumsum(-1)
    target = uniforms[:, None] * ends[:, -1:]
    block = _first_beyond(ends, target, masses)
    rest = target - (ends - masses).gather(1, block)
    inside = blocks.gather(1, block[..., None].expand(-1, 1, _BLOCK))[:, 0].double()
    drawn = block * _BLOCK + _first_beyond(inside.cumsum(-1), rest, inside)
    return torch.where(is_greedy[:, None], best, drawn), peaks.double() + ends[:, -1:].log()


def _first_beyond(ends: torch.Tensor, target: torch.Tensor, masses: torch.Tensor) -> torch.Tensor:
    """Return the index [B, 1] of the first of the ascending ``ends`` [B, n] above ``target`` [B, 1].

    It is never an index without mass.
    """
    index = (ends <= target).sum(-1, keepdim=True)
    places = torch.arange(ends.shape[1], device=ends.device)
    # Rounding may put the target above the last end.
    last = torch.where(masses > 0, places, 0).amax(-1, keepdim=True)
    return torch.minimum(index, last)


def _shape(logits: torch.Tensor, rows: Sequence[RowSampling]) -> torch.Tensor:
    """Return the log-probabilities [B, V] of the distributions to sample from. ``logits`` are overwritten.

    Repetition penalties apply to prompt and output; frequency and presence penalties to the output. No penalty or bias
    restores a masked token.
    """
    device, size = logits.device, logits.shape[1]
    masked = [i for i, row in enumerate(rows) if row.allowed is not None]
    if masked:
        allowed = to_device(np.stack([row.allowed for row in rows if row.allowed is not None]), device)
        at = to_device(np.array(masked), device)
        logits[at] = torch.where(allowed, logits[at], -torch.inf)
    repeating = [i for i, row in enumerate(rows) if row.sampling.repetition_penalty != 1.0]
    if repeating:
        at = to_device(np.array(repeating), device)
        seen = _count([np.concatenate((rows[i].prompt, rows[i].output)) for i in repeating], size, device) > 0
        factors = _column([rows[i].sampling.repetition_penalty for i in repeating], device)
        values = logits[at]
        logits[at] = torch.where(seen, torch.where(values > 0, values / factors, values * factors), values)
    counting = [i for i, r in enumerate(rows) if r.sampling.frequency_penalty or r.sampling.presence_penalty]
    if counting:
        at = to_device(np.array(counting), device)
        counts = _count([rows[i].output for i in counting], size, device).to(logits.dtype)
        frequency = _column([rows[i].sampling.frequency_penalty for i in counting], device)
        presence = _column([rows[i].sampling.presence_penalty for i in counting], device)
        logits[at] -= frequency * counts + presence * (counts > 0)
    biases = [(i, token_id, bias) for i, row in enumerate(rows) for token_id, bias in row.sampling.logit_bias]
    if biases:
        places, ids, added = zip(*biases, strict=True)
        indices = (to_device(np.array(places), device), to_device(np.array(ids), device))
        logits.index_put_(indices, to_device(np.array(added, dtype=np.float32), device), accumulate=True)
    settings = [row.sampling for row in rows]
    temperatures = to_device(np.array([[s.temperature or 1.0] for s in settings], dtype=np.float32), device)
    logprobs = torch.log_softmax(logits / temperatures, dim=-1)
    quick = [i for i, s in enumerate(settings) if _is_truncated(s) and s.top_k <= _NUM_CANDIDATES]
    slow = [i for i, s in enumerate(settings) if _is_truncated(s) and s.top_k > _NUM_CANDIDATES]
    if quick:
        slow += _truncate(logprobs, quick, settings, num_candidates=_NUM_CANDIDATES)
    if slow:
        _truncate(logprobs, slow, settings, num_candidates=logprobs.shape[1])
    return logprobs


def _count(rows: Sequence[npt.NDArray[Any]], size: int, device: torch.device) -> torch.Tensor:
    """Return how often each of ``size`` ids occurs in each of the rows, int64 [B, size]."""
    flat = np.concatenate([row.astype(np.int64) + i * size for i, row in enumerate(rows)])
    return torch.bincount(to_device(flat, device), minlength=len(rows) * size).view(len(rows), size)


def _column(numbers: Sequence[float], device: torch.device) -> torch.Tensor:
    return to_device(np.array(numbers, dtype=np.float32)[:, None], device)


def _truncate(
    logprobs: torch.Tensor, rows: Sequence[int], settings: Sequence[Sampling], *, num_candidates: int
) -> list[int]:
    """Apply top-k, top-p and min-p to some rows of ``logprobs`` [B, V], in place; removed tokens have -inf.

    Return the rows that need more candidates, which are unchanged.
    """
    device, size = logprobs.device, logprobs.shape[1]
    own = logprobs[to_device(np.array(rows), device)]
    if num_candidates < size:
        values, ids = torch.topk(own, num_candidates)
    else:
        values, ids = torch.sort(own, descending=True, stable=True)
    num = values.shape[1]
    is_kept = _is_kept(values, [settings[i] for i in rows])
    beyond: list[int] = []
    # Where all candidates survive, more of the vocabulary may. A GPU has to be waited for to see that.
    if num < size and any(settings[i].top_k == 0 for i in rows):
        beyond = [i for i, whole in zip(rows, is_kept[:, -1].tolist(), strict=True) if whole]
    values = values.masked_fill(~is_kept, -torch.inf)
    values -= torch.logsumexp(values, dim=-1, keepdim=True)
    done = [place for place, row in enumerate(rows) if row not in beyond]
    if done:
        at = to_device(np.array(done), device)
        kept = torch.full_like(own, -torch.inf).scatter_(1, ids, values)
        logprobs[to_device(np.array([rows[place] for place in done]), device)] = kept[at]
    return beyond


def _is_kept(values: torch.Tensor, settings: Sequence[Sampling]) -> torch.Tensor:
    """Return which of the descending log-probabilities ``values`` [B, n] survive, bool [B, n]; at least the first."""
    device, num = values.device, values.shape[1]
    probabilities = values.double().exp()
    places = torch.arange(num, device=device)
    top_k = to_device(np.array([[s.top_k or num] for s in settings]), device)
    numbers = np.array([[s.top_p, s.min_p, bool(s.top_k)] for s in settings])[:, :, None]
    top_p, min_p, has_top_k = to_device(numbers, device).unbind(1)
    is_kept = places < top_k
    inside = probabilities * is_kept
    ends = inside.cumsum(-1)
    # top-p is a share of the mass that top-k leaves. A token survives if the mass before it is below the bound, so the
    # token that crosses the bound is kept.
    bound = top_p * torch.where(has_top_k > 0, ends[:, -1:], 1.0)
    is_kept &= (ends - inside < bound) | (top_p >= 1.0)
    is_kept &= probabilities >= min_p * probabilities[:, :1]
    is_kept[:, 0] = True
    return is_kept
