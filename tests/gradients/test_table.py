"""The committed table is what the code computes, and no default is biased."""

from __future__ import annotations

import random

import pytest
from tools.gradients.table import DEFAULT, FILE, compute, list_violations, names_of, parse_table, questions

TABLE = parse_table(FILE.read_text(encoding="utf-8"))
SMALL = random.Random(7).sample([one for one in questions() if one.group_size == 2 and one.discount == 1], 8)
REGENERATE = "run `nox -s gradients` and commit what it writes"


def test_the_table_has_every_cell():
    """A new setting, shape or rule is measured."""
    assert {question.key for question in questions()} == set(TABLE), REGENERATE
    for question in questions():
        assert names_of(question) == list(TABLE[question.key]), REGENERATE
    assert sum(map(len, TABLE.values())) >= 500


def test_no_default_is_biased():
    """Every default points along the gradient of what it is asked for, in every shape, with a positive scale."""
    assert [] == list_violations(TABLE)


@pytest.mark.parametrize("question", SMALL, ids=lambda question: question.shape)
def test_cells_of_small_groups_are_computed_anew(question):
    """All estimators for eight agents; the session computes the rest."""
    for name, bias in compute(question).items():
        expected = TABLE[question.key][name]
        assert bias.scale == pytest.approx(expected.scale, abs=1e-4), f"{name}: {REGENERATE}"
        assert bias.cosine == pytest.approx(expected.cosine, abs=1e-4), f"{name}: {REGENERATE}"


@pytest.mark.parametrize("shape", ["sub-agent decides", "the policy stops", "dense rewards"])
def test_the_default_is_computed_anew_in_groups_of_eight(shape):
    """The size that configurations have."""
    (question,) = [found for found in questions() if (found.shape, found.group_size) == (shape, 8)]
    (bias,) = compute(question, {DEFAULT}).values()
    assert bias.scale == pytest.approx(TABLE[question.key][DEFAULT].scale, abs=1e-4), REGENERATE
    assert bias.is_right
