"""Log-probabilities and entropies of trained tokens from one forward pass.

Only positions that predict a trained token go through the output head: with a vocabulary of 50,000 the logits of a
whole row would need more memory than everything else. The head and the log-softmax run in chunks, forward and backward,
so that memory is bounded by the chunk for any number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import numpy as np
import torch
from attrs import field, frozen
from torch import Tensor

from areal_actors.lib.transfers import to_device
from areal_actors.models import model_shape
from areal_actors.training.distributions import Distributions, truncation_bounds
from areal_actors.training.layers import decoder_of
from areal_actors.training.packing import Pack
from areal_actors.training.router_replay import replay_experts
from areal_actors.training.tree_attention import BLOCK_ATTENTION, PackMask, padded_length

_CHUNK_BYTES = 64 << 20
"""Size of the float32 logits held at a time. Larger chunks were not faster on CPU."""
_GPU_CHUNK_BYTES = 1 << 30
"""The same on a GPU, where the gradient of the head is read and written once for each chunk.

That took longer than the products for chunks of 110 tokens, 64 MiB of a vocabulary of 152k.
"""


def head_chunk_bytes(device_type: str) -> int:
    """Return the bytes of the float32 logits that the head computes at a time."""
    return _GPU_CHUNK_BYTES if device_type == "cuda" else _CHUNK_BYTES


@frozen(kw_only=True)
class TokenScores:
    """Scores float32 [n] of the trained tokens of a pack, in its order: log-probabilities and entropies.

    Both belong to the distributions that the tokens were sampled from. ``raw_logprobs`` are those of the plain softmax,
    without a gradient. ``is_outside`` (bool [n]) marks tokens that truncation would cut off under these weights: their
    log-probability and entropy are computed without truncation, so that every ratio is finite.
    """

    logprobs: Tensor = field(eq=False)
    entropies: Tensor = field(eq=False)
    raw_logprobs: Tensor = field(eq=False)
    is_outside: Tensor | None = field(default=None, eq=False)


def score_pack(model: Any, pack: Pack, *, mask: PackMask | None = None) -> TokenScores:
    """Run the decoder over ``pack`` and score its trained tokens. Differentiable unless under ``no_grad``.

    Packs with segments need a model that attends by plan. ``mask`` is that of the segments, created if it is not given.
    """
    hidden = run_decoder(model, pack, mask=mask)
    return score_hidden(model, hidden, to_device(pack.targets, hidden.device), distributions=pack.distributions)


def run_decoder(model: Any, pack: Pack, *, mask: PackMask | None = None) -> Tensor:
    """Return the hidden states [n, H] that predict the trained tokens of ``pack``; arguments as of ``score_pack``."""
    device, padding = next(model.parameters()).device, 0
    if pack.segments is not None:
        mask = mask or PackMask(pack.segments, device)
        if model.config._attn_implementation == BLOCK_ATTENTION:  # noqa: SLF001
            # Predictions at padding are not read, and no token attends to it.
            padding = padded_length(pack.input_ids.shape[1]) - pack.input_ids.shape[1]
    replay_experts(model, pack.routed_experts)
    hidden: Tensor = decoder_of(model)(
        input_ids=to_device(np.pad(pack.input_ids, ((0, 0), (0, padding))), device),
        position_ids=to_device(np.pad(pack.position_ids, ((0, 0), (0, padding))), device),
        attention_mask=mask,
        use_cache=False,
    ).last_hidden_state
    return hidden.reshape(-1, hidden.shape[-1]).index_select(0, to_device(pack.sources, device))


def score_hidden(
    model: Any, hidden: Tensor, targets: Tensor, *, distributions: Distributions | None = None
) -> TokenScores:
    """Return the scores of ``targets`` int64 [n] by the output head of ``model`` for ``hidden`` [n, H]."""
    head, shape = model.get_output_embeddings(), model_shape(model.config)
    bias = head.bias
    if shape.logit_scale != 1:
        hidden = hidden * shape.logit_scale
        bias = None if bias is None else bias * shape.logit_scale
    return score_tokens(hidden, head.weight, bias, targets, distributions=distributions, cap=shape.logit_cap)


def score_tokens(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    distributions: Distributions | None = None,
    cap: float | None = None,
) -> TokenScores:
    """Return the scores of ``targets`` int64 [n] for ``hidden`` [n, H], head ``weight`` [V, H] and ``bias`` [V].

    Without ``distributions`` the targets were sampled from the plain softmax. Temperatures and truncation cost nothing
    if no token has them. With ``cap`` c a logit x becomes c * tanh(x / c) before anything else, as Gemma computes it.
    """
    shaping = _Shaping.create(distributions, device=hidden.device)
    apply = cast("Any", _Scores.apply)
    logprobs, entropies, raw, is_outside = apply(hidden, weight, bias, targets, shaping, cap)
    return TokenScores(logprobs=logprobs, entropies=entropies, raw_logprobs=raw, is_outside=is_outside)


@frozen(eq=False)
class _Shaping:
    """Changes to logits [n, V] before the softmax, on their device; ``None`` if there are none.

    ``temperatures`` float32 [n] divide them. ``bounds`` float32 [n] are the smallest divided logits that truncation
    keeps, -inf if it is off; they are found in the forward pass and kept, so that the backward pass truncates
    identically. ``settings`` float64 [n, 4] and ``is_truncated`` bool [n] are as in ``Distributions``.
    """

    settings: Tensor
    temperatures: Tensor | None
    is_truncated: Tensor
    bounds: Tensor | None

    @classmethod
    def create(cls, distributions: Distributions | None, *, device: torch.device) -> _Shaping | None:
        if distributions is None:
            return None
        truncated = distributions.is_truncated
        if not distributions.has_temperatures and not truncated.any():
            return None
        settings = to_device(distributions.settings, device)
        return cls(
            settings=settings,
            temperatures=settings[:, 0].float() if distributions.has_temperatures else None,
            is_truncated=to_device(truncated, device),
            bounds=torch.full((len(truncated),), -torch.inf, device=device) if truncated.any() else None,
        )

    def find_bounds(self, logits: Tensor, part: slice, targets: Tensor) -> Tensor:
        """Store the bounds of truncation for divided ``logits``; return which targets it would cut off, bool [m]."""
        chosen = self.is_truncated[part].nonzero().squeeze(-1)
        is_outside = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
        if self.bounds is None or not len(chosen):
            return is_outside
        _, top_p, top_k, min_p = self.settings[part][chosen].T
        found = truncation_bounds(logits[chosen], top_p, top_k, min_p)
        outside = _pick(logits, targets)[chosen] < found
        # A target outside the bound would have the log-probability -inf, so it is scored without truncation.
        self.bounds[part][chosen] = found.masked_fill(outside, -torch.inf)
        is_outside[chosen] = outside
        return is_outside

    def chunk(self, part: slice) -> tuple[Tensor | None, Tensor | None]:
        """Return the temperatures and bounds of a chunk, the latter as a view that ``find_bounds`` fills."""
        return (
            None if self.temperatures is None else self.temperatures[part],
            None if self.bounds is None else self.bounds[part],
        )

    def scale(self, gradients: Tensor) -> Tensor:
        """Convert gradients [n] with respect to the divided logits to gradients with respect to the logits."""
        return gradients if self.temperatures is None else gradients / self.temperatures


class _Scores(torch.autograd.Function):
    """Chunked log-softmax over the head's output.

    With p the probabilities, H the entropy and y the target: d logprob / d logits = onehot(y) - p, and
    d entropy / d logits = -p (log p + H), each divided by the token's temperature. What truncation cuts off has
    probability 0 and no gradient; which tokens it keeps is taken as given.
    """

    @staticmethod
    def forward(  # noqa: PLR0917 - torch passes them by position
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        shaping: _Shaping | None,
        cap: float | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return log-probabilities, entropies, plain log-probabilities (float32 [n]) and ``is_outside`` (bool [n])."""
        weight_c, hidden_c = _compute_dtype(weight), _compute_dtype(hidden)
        logprobs = torch.empty(len(targets), device=hidden.device)
        entropies, normalisers, raw = (torch.empty_like(logprobs) for _ in range(3))
        is_outside = torch.zeros(len(targets), dtype=torch.bool, device=hidden.device)
        for part in _chunks(targets, len(weight)):
            logits = torch.nn.functional.linear(hidden_c[part], weight_c)
            temperatures, bounds = (None, None) if shaping is None else shaping.chunk(part)
            if shaping is not None:
                plain = _shape(logits, bias, cap, None, None)
                raw[part] = _pick(plain, targets[part]) - plain.logsumexp(-1)
                if bounds is not None:
                    divided = _shape(logits, bias, cap, temperatures, None)
                    is_outside[part] = shaping.find_bounds(divided, part, targets[part])
            logprobs[part], entropies[part], normalisers[part] = _compiled(_softmax_scores, hidden.is_cuda)(
                logits, bias, cap, temperatures, bounds, targets[part]
            )
        ctx.save_for_backward(hidden_c, weight_c, bias, targets, normalisers, entropies)
        ctx.dtypes, ctx.shaping, ctx.cap = (hidden.dtype, weight.dtype), shaping, cap
        raw = logprobs.clone() if shaping is None else raw
        ctx.mark_non_differentiable(raw, is_outside)
        return logprobs, entropies, raw, is_outside

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return gradients of hidden states, weight and bias; the logits are recomputed, chunk by chunk."""
        hidden, weight, bias, targets, normalisers, entropies = ctx.saved_tensors
        shaping: _Shaping | None = ctx.shaping
        grad_logprobs, grad_entropies = gradients[:2]
        if shaping is not None:
            grad_logprobs, grad_entropies = shaping.scale(grad_logprobs), shaping.scale(grad_entropies)
        grad_hidden = torch.empty_like(hidden)
        # A frozen head gets no gradient: a third of the products here, and a float32 copy of the head.
        grad_weight = torch.zeros(weight.shape, device=weight.device) if ctx.needs_input_grad[1] else None
        grad_bias = None if bias is None else torch.zeros_like(bias)
        # The usual case, without an entropy bonus, is cheaper. On a GPU, looking would wait for the device.
        has_entropy_gradient = hidden.is_cuda or bool(grad_entropies.any())
        for part in _chunks(targets, len(weight)):
            temperatures, bounds = (None, None) if shaping is None else shaping.chunk(part)
            grad = _compiled(_logit_gradients, hidden.is_cuda)(
                torch.nn.functional.linear(hidden[part], weight),
                bias,
                ctx.cap,
                temperatures,
                bounds,
                targets[part],
                normalisers[part],
                entropies[part],
                grad_logprobs[part],
                grad_entropies[part] if has_entropy_gradient else None,
            )
            if grad_bias is not None:
                grad_bias += grad.sum(0, dtype=grad_bias.dtype)
            grad = grad.to(weight.dtype)
            torch.matmul(grad, weight, out=grad_hidden[part])
            if grad_weight is not None and grad.dtype == grad_weight.dtype:
                # In place: a separate product [V, H] for each chunk would need as much memory as the weight.
                grad_weight.addmm_(grad.T, hidden[part])
            elif grad_weight is not None:
                grad_weight += grad.T @ hidden[part]
        hidden_dtype, weight_dtype = ctx.dtypes
        grad_weight = None if grad_weight is None else grad_weight.to(weight_dtype)
        return grad_hidden.to(hidden_dtype), grad_weight, grad_bias, None, None, None


@cache
def _compiled(function: Callable[..., Any], is_cuda: bool) -> Callable[..., Any]:  # noqa: FBT001
    """Return ``function``, compiled for a GPU: operation by operation, it would read or write the logits many times."""
    return torch.compile(function, dynamic=True) if is_cuda else function


def _shape(
    logits: Tensor, bias: Tensor | None, cap: float | None, temperatures: Tensor | None, bounds: Tensor | None
) -> Tensor:
    """Return the logits [m, V] of the distributions that m tokens were sampled from, float32."""
    shaped = logits.float()
    if bias is not None:
        shaped = shaped + bias
    if cap is not None:
        shaped = cap * (shaped / cap).tanh()
    if temperatures is not None:
        shaped = shaped / temperatures[:, None]
    return shaped if bounds is None else shaped.masked_fill(shaped < bounds[:, None], -torch.inf)


def _softmax_scores(  # noqa: PLR0917 - a kernel's operands
    logits_MV: Tensor,
    bias: Tensor | None,
    cap: float | None,
    temperatures: Tensor | None,
    bounds: Tensor | None,
    targets: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities, entropies and normalisers, float32 [m]."""
    shaped = _shape(logits_MV, bias, cap, temperatures, bounds)
    normalisers = shaped.logsumexp(-1)
    logprobs = shaped - normalisers[:, None]
    # Truncated logits are -inf, and 0 times -inf would be nan.
    entropies = -(logprobs.exp() * logprobs.clamp(min=-1e4)).sum(-1)
    return _pick(logprobs, targets), entropies, normalisers


