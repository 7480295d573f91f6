"""Chunked scores: equal to torch's own log-softmax, forward and backward, whatever the chunks."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.training import forward
from areal_actors.training.distributions import Distributions
from areal_actors.training.forward import score_tokens


def distributions(temperatures):
    """Temperatures [n] without truncation."""
    return Distributions(settings=np.array([(temperature, 1.0, 0.0, 0.0) for temperature in temperatures]))


def plain_scores(hidden, weight, bias, targets, temperatures, *, cap):
    """The same by the book, holding all logits."""
    logits = hidden @ weight.T + (0 if bias is None else bias)
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    logprobs = (logits / torch.tensor(temperatures, dtype=torch.float32)[:, None]).log_softmax(-1)
    return logprobs.gather(-1, targets[:, None]).squeeze(-1), -(logprobs.exp() * logprobs).sum(-1)


@given(
    seed=st.integers(0, 1000),
    num_tokens=st.integers(1, 40),
    has_bias=st.booleans(),
    uses_entropy=st.booleans(),
    choices=st.sampled_from([[1.0], [0.5], [1.0, 1.3], [0.3, 0.7, 1.0, 1.3]]),
    cap=st.sampled_from([None, 3.0]),
)
def test_scores_and_gradients_equal_the_plain_ones(seed, num_tokens, has_bias, uses_entropy, choices, cap):  # noqa: PLR0917 - what is drawn
    """Log-probability, entropy and all gradients, with more tokens than a chunk holds."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, 6, generator=generator, requires_grad=True)
    weight = torch.randn(11, 6, generator=generator, requires_grad=True)
    bias = torch.randn(11, generator=generator, requires_grad=True) if has_bias else None
    targets = torch.randint(0, 11, (num_tokens,), generator=generator)
    inputs = [tensor for tensor in (hidden, weight, bias) if tensor is not None]
    factors = torch.randn(2, num_tokens, generator=generator)

    def gradients(scores):
        loss = (scores[0] * factors[0]).sum() + uses_entropy * (scores[1] * factors[1]).sum()
        return torch.autograd.grad(loss, inputs)

    temperatures = np.resize(choices, num_tokens)
    found = score_tokens(hidden, weight, bias, targets, distributions=distributions(temperatures), cap=cap)
    expected = plain_scores(hidden, weight, bias, targets, temperatures, cap=cap)

    assert torch.allclose(found.logprobs, expected[0], atol=1e-4)
    assert torch.allclose(found.entropies, expected[1], atol=1e-4)
    for ours, theirs in zip(gradients((found.logprobs, found.entropies)), gradients(expected), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-3)


def test_chunks_change_nothing(monkeypatch):
    """One chunk and many give the same numbers."""
    hidden, weight, targets = torch.randn(50, 6), torch.randn(11, 6), torch.randint(0, 11, (50,))
    whole = score_tokens(hidden, weight, None, targets)

    monkeypatch.setattr(forward, "_CHUNK_BYTES", 1)
    parts = score_tokens(hidden, weight, None, targets)

    assert torch.allclose(whole.logprobs, parts.logprobs, atol=1e-6)
    assert torch.allclose(whole.entropies, parts.entropies, atol=1e-6)
