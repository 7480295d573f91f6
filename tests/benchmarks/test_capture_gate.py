"""A few runs of the study of the capture gate: honest ones go on, and faults under nearly uniform weights stop."""

from __future__ import annotations

import anyio
import pytest
from benchmarks.capture_gate import CONVERGED, perform

from areal_actors.testing.faults import Fault


@pytest.mark.parametrize(("job", "dtype"), [("entropy 4", "bfloat16"), ("entropy 0.1", "bfloat16")])
def test_an_honest_run_is_not_stopped(job: str, dtype: str):
    """Where most ids matter, and where one has nearly all of the probability."""
    run = anyio.run(lambda: perform(job, dtype, seed=5, num_steps=2))

    assert run.stopped_at is None
    assert run.mean_gap > 1e-3


@pytest.mark.parametrize("seed", [8, 13])
def test_an_honest_run_of_a_converged_policy_is_not_stopped(seed: int):
    """Members that answer alike repeat one rounding error, of 1e-7 nats. These seeds were stopped for it."""
    run = anyio.run(lambda: perform(CONVERGED, "float32", seed=seed, num_steps=2))

    assert run.stopped_at is None
    assert run.entropy < 0.1


@pytest.mark.parametrize("fault", [Fault.DROPPED_TOKEN, Fault.DUPLICATED_TOKEN])
def test_a_fault_under_nearly_uniform_weights_stops_the_first_step(fault: Fault):
    """The differences are below what a fixed bound of 0.1 allowed."""
    run = anyio.run(lambda: perform("entropy 5.9", "bfloat16", seed=5, fault=fault))

    assert 1 == run.stopped_at
    assert "tokens in the answer" in run.cause or "token was lost" in run.cause
    assert run.mean_gap < 0.1
    assert not run.is_stopped_by_fixed_bound