def _logit_gradients(  # noqa: PLR0917 - a kernel's operands
    logits_MV: Tensor,
    bias: Tensor | None,
    cap: float | None,
    temperatures: Tensor | None,
    bounds: Tensor | None,
    targets: Tensor,
    normalisers: Tensor,
    entropies: Tensor,
    grad_logprobs: Tensor,
    grad_entropies: Tensor | None,
) -> Tensor:
    """Return the gradient of the logits [m, V] before temperatures divide them, in their own format."""
    logprobs = _shape(logits_MV, bias, cap, temperatures, bounds) - normalisers[:, None]
    inner = grad_logprobs[:, None]
    if grad_entropies is not None:
        inner = inner + grad_entropies[:, None] * (logprobs.clamp(min=-1e4) + entropies[:, None])
    is_target = torch.arange(logprobs.shape[1], device=targets.device)[None] == targets[:, None]
    gradient = is_target * grad_logprobs[:, None] - logprobs.exp() * inner
    if cap is not None:
        gradient = gradient * (1 - (_shape(logits_MV, bias, cap, None, None) / cap).square())
    return gradient.to(logits_MV.dtype)


def _pick(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the entries [n] of ``logits`` [n, V] at ``targets`` [n]."""
    return logits.gather(-1, targets[:, None]).squeeze(-1)


def _compute_dtype(tensor: Tensor) -> Tensor:
    """Cast an operand as autocast would, which has no effect by itself inside an autograd function."""
    kind = tensor.device.type
    return tensor.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else tensor


def _chunks(targets: Tensor, vocab_size: int) -> list[slice]:
    num_tokens = len(targets)
    size = max(16, head_chunk_bytes(targets.device.type) // (4 * vocab_size))
    return [slice(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)]
