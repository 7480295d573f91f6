"""Which differences between engine and trainer are rounding."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.training.capture import Comparison, NoiseModel

VOCAB = 400
SHARES = {"float32": 2e-6, "bfloat16": 0.02}
"""Standard deviation of the rounding of a logit as a share of the spread of the logits: the largest that was seen."""


def sample(rng, num_rows, num_tokens, *, spread, share=0.0, temperature=1.0):
    """Rows of tokens from Gaussian logits [n, V], reported with rounded logits at ``temperature``."""
    rows = []
    for _ in range(num_rows):
        logits = rng.normal(0, spread, (num_tokens, VOCAB))
        rounded = (logits + rng.normal(0, share * spread, logits.shape)) / temperature
        trainer, engine = (values - np.logaddexp.reduce(values, 1)[:, None] for values in (logits, rounded))
        gumbel = rng.gumbel(size=logits.shape)
        ids = (engine + gumbel).argmax(1)[:, None]
        taken = [np.take_along_axis(values, ids, 1)[:, 0] for values in (engine, trainer)]
        rows.append(Comparison(reported=taken[0], recomputed=taken[1]))
    return rows


def model(dtype):
    return NoiseModel(vocab_size=VOCAB, engine_dtype=dtype, trainer_dtype=dtype)


@given(
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    spread=st.floats(0.05, 20.0),
    num_rows=st.integers(1, 12),
    num_tokens=st.integers(1, 40),
)
def test_rounding_raises_no_alarm(seed, dtype, spread, num_rows, num_tokens):
    """From nearly uniform to nearly certain tokens, in one token and in hundreds."""
    rows = sample(np.random.default_rng(seed), num_rows, num_tokens, spread=spread, share=SHARES[dtype])

    assert max(model(dtype).excesses(rows)) < 1
    assert model(dtype).systematic_gap(rows) is None


def repeat(rng, rows, *, num_copies, num_shared, jitter):
    """Each row several times, as members of a group that answer alike; all copies begin with tokens of the first row.

    A copy repeats the computation, so its rounding error is the same, up to ``jitter`` (the order of a batch).
    """
    repeated = []
    for number, row in enumerate(rows):
        own = np.arange(len(row.reported)) >= num_shared
        columns = {
            name: np.where(own, getattr(row, name), getattr(rows[0], name)) for name in ("reported", "recomputed")
        }
        contexts = np.where(own, number * 1000, 0) + np.arange(len(own))
        for _ in range(num_copies):
            noise = rng.normal(0, jitter, len(own))
            repeated.append(
                Comparison(
                    reported=columns["reported"] + noise,
                    recomputed=columns["recomputed"],
                    contexts=contexts.astype(np.uint64),
                )
            )
    return repeated


@given(
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    spread=st.floats(0.5, 12.0),
    shape=st.tuples(st.integers(1, 6), st.integers(2, 24)),
    repetition=st.fixed_dictionaries({"num_copies": st.integers(8, 64), "num_shared": st.integers(0, 12)}),
)
def test_rounding_raises_no_alarm_when_answers_repeat(seed, dtype, spread, shape, repetition):
    """A policy that has converged gives the same answers again: their common rounding error is no new evidence."""
    rng = np.random.default_rng(seed)
    copies = repeat(rng, sample(rng, *shape, spread=spread, share=SHARES[dtype]), **repetition, jitter=1e-8)

    assert model(dtype).systematic_gap(copies) is None


def test_rounding_raises_no_alarm_where_no_token_is_in_doubt():
    """Measured in float32 on a policy that had converged: 4e-7 nats on log-probabilities that differ by 2e-4."""
    reported = np.array([-0.020660974, -0.020607559, -0.020610524, -0.020672629, -0.020782819, -0.020842675])
    recomputed = np.array([-0.020661354, -0.020607948, -0.020610809, -0.020672798, -0.020782471, -0.020842552])
    rows = [
        Comparison(reported=reported, recomputed=recomputed, contexts=np.arange(6, dtype=np.uint64) + 6 * number)
        for number in range(12)
    ]

    assert model("float32").systematic_gap(rows) is None


@pytest.mark.parametrize(("dtype", "temperature"), [("float32", 0.998), ("bfloat16", 0.9)])
def test_another_temperature_shows_in_repeated_answers_too(dtype, temperature):
    """Copies add nothing, and take nothing away."""
    rng = np.random.default_rng(0)
    rows = sample(rng, 40, 30, spread=2.0, share=SHARES[dtype], temperature=temperature)
    copies = repeat(rng, rows, num_copies=4, num_shared=0, jitter=1e-8)

    assert "change by" in model(dtype).systematic_gap(copies)


@given(seed=st.integers(0, 2**32 - 1), dtype=st.sampled_from(["float32", "bfloat16"]), spread=st.floats(0.05, 8.0))
def test_values_of_the_neighbouring_token_are_bad(seed, dtype, spread):
    """Whatever the entropy, nearly all rows are bad."""
    rows = sample(np.random.default_rng(seed), 8, 12, spread=spread, share=SHARES[dtype])
    shifted = [Comparison(reported=np.roll(row.reported, 1), recomputed=row.recomputed) for row in rows]

    assert np.mean([excess > 1 for excess in model(dtype).excesses(shifted)]) > 0.5


@given(seed=st.integers(0, 2**32 - 1), dtype=st.sampled_from(["float32", "bfloat16"]), spread=st.floats(0.2, 2.5))
def test_small_other_temperature_shows_over_a_step(seed, dtype, spread):
    """A row of temperature 0.9 may be rounding in bfloat16; 1,200 tokens are not."""
    rows = sample(np.random.default_rng(seed), 40, 30, spread=spread, share=SHARES[dtype], temperature=0.9)
    share = np.mean([excess > 1 for excess in model(dtype).excesses(rows)])

    assert share > 0.1 or model(dtype).systematic_gap(rows) is not None


def break_at(row, rng, at):
    """What follows has another context: other logits of the same spread."""
    other = rng.permutation(row.recomputed)
    return Comparison(
        reported=row.reported, recomputed=np.where(np.arange(len(other)) < at, row.recomputed, other - 0.3)
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "change",
    [
        lambda row, rng: break_at(row, rng, 5),
        lambda row, rng: break_at(row, rng, 0),
        lambda row, _: Comparison(reported=row.reported - 0.5, recomputed=row.recomputed),
        lambda row, rng: Comparison(
            reported=row.reported + rng.normal(0, 0.6, len(row.reported)), recomputed=row.recomputed
        ),
    ],
    ids=["lost token", "made up", "constant", "other weights"],
)
def test_rows_with_gross_faults_are_bad(dtype, change):
    """Each row by itself."""
    rng = np.random.default_rng(3)
    rows = [change(row, rng) for row in sample(rng, 16, 12, spread=1.5, share=SHARES[dtype])]

    assert min(model(dtype).excesses(rows)) > 1


def test_rounding_of_bfloat16_is_bad_where_both_sides_say_float32():
    """The bound follows from the data types."""
    rows = sample(np.random.default_rng(0), 8, 20, spread=2.0, share=SHARES["bfloat16"])

    assert min(model("float32").excesses(rows)) > 1


def test_forced_tokens_do_not_narrow_the_bound():
    """A grammar may force tokens far below a uniform choice, with rounding as usual."""
    rng = np.random.default_rng(1)
    recomputed = rng.normal(-14, 0.2, 16)
    row = Comparison(reported=recomputed + rng.normal(0, 0.06, 16), recomputed=recomputed)

    assert max(model("bfloat16").excesses([row])) < 1
