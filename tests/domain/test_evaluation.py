"""The numbers of an evaluation agree with their definitions, computed the slow and obvious way."""

from __future__ import annotations

import math
from itertools import combinations
from statistics import fmean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.domain.evaluation import (
    Outcome,
    estimate_mean,
    estimate_runs,
    pass_at_k,
    student_quantile,
    summarize_outcomes,
)

values = st.floats(-10, 10).map(lambda value: round(value, 3))
clusters = st.lists(st.lists(values, min_size=1, max_size=4), min_size=2, max_size=6)


@given(st.integers(1, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_draws_with_a_solved_sample(case):
    """Chen et al.: over all draws of k samples without replacement."""
    num, solved, k = case
    draws = list(combinations([True] * solved + [False] * (num - solved), k))

    assert math.isclose(pass_at_k(num, solved, k), fmean(any(draw) for draw in draws), abs_tol=1e-12)


@given(st.lists(values, min_size=2, max_size=8))
def test_with_one_sample_per_problem_the_error_is_the_usual_one(samples):
    """The standard deviation of the sample divided by the square root of its size."""
    found = estimate_mean([[value] for value in samples])

    assert found.value == pytest.approx(fmean(samples), abs=1e-9)
    assert found.standard_error == pytest.approx(stdev(samples) / math.sqrt(len(samples)), abs=1e-9)


@given(st.integers(1, 60))
def test_student_quantile_leaves_a_fortieth_above(freedom):
    """The density, integrated by Simpson's rule up to the quantile."""
    quantile, num = student_quantile(freedom), 2_000
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    places = [quantile * index / num for index in range(num + 1)]
    heights = [scale * (1 + place**2 / freedom) ** (-(freedom + 1) / 2) for place in places]
    area = quantile / num / 3 * (heights[0] + heights[-1] + 4 * sum(heights[1:-1:2]) + 2 * sum(heights[2:-1:2]))

    assert area == pytest.approx(0.475, abs=1e-6)


@given(st.lists(values, min_size=2, max_size=8))
def test_interval_over_runs_is_students(samples):
    """Around the mean, with the usual standard error."""
    found = estimate_runs(samples)
    width = student_quantile(len(samples) - 1) * stdev(samples) / math.sqrt(len(samples))

    assert (found.low, found.high) == pytest.approx((fmean(samples) - width, fmean(samples) + width), abs=1e-9)


@given(clusters)
def test_error_is_clustered_by_problem(rewards):
    """Miller's equation 4 as it is written, over all pairs within a problem, with the correction for few problems."""
    flat = [value for cluster in rewards for value in cluster]
    mean = fmean(flat)
    pairs = sum((a - mean) * (b - mean) for cluster in rewards for a in cluster for b in cluster)
    expected = math.sqrt(max(pairs, 0.0) * len(rewards) / (len(rewards) - 1)) / len(flat)

    assert estimate_mean(rewards).standard_error == pytest.approx(expected, abs=1e-6)


@given(st.lists(values, min_size=2, max_size=6), st.integers(1, 5))
def test_samples_that_repeat_each_other_add_nothing(rewards, num_copies):
    """Were samples taken for problems, the interval would shrink with every copy."""
    once, copied = estimate_mean([[value] for value in rewards]), estimate_mean([[v] * num_copies for v in rewards])

    assert copied.standard_error == pytest.approx(once.standard_error, abs=1e-9)


def test_failed_episodes_count_as_zero_and_are_left_out_of_the_second_mean():
    """Both numbers are given; a failed episode with a reward has solved nothing."""
    rewards = {("0", 0): (1.0, False), ("0", 1): (1.0, True), ("1", 0): (0.5, False), ("1", 1): (1.0, False)}
    outcomes = [Outcome(task=t, member=m, reward=r, has_failed=f) for (t, m), (r, f) in rewards.items()]
    (found,) = summarize_outcomes(outcomes, solved_reward=1.0)

    assert (2, 4, 1) == (found.num_problems, found.num_episodes, found.num_failed)
    assert 0.625 == found.mean.value
    assert found.completed_mean is not None
    assert math.isclose(2.5 / 3, found.completed_mean.value)
    assert {1: 0.5, 2: 1.0} == {k: estimate.value for k, estimate in found.passes.items()}


def test_one_problem_has_no_interval_and_sets_are_separate():
    """Nothing is known about other problems from one."""
    outcomes = [Outcome(source=name, task=f"{name}-0", member=0, reward=1.0) for name in ("a", "b")]
    found = summarize_outcomes(outcomes, solved_reward=1.0)

    assert ["a", "b"] == [one.source for one in found]
    assert [(None, None)] * 2 == [(one.mean.low, one.mean.standard_error) for one in found]
