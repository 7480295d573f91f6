"""Log-probabilities and entropies of trained tokens from one forward pass.

Only positions that predict a trained token meet the output head: with a vocabulary of 50,000 the logits of a whole row
would outweigh everything else. The head and the log-softmax run in chunks, forward and backward, so that memory is
bounded by the chunk whatever the number of tokens.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from attrs import field, frozen
from torch import Tensor

from areal_actors.training.packing import Pack
from areal_actors.training.tree_attention import tree_mask

__all__ = ["TokenScores", "score_pack", "score_tokens"]

_CHUNK_BYTES = 64 << 20
"""Float32 logits held at a time. Larger chunks were not faster on CPU."""


@frozen(kw_only=True)
class TokenScores:
    """Float32 [n] for the trained tokens of a pack, in its order: log-probabilities and the entropies around them.

    ``raw_logprobs`` are those at temperature 1, without a gradient.
    """

    logprobs: Tensor = field(eq=False)
    entropies: Tensor = field(eq=False)
    raw_logprobs: Tensor = field(eq=False)


def score_pack(model: Any, pack: Pack, *, temperature: float = 1.0) -> TokenScores:
    """Run the decoder over ``pack`` and score its trained tokens. Differentiable unless under ``no_grad``."""
    device = next(model.parameters()).device
    hidden = model.get_decoder()(
        input_ids=torch.from_numpy(pack.input_ids).to(device),
        position_ids=torch.from_numpy(pack.position_ids).to(device),
        attention_mask=None if pack.segments is None else tree_mask(pack.segments, device),
        use_cache=False,
    ).last_hidden_state
    sources = torch.from_numpy(pack.sources).to(device)
    selected_NH = hidden.reshape(-1, hidden.shape[-1]).index_select(0, sources)
    head = model.get_output_embeddings()
    targets = torch.from_numpy(pack.targets).to(device)
    return score_tokens(selected_NH, head.weight, head.bias, targets, temperature=temperature)


def score_tokens(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *, temperature: float = 1.0
) -> TokenScores:
    """Scores of ``targets`` int64 [n] given ``hidden`` [n, H] and the head ``weight`` [V, H] (and ``bias`` [V])."""
    if temperature != 1.0:
        hidden, bias = hidden / temperature, None if bias is None else bias / temperature
    apply = cast("Any", _Scores.apply)
    logprobs, entropies, raw = apply(hidden, weight, bias, targets, temperature)
    return TokenScores(logprobs=logprobs, entropies=entropies, raw_logprobs=raw)


class _Scores(torch.autograd.Function):
    """Chunked log-softmax over the head's output.

    With p the probabilities, H the entropy and y the target: d logprob / d logits = onehot(y) - p, and
    d entropy / d logits = -p (log p + H).
    """

    @staticmethod
    def forward(  # noqa: PLR0917 - torch passes them by position
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Float32 [n] log-probabilities, entropies, and log-probabilities at temperature 1."""
        weight_c, hidden_c = _compute_dtype(weight), _compute_dtype(hidden)
        logprobs = torch.empty(len(targets), device=hidden.device)
        entropies, normalisers, raw = (torch.empty_like(logprobs) for _ in range(3))
        for part in _chunks(len(targets), len(weight)):
            logits = _logits(hidden_c[part], weight_c, bias)
            normaliser = logits.logsumexp(-1)
            logprobs[part] = logits.gather(-1, targets[part, None]).squeeze(-1) - normaliser
            if temperature != 1.0:
                raw[part] = _raw_logprobs(logits, targets[part], temperature)
            logits.sub_(normaliser[:, None])
            entropies[part] = -(logits.exp().mul_(logits.clamp_(min=-1e4))).sum(-1)
            normalisers[part] = normaliser
        ctx.save_for_backward(hidden_c, weight_c, bias, targets, normalisers, entropies)
        ctx.dtypes = hidden.dtype, weight.dtype
        raw = logprobs.clone() if temperature == 1.0 else raw
        ctx.mark_non_differentiable(raw)
        return logprobs, entropies, raw

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of hidden states, weight and bias; the logits are computed again, chunk by chunk."""
        hidden, weight, bias, targets, normalisers, entropies = ctx.saved_tensors
        grad_logprobs, grad_entropies, _ = gradients
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros(weight.shape, device=weight.device)
        grad_bias = None if bias is None else torch.zeros_like(bias)
        for part in _chunks(len(targets), len(weight)):
            logits = _logits(hidden[part], weight, bias).sub_(normalisers[part, None])
            grad = _grad_logits(logits, grad_logprobs[part], grad_entropies[part], entropies[part])
            grad.scatter_add_(1, targets[part, None], grad_logprobs[part, None])
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            grad = grad.to(weight.dtype)
            torch.matmul(grad, weight, out=grad_hidden[part])
            _accumulate(grad_weight, grad, hidden[part])
        hidden_dtype, weight_dtype = ctx.dtypes
        return grad_hidden.to(hidden_dtype), grad_weight.to(weight_dtype), grad_bias, None, None


def _grad_logits(logprobs_NV: Tensor, grad_logprobs: Tensor, grad_entropies: Tensor, entropies: Tensor) -> Tensor:
    """-p (g_logprob + g_entropy (log p + H)), in place: all of the gradient but the target's own entry."""
    probabilities = logprobs_NV.exp()
    if not grad_entropies.any():
        return probabilities.mul_(-grad_logprobs[:, None])
    factor = (
        logprobs_NV.clamp_(min=-1e4).add_(entropies[:, None]).mul_(grad_entropies[:, None]).add_(grad_logprobs[:, None])
    )
    return probabilities.mul_(factor).neg_()


def _raw_logprobs(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Log-probabilities [n] of ``targets`` for what ``logits`` [n, V] were before they were divided."""
    undivided = logits * temperature
    return undivided.gather(-1, targets[:, None]).squeeze(-1) - undivided.logsumexp(-1)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    logits = torch.nn.functional.linear(hidden, weight).float()
    return logits if bias is None else logits.add_(bias)


def _accumulate(total: Tensor, grad: Tensor, hidden: Tensor) -> None:
    if grad.dtype == total.dtype:
        total.addmm_(grad.T, hidden)
    else:
        total += grad.T @ hidden


def _compute_dtype(tensor: Tensor) -> Tensor:
    """What autocast would make of an operand; inside an autograd function it does not act by itself."""
    kind = tensor.device.type
    return tensor.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else tensor


def _chunks(num_tokens: int, vocab_size: int) -> list[slice]:
    size = max(16, _CHUNK_BYTES // (4 * vocab_size))
    return [slice(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)]
