"""Draws from several sources: shares by weight, and the epochs of each source over any resumptions."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping

from attrs import asdict, define, evolve, field
from hypothesis import given
from hypothesis import strategies as st
from tests.rollouts.test_exporter import make_group

from areal_actors.domain import DataPosition, Group, Problem
from areal_actors.rollouts.draws import DrawConfig, ProblemDraws
from areal_actors.training.actor import parse_position

Weights = Mapping[str, float]
weights_of_sources = st.dictionaries(st.sampled_from("abcd"), st.floats(0.01, 100), min_size=1, max_size=4)


def open_draws(weights: Weights, start: DataPosition | None = None) -> ProblemDraws:
    return ProblemDraws({name: DrawConfig(weight=weight) for name, weight in weights.items()}, start=start)


def draw(draws: ProblemDraws, num: int) -> list[tuple[str, int]]:
    return [draws.draw({})[:2] for _ in range(num)]


def group_of(source: str, position: int) -> Group:
    return evolve(make_group(position), problem=Problem(position=position, data={}, source=source))


def reload(position: DataPosition) -> DataPosition:
    """The position after it was written to a checkpoint and read again."""
    return parse_position({"position": json.loads(json.dumps(asdict(position)))})


@given(weights_of_sources, st.integers(1, 200))
def test_sources_get_their_shares(weights: Weights, num: int):
    """After any number of draws, no source is further from its share than the number of sources."""
    found = Counter(source for source, _ in draw(open_draws(weights), num))

    for name, weight in weights.items():
        assert abs(found[name] - num * weight / sum(weights.values())) < len(weights)


@given(weights_of_sources, st.integers(0, 50), st.integers(1, 50))
def test_resumed_run_draws_as_an_uninterrupted_one(weights: Weights, before: int, after: int):
    """If all that was drawn is done; each source is drawn in its own order."""
    whole, first = open_draws(weights), open_draws(weights)
    for source, position in draw(first, before):
        first.consume(group_of(source, position))
    resumed = open_draws(weights, reload(first.summary()))
    order = draw(whole, before + after)

    assert order[before:] == draw(resumed, after)
    for name in weights:
        positions = [position for source, position in order if source == name]
        assert list(range(len(positions))) == positions


@define
class Life:
    """One process of a run: its sources, the number of its draws, and those that are done when it ends."""

    weights: Weights
    num: int
    done: set[int] = field(factory=set)


lives = st.lists(
    st.builds(Life, weights_of_sources, st.integers(0, 30), st.sets(st.integers(0, 29))), min_size=1, max_size=6
)


@given(lives)
def test_no_resumption_leaves_out_or_repeats_a_problem(lives: list[Life]):
    """Whatever the weights are, whichever sources come and go, and however groups overtake one another."""
    position, done = DataPosition(), Counter[tuple[str, int]]()
    for life in [*lives, Life(dict.fromkeys("abcd", 1.0), 400, set(range(400)))]:
        draws = open_draws(life.weights, reload(position))
        drawn = draw(draws, life.num)
        assert len(drawn) == len(set(drawn))
        for name in life.weights:
            positions = [at for source, at in drawn if source == name]
            before = {at for source, at in done if source == name}
            expected = [at for at in range(1000) if at not in before]
            assert positions == expected[: len(positions)], "in the order of its epochs, from where it was"
        for index, (source, at) in enumerate(drawn):
            if index in life.done:
                draws.consume(group_of(source, at))
                done[source, at] += 1
        position = draws.summary()
    assert set(done.values()) == {1}


@given(weights_of_sources, weights_of_sources, st.integers(1, 100), st.integers(1, 100))
def test_new_weights_hold_from_the_resumption_on(before: Weights, after: Weights, num_before: int, num_after: int):
    """A source whose weight grew is not owed the draws of before."""
    first = open_draws(before)
    for source, position in draw(first, num_before):
        first.consume(group_of(source, position))
    found = Counter(source for source, _ in draw(open_draws(after, reload(first.summary())), num_after))
    shares = {name: weight / sum(after.values()) for name, weight in after.items()}

    # With the same weights, the shares are those over both processes.
    num = num_before + num_after if before == after else num_after
    counted = Counter(source for source, _ in draw(open_draws(before), num_before)) if before == after else Counter()
    assert all(abs(found[name] + counted[name] - num * share) < len(after) for name, share in shares.items())


@given(weights_of_sources, st.integers(1, 60))
def test_problems_are_sorted_alike_in_every_process(weights: Weights, num: int):
    """The order of groups in a step does not depend on when the run was resumed."""
    whole, first = open_draws(weights), open_draws(weights)
    drawn = draw(first, num)
    for source, position in drawn[: num // 2]:
        first.consume(group_of(source, position))
    resumed = open_draws(weights, reload(first.summary()))
    problems = [Problem(position=position, data={}, source=source) for source, position in drawn]

    assert sorted(problems, key=whole.order) == sorted(problems, key=resumed.order)


def test_source_that_comes_back_goes_on_where_it_was():
    """Also with a problem that had not been done when it left."""
    first = open_draws({"a": 1.0, "b": 1.0})
    for source, position in draw(first, 8):
        if (source, position) != ("b", 2):
            first.consume(group_of(source, position))
    second = open_draws({"a": 1.0}, reload(first.summary()))
    (alone,) = draw(second, 1)
    second.consume(group_of(*alone))
    third = open_draws({"b": 1.0, "a": 1.0}, reload(second.summary()))

    assert ("a", 4) == alone
    assert [("b", 2), ("a", 5), ("b", 4)] == draw(third, 3)
