"""Sampling: a vectorised batch against one slow, obvious row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.domain import Sampling, as_ints
from areal_actors.generation.torch.sampler import RowSampling, sample

NEUTRAL = Sampling()


def row(uniform: float, sampling: Sampling = NEUTRAL, prompt=(), output=(), allowed=None) -> RowSampling:
    """One row."""
    return RowSampling(
        sampling, uniform, as_ints(prompt), as_ints(output), None if allowed is None else np.array(allowed)
    )


def reference(logits, sampling: Sampling, prompt=(), output=(), allowed=None) -> np.ndarray:
    """The distribution that is to be sampled from, one obvious step after the other, in float64."""
    x = np.array(logits, dtype=np.float64)
    if allowed is not None:
        x[~np.array(allowed)] = -np.inf
    for token in {*prompt, *output}:
        x[token] = x[token] / sampling.repetition_penalty if x[token] > 0 else x[token] * sampling.repetition_penalty
    for token in output:
        x[token] -= sampling.frequency_penalty
    for token in set(output):
        x[token] -= sampling.presence_penalty
    for token, bias in sampling.logit_bias:
        x[token] += bias
    if sampling.temperature == 0:
        p = np.exp(x - x.max())
        return p / p.sum()
    p = np.exp((x - x.max()) / sampling.temperature)
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    if sampling.top_k:
        p[order[sampling.top_k :]] = 0
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= sampling.top_p]] = 0
    p[p < sampling.min_p * p.max()] = 0
    return p / p.sum()


# Values that are far from each other: a rounding error moves no token across a bound.
logits_strategy = st.permutations([1.5 * i for i in range(-4, 5)])
sampling_strategy = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.7, 1.0, 3.0]),
    top_p=st.sampled_from([1.0, 0.93, 0.51, 0.01]),
    top_k=st.sampled_from([0, 1, 3, 100]),
    min_p=st.sampled_from([0.0, 0.013]),
    frequency_penalty=st.sampled_from([0.0, 0.31]),
    presence_penalty=st.sampled_from([0.0, -0.17]),
    repetition_penalty=st.sampled_from([1.0, 1.37]),
    logit_bias=st.sampled_from([(), ((2, 0.7), (5, -3.1))]),
)
tokens_strategy = st.lists(st.integers(0, 8), max_size=4)


masks_strategy = st.none() | st.lists(st.booleans(), min_size=9, max_size=9).filter(any)


@given(
    logits_strategy,
    sampling_strategy,
    tokens_strategy,
    tokens_strategy,
    masks_strategy,
    st.floats(0, 1, exclude_max=True),
)
def test_one_row_agrees_with_the_reference(logits, sampling, prompt, output, allowed, uniform):  # noqa: PLR0917
    """The token is where the reference's cumulative distribution passes the uniform; logprobs are the reference's."""
    expected = reference(logits, sampling, prompt, output, allowed)
    raw = reference(logits, NEUTRAL)
    row_sampling = row(uniform, sampling, prompt, output, allowed)
    draw = sample(torch.tensor([logits], dtype=torch.float32), [row_sampling])
    token = draw.token_ids[0]
    ends = np.cumsum(expected)

    assert draw.is_finite == [True]
    assert allowed is None or allowed[token]
    np.testing.assert_allclose(draw.logprobs[0], np.log(expected[token]), atol=2e-5)
    np.testing.assert_allclose(draw.raw_logprobs[0], np.log(raw[token]), atol=2e-5)
    if sampling.temperature == 0:
        assert token == expected.argmax()
    else:
        assert ends[token] - expected[token] - 1e-6 <= uniform <= ends[token] + 1e-6


@given(st.integers(1, 1500), st.integers(0, 2**32 - 1))
def test_row_does_not_depend_on_its_batch(vocab_size, seed):
    """Any vocabulary size; beside neutral, truncated and masked rows, a row samples the same bits as alone."""
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(size=(6, vocab_size)).astype(np.float32)) * 4
    settings = [NEUTRAL, Sampling(top_p=0.6), Sampling(temperature=0.0), Sampling(temperature=0.5, min_p=0.1)]
    rows = [row(float(rng.random()), s) for s in settings]
    allowed = rng.random(vocab_size) < 0.1
    allowed[rng.integers(vocab_size)] = True
    rows += [row(float(rng.random()), allowed=allowed), row(float(rng.random()), allowed=~(allowed | True))]
    together = sample(logits, rows)
    assert together.is_finite == [True] * 5 + [False]
    assert allowed[together.token_ids[4]]
    for i in range(5):
        alone = sample(logits[i : i + 1], rows[i : i + 1])
        assert (together.token_ids[i], together.logprobs[i]) == (alone.token_ids[0], alone.logprobs[0])
        assert 0 <= together.token_ids[i] < vocab_size


rows_strategy = st.lists(
    st.tuples(
        logits_strategy,
        sampling_strategy,
        tokens_strategy,
        tokens_strategy,
        masks_strategy,
        st.floats(0, 1, exclude_max=True),
    ),
    min_size=2,
    max_size=6,
)


def test_flat_distribution_is_truncated_beyond_the_candidates():
    """top-p that needs more tokens than the quick look has is still exact."""
    draw = sample(torch.zeros(1, 5000), [row(0.999999, Sampling(top_p=0.5))])

    np.testing.assert_allclose(draw.logprobs[0], -np.log(2500), atol=1e-3)


def test_frequencies_follow_the_distribution():
    """Ten thousand draws are within five standard deviations of the probabilities."""
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    uniforms = np.random.default_rng(0).random(10_000)
    draw = sample(logits.expand(len(uniforms), -1), [row(float(u)) for u in uniforms])
    expected = torch.softmax(logits, 0).numpy()
    actual = np.bincount(draw.token_ids, minlength=4) / len(uniforms)

    assert (np.abs(actual - expected) < 5 * np.sqrt(expected / len(uniforms))).all()


def test_non_finite_logits_are_reported():
    """A row of NaN is marked, and its neighbour is sampled as ever."""
    draw = sample(torch.tensor([[torch.nan, 1.0], [0.0, 50.0]]), [row(0.5), row(0.5)])

    assert draw.is_finite == [False, True]
    assert draw.token_ids[1] == 1


def test_alternatives_are_the_most_probable():
    """``top_logprobs`` come in order, of the distribution that was sampled from, without what truncation removed."""
    draw = sample(torch.tensor([[0.0, 3.0, 2.0, 1.0]]), [row(0.5, Sampling(top_k=2, top_logprobs=3))])
    expected = np.log(reference([0.0, 3.0, 2.0, 1.0], Sampling(top_k=2))[[1, 2]])

    assert [top.token_id for top in draw.top[0]] == [1, 2]
    np.testing.assert_allclose([top.logprob for top in draw.top[0]], expected, atol=1e-6)


@given(logits_strategy, sampling_strategy, masks_strategy.filter(lambda mask: mask is not None))
def test_masked_row_is_a_distribution_over_allowed_tokens(logits, sampling, allowed):
    """Its probabilities sum to one, and a certain token has the log-probability 0; the raw ones know no mask."""
    sampling = evolve(sampling, top_logprobs=9)
    draw = sample(torch.tensor([logits], dtype=torch.float32), [row(0.5, sampling, allowed=allowed)])
    free = sample(torch.tensor([logits], dtype=torch.float32), [row(0.5)])

    assert sum(np.exp(top.logprob) for top in draw.top[0]) == pytest.approx(1, abs=1e-5)
    assert all(allowed[top.token_id] for top in draw.top[0])
    assert sum(allowed) > 1 or draw.logprobs == [0]
    if draw.token_ids == free.token_ids:
        assert draw.raw_logprobs == free.raw_logprobs
